"""Data sets that a program writes: what ListOps expressions are worth, and the files."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.synthetic import CLOSE, OPERATORS, copy_task, evaluate_listops, listops, main


def by_hand(text: str) -> int:
    """The value of a ListOps expression through Python's own parser of nested lists."""
    spaced = "".join(f"['{symbol}'," if symbol in OPERATORS else f"{symbol}," for symbol in text)
    nested = json.loads(spaced.replace(",]", "]").rstrip(",").replace("'", '"'))

    def value(node):
        if isinstance(node, int):
            return node
        values = sorted(value(each) for each in node[1:])
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
        return {"M": values[-1], "m": values[0], "D": middle, "S": sum(values) % 10}[node[0]]

    return value(nested)


def test_listops_are_worth_what_they_say():
    assert evaluate_listops("M25m71]9]") == 9
    assert evaluate_listops("S999D1234]]") == 9
    rows = list(listops(60, min_length=4, max_length=300, seed=0))
    for row in rows:
        assert 4 <= len(row["text"]) <= 300
        assert row["label"] == by_hand(row["text"])
    assert len({row["label"] for row in rows}) == 10
    assert rows == list(listops(60, min_length=4, max_length=300, seed=0))
    assert rows != list(listops(60, min_length=4, max_length=300, seed=1))
    for length in (4, 5, 6, 7, 2000):
        (row,) = listops(1, min_length=length, max_length=length, seed=2)
        assert len(row["text"]) == length
        depth = deepest = 0
        for symbol in row["text"]:
            depth += (symbol in OPERATORS) - (symbol == CLOSE)
            deepest = max(deepest, depth)
        assert deepest <= 10


@pytest.fixture
def write(monkeypatch):
    """The program, with its arguments."""

    def call(*words) -> None:
        monkeypatch.setattr(sys, "argv", ["synthetic", *map(str, words)])
        main()

    return call


@pytest.mark.parametrize(("name", "make", "least", "most"), [("listops", listops, 20, 30), ("copy", copy_task, 2, 5)])
def test_the_program_writes_data(name, make, least, most, tmp_path, write, capsys):
    command = (name, tmp_path / name, "--rows", 7, "--seed", 3, "--min-length", least, "--max-length", most)
    write(*command)
    rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert rows == list(make(7, min_length=least, max_length=most, seed=3))
    with pytest.raises(SystemExit):
        write(*command)
    assert "exists and is kept" in capsys.readouterr().err
    for row in rows if name == "copy" else ():
        assert row["prompt"] == row["text"] + "|"
        assert 2 <= len(row["text"]) <= 5
