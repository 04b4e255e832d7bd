"""The documentation: links, commands, code, the page that `make docs` writes, and prose that is easy to read."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import shlex
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

import hf_rfa
from hf_rfa import convert, evaluation, inference
from hf_rfa_cli import main as cli
from hf_rfa_cli import train as cli_train
from hf_rfa_cli.options import UsageError
from tests.conftest import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [path for folder in ("docs", "benchmarks/results") for path in sorted((ROOT / folder).glob("*.md"))]
MODULES = [
    path for folder in ("hf_rfa", "hf_rfa_cli", "convert", "finetune") for path in sorted((ROOT / folder).rglob("*.py"))
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's fenced blocks in a language, without their indent."""
    texts = re.findall(rf"(?m)^( *)```{language}\n((?:.*\n)*?) *```$", page.read_text())
    return [re.sub(rf"(?m)^{indent}", "", text) for indent, text in texts]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"(?m)^ *```.*\n(?:.*\n)*?^ *```$", "", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the hub make them."""
    names: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        number = sum(1 for each in names if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each))
        names.add(f"{anchor}-{number}" if number else anchor)
    return names


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}, of {sorted(anchors(file))}"


@cache
def text_of_tests() -> str:
    """Return the text of all tests."""
    return "".join(path.read_text() for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("hf-rfa-vllm/tests/*.py")))


@each_page
def test_files_and_modules_that_are_named_exist(page):
    for path in re.findall(
        r"`((?:hf_rfa|hf_rfa_cli|convert|finetune|tests|docs|benchmarks|demo|examples)/[\w./-]*)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    for module in re.findall(r"-m ((?:hf_rfa|benchmarks|demo)[\w.]*)", page.read_text()):
        assert importlib.util.find_spec(module), f"{page.name}: {module}"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{page.name}: {path}::{name}"
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert name in text_of_tests(), f"{page.name}: {name}"


@each_page
def test_python_compiles(page):
    for text in blocks(page, "python"):
        if page.name != "api.md":  # signatures there
            fragment = text.lstrip().startswith('"')  # an entry of a dictionary
            compile(f"{{{text}}}" if fragment else text, page.name, "exec")


@cache
def commands() -> dict[str, typer.core.TyperCommand]:
    return typer.main.get_command(cli.app).commands


@cache
def options_of(command: str) -> set[str]:
    if command == "finetune":
        return {*cli_train.finetune_parser()._option_string_actions}
    return {"--help", *(name for each in commands()[command].params for name in (*each.opts, *each.secondary_opts))}


def parse(command: str, words: list[str]) -> None:
    """Parse a command line as the program does, and run nothing."""
    if command == "finetune":
        cli_train.finetune_values(words)
    else:
        with patch.object(Path, "is_file", return_value=True):  # the files that pages name are not there
            commands()[command].make_context(command, list(words))


def command_lines(page: Path) -> list[tuple[str, bool]]:
    """Return every ``hf-rfa …`` of a page, and whether it stands in a block, complete."""
    lines = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.replace("-m hf_rfa_cli", "&& hf-rfa").split("&&"):
                if part.strip().startswith("hf-rfa "):
                    lines.append((part.strip(), True))
    return lines + [(span, False) for span in re.findall(r"`(hf-rfa [^`]*)`", prose(page))]


@each_page
def test_commands_parse(page, tmp_path, monkeypatch):
    (tmp_path / "my-own.yaml").write_text("{task: clm, train: book.txt, model: some}")
    monkeypatch.chdir(tmp_path)
    for line, complete in command_lines(page):
        words = shlex.split(line, comments=True)[1:]
        if words[0].startswith("-"):
            assert words == ["--help"]
            continue
        assert words[0] in commands(), line
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= options_of(words[0]), f"{line}: {sorted(used - options_of(words[0]))}"
        if complete and not {"…", "--help"} & set(words):
            parse(words[0], words[1:])


@each_page
def test_options_that_are_named_exist(page):
    known = set().union(*(options_of(command) for command in commands()))
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
            assert name in known, f"{page.name}: {span}"


def test_a_wrong_option_would_be_found():
    with pytest.raises(Exception, match="No such option: --calibration"):
        parse("convert", ["a", "b", "--calibration", "c"])
    with pytest.raises(UsageError, match="--nothing"):
        parse("finetune", ["--model", "a", "--task", "clm", "--train", "b", "--nothing", "c"])


@pytest.mark.parametrize("path", [*MODULES, *PAGES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_names_that_are_referred_to_exist(path):
    for name in set(re.findall(r"`(hf_rfa(?:\.\w+)+)", path.read_text())):
        pkgutil.resolve_name(name)  # or raises


def test_every_public_name_stands_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    public = {*hf_rfa.__all__, *convert.__all__, *evaluation.__all__, *inference.__all__} - {"__version__"}
    public |= {cls.__name__ for cls in hf_rfa.FEATURE_MAPS.values()}
    missing = [name for name in sorted(public) if not re.search(rf"`(hf_rfa\.[\w.]*)?\b{name}`", page)]
    assert missing == []


def test_the_api_page_is_what_make_docs_writes():
    pytest.importorskip("griffe2md", reason="griffe2md is not installed")
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "api.md").read_text() == module.make_page(), "run make docs"


# Prose that is easy to read: short sentences, lines that fit a terminal, tables with one unit a column

#: Generated pages.
LEFT_OUT = {"api.md", "models.md"}
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PROSE += [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in LEFT_OUT]
MAX_WORDS, MAX_COLUMNS = 40, 120
UNIT = r"(?:ms|s|min|h|KiB|MiB|GiB|MB|GB|%|×)"
each_prose = pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)


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


@each_prose
def test_sentences_are_short(page: Path):
    long = [text for text in sentences(prose(page)) if len(text.split()) > MAX_WORDS]
    assert long == [], "\n".join(long)


#: Phrases of translated English: "except", "on a CPU", "is in", "instead of", "must be" say it better.
AVOIDED = r"\b(but for|a matter of|on a processor|stands in|is of|all the same|in place of|otherwise than|has to be)\b"


@each_prose
def test_phrases_of_translated_english_are_avoided(page: Path):
    assert re.findall(AVOIDED, " ".join(prose(page).split()).lower()) == []


@each_prose
def test_lines_fit(page: Path):
    long = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > MAX_COLUMNS]
    assert long == [], f"{page.name}: lines {long} are longer than {MAX_COLUMNS} columns"


@each_prose
def test_a_column_of_a_table_has_one_unit(page: Path):
    assert [mixed for table in tables(page.read_text()) for mixed in mixed_columns(table)] == []


@pytest.mark.parametrize(("page", "most"), [(ROOT / "README.md", 25), (ROOT / "docs" / "results.md", 60)])
def test_few_numbers_stand_on_a_page(page, most):
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", re.sub(r"(?m)^    .*$", "", prose(page)))
    numbers = re.findall(r"(?<![\w.,-])\d[\d.,]*\b(?!-\w)", plain)
    assert len(numbers) <= most, numbers


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_what_is_wrong_would_be_found():
    long = " ".join(["word"] * 41) + "."
    assert [len(text.split()) for text in sentences(f"One. {long}\n\n- item one\n- item two\n")] == [1, 41, 3, 3]
    (table,) = tables("| a | b |\n|---|---|\n| 1 ms | 2.0 |\n| 3 s | 1 |\n| | 4 |\n")
    assert mixed_columns(table) == [{"ms", "s"}]
