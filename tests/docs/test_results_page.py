"""The page of results and the README say what the JSON files of results hold, and their pictures are drawn from these."""

from __future__ import annotations

import json

import pytest

from docs.make_pictures import EQUAL_BYTES, MEMORIES, PICTURES, RESULTS, TRAINED, main
from hf_rfa.convert import ConversionOptions
from hf_rfa.convert.checkpoint.source import open_checkpoint
from hf_rfa.convert.presets import with_preset
from tests.conftest import ROOT
from tests.families import save_softmax_model

ROWS = {(row["name"], row["context"]): row["perplexity"] for row in json.loads((RESULTS / "memory.json").read_text())}
#: Rows of the README's table, by that of the page's.
README_ROWS = {
    "window + sinks": "a window with sinks, same bytes",
    "with a summary too": "the command above, `--memory N --calibrate TEXT`",
}


def ratio(name: str, context: int) -> float | None:
    """Return a row's perplexity relative to softmax's, or None for a row that there is not."""
    perplexity = ROWS.get((name, context))
    return None if perplexity is None else perplexity / ROWS["softmax", context]


def table_row(label: str, values: list[float | None], digits: int) -> str:
    """Return a row of a table as the pages have it."""
    cells = ("| " if value is None else f"| {value:.{digits}f} " for value in values)
    return f"| {label} {''.join(cells)}|"


#: Options of rows that one command makes.
COMMANDS = {"with a summary too": "`--memory N`"}


@pytest.mark.parametrize("label", list(EQUAL_BYTES))
def test_the_page_has_the_rows_of_equal_bytes(label):
    page = (ROOT / "docs" / "results.md").read_text()
    table = page.partition("| at 1,024 tokens |")[2].partition("\n\n")[0]
    row = f"{label}, {COMMANDS[label]}" if label in COMMANDS else label
    assert table_row(row, [ratio(name, 1024) for name in EQUAL_BYTES[label][1]], 3) in table
    if label == "with a summary too":
        trained = [ratio(f"{name} trained", 1024) for name in EQUAL_BYTES[label][1]]
        assert table_row("… trained", trained, 3) in table


def test_the_study_has_every_row_of_the_charts():
    study = (RESULTS / "memory.md").read_text()
    names = [name for _, names in EQUAL_BYTES.values() for name in names]
    for name in [*names, *(f"{TRAINED.get(name, name)} trained" for name in names)]:
        values = [(ROWS.get((name, context)), ratio(name, context)) for context in (1024, 2048)]
        if None not in values[0]:
            assert " | ".join(f"{perplexity:.2f} ({relative:.3f})" for perplexity, relative in values) in study, name


@pytest.mark.parametrize("label", list(README_ROWS))
def test_the_readme_has_the_same_figures(label):
    readme = (ROOT / "README.md").read_text()
    names = EQUAL_BYTES[label][1]
    assert table_row(README_ROWS[label], [ratio(name, 1024) for name in names], 2) in readme
    if label == "with a summary too":
        trained = [ratio(f"{name} trained", 1024) for name in names]
        assert table_row("… trained for an hour on one CPU core", trained, 2) in readme


def test_the_rows_by_memory_are_what_the_command_gives(tmp_path):
    """`hf-rfa convert SMOLLM2 FOLDER --memory N --calibrate TEXT`, in the rows of figures and in the study."""
    shape = {"hidden_size": 36, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    save_softmax_model("llama", tmp_path, **shape, head_dim=64, max_position_embeddings=2048)
    study = (RESULTS / "memory.md").read_text()
    for memory, name in zip(MEMORIES, EQUAL_BYTES["with a summary too"][1], strict=True):
        given = ConversionOptions(memory=memory, calibrate_on="text.txt")
        options = with_preset(open_checkpoint(tmp_path), given)
        sizes = (options.window_size, options.num_sinks, options.num_slots)
        heads, window, slots = options.retrieval_heads, options.retrieval_window, options.retrieval_slots
        assert name == f"{'+'.join(map(str, sizes))}s{options.num_features}r{heads}x{window}+{slots}"
        kept = " + ".join(map(str, sizes))
        assert f"| `--memory {memory}`: {kept} and a summary, {heads} × ({window} + {slots}) |" in study


def test_the_pictures_are_drawn_from_the_results(tmp_path):
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.svg" for name in PICTURES}
    for page in (ROOT / "README.md", ROOT / "docs" / "results.md"):
        assert any(f"{name}.svg)" in page.read_text() for name in PICTURES)
    assert all((ROOT / "docs" / f"{name}.svg").is_file() for name in PICTURES)
