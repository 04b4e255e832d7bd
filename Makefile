# Python 3.11 or later. `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3.11
MODEL ?= demo/model
VENV := .venv
BIN := $(VENV)/bin
# One process per core; each runs one thread (tests/conftest.py), and neighbouring tests, which share what they set up.
JOBS ?= $(shell nproc)
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test test-all docs style quality clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m demo.run --model $(MODEL)

test: $(VENV)/installed
	$(PYTEST)

test-all: $(VENV)/installed
	$(PYTEST) -m "not slow"
	$(BIN)/python -m pytest -m slow

docs: $(VENV)/installed
	$(BIN)/python docs/make_api.py

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo/out
