"""``benchmarks.phone_books``: what it counts, against answers that are known."""

from __future__ import annotations

import sys

from benchmarks import phone_books
from hf_rfa.convert import convert
from tests.conftest import DEMO_MODEL


def test_a_model_that_sees_as_much_answers_as_its_parent(tmp_path, monkeypatch, capsys):
    options = {"preset": "exact", "num_sinks": 1, "num_slots": 0}
    convert(DEMO_MODEL, tmp_path / "wide", **options, window_size=128)
    convert(DEMO_MODEL, tmp_path / "narrow", **options, window_size=2)
    words = ["phone_books", DEMO_MODEL, tmp_path / "wide", tmp_path / "narrow", "--window", "128+1", "--books", "6"]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--entries", "3"])
    phone_books.main()
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[-4:]]
    softmax, window, wide, narrow = cells
    assert window[0] == "window 128 + 1 sinks"
    assert softmax[1:3] == window[1:3] == wide[1:3]
    assert window[3:] == wide[3:] == ["0", "0"]
    assert narrow[2] != softmax[2]
