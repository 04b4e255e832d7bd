"""Prose that is easy to read: short sentences, lines that fit a terminal, tables with one unit a column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.test_docs import prose

#: Generated pages.
LEFT_OUT = {"api.md", "models.md"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in LEFT_OUT]
MAX_WORDS, MAX_COLUMNS = 40, 120
UNIT = r"(?:ms|s|min|h|KiB|MiB|GiB|MB|GB|%|×)"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and of list items; a link is its text, and code one word."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?= *(?:- |\d+\. ))", re.sub(r"(?m)^(?:#|\||!\[|    ).*$", "", text)):
        words = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block))
        found += re.split(r"(?<=[.!?])[)*\"]*\s+", " ".join(words.split()))
    return found


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of every table, without its head."""
    found = re.findall(r"(?m)^\|.*\n\|(?:[ :-]+\|)+\n((?:\|.*\n?)*)", text)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]


def mixed_columns(table: list[list[str]]) -> list[set[str]]:
    """Return the units of every column whose numbers have more than one, no unit being one too."""
    units = []
    for column in zip(*table, strict=True):
        matches = (re.fullmatch(rf"[\d.,]+ ?({UNIT}?)", cell) for cell in column)
        units.append({match[1] for match in matches if match})
    return [of_column for of_column in units if len(of_column) > 1]


@each_page
def test_sentences_are_short(page: Path):
    long = [text for text in sentences(prose(page)) if len(text.split()) > MAX_WORDS]
    assert long == [], "\n".join(long)


@each_page
def test_lines_fit(page: Path):
    long = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > MAX_COLUMNS]
    assert long == [], f"{page.name}: lines {long} are longer than {MAX_COLUMNS} columns"


@each_page
def test_a_column_of_a_table_has_one_unit(page: Path):
    assert [mixed for table in tables(page.read_text()) for mixed in mixed_columns(table)] == []


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", re.sub(r"(?m)^    .*$", "", prose(ROOT / "README.md")))
    numbers = re.findall(r"(?<![\w.,-])\d[\d.,]*\b(?!-\w)", plain)
    assert len(numbers) <= 25, numbers


def test_what_is_wrong_would_be_found():
    long = " ".join(["word"] * 41) + "."
    assert [len(text.split()) for text in sentences(f"One. {long}\n\n- item one\n- item two\n")] == [1, 41, 3, 3]
    (table,) = tables("| a | b |\n|---|---|\n| 1 ms | 2.0 |\n| 3 s | 1 |\n| | 4 |\n")
    assert mixed_columns(table) == [{"ms", "s"}]
