"""``benchmarks.serving`` on a tiny model."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.serving import __main__ as program


@pytest.mark.slow
def test_turns_and_requests_at_once_are_timed(folder, tmp_path, monkeypatch):
    sizes = ["--turns", "3", "--words", "4", "--requests", "1", "2", "--tokens", "4", "--servers", "hf-rfa serve"]
    monkeypatch.setattr(sys, "argv", ["serving", str(folder), *sizes, "--output", str(tmp_path / "rows.json")])
    program.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["requests"] for row in rows[:2]] == [1, 2]
    assert [row["turn"] for row in rows[2:]] == [1, 2, 3]
    assert all(row["tokens per second"] > 0 for row in rows[:2])
    assert all(row["seconds"] > 0 for row in rows[2:])
