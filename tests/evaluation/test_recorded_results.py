"""Results beside a checkpoint: evaluation.json and the model card."""

from __future__ import annotations

import json

from huggingface_hub import ModelCard

from tests.training import save_checkpoints


def test_results_are_recorded_beside_the_weights(tmp_path, run_cli, capsys):
    model = save_checkpoints(tmp_path, "gpt2", preset="rfa", num_features=8, window_size=4) / "gpt2-rfa"
    before = ModelCard.load(model / "README.md").text
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{4 + (n * n + len(name)) % 50}" for n in range(90)) + name)
    assert run_cli("evaluate", model, tmp_path / "a.txt", "--context-length", 16) == 0
    assert not (model / "evaluation.json").exists()
    for text, length, component in (("a", 16, "both"), ("b", 16, "both"), ("a", 32, "both"), ("a", 16, "linear")):
        options = ["--context-length", length, "--attention-component", component, "--record"]
        assert run_cli("evaluate", model, tmp_path / f"{text}.txt", *options) == 0
    results = json.loads((model / "evaluation.json").read_text())
    assert [each["data"] for each in results] == ["a.txt", "b.txt", "a.txt", "a.txt"]
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity")]
    assert [f"{each['scores']['perplexity']:.2f}" for each in results] == printed[1:]
    assert results[3]["protocol"].endswith("linear component alone")
    card = ModelCard.load(model / "README.md")
    assert sorted(each.metric_value for each in card.data.eval_results) == sorted(
        round(each["scores"]["perplexity"], 4) for each in results
    )
    assert before.strip() in card.text
    assert run_cli("evaluate", model, tmp_path / "b.txt", "--context-length", 16, "--record") == 0
    again = ModelCard.load(model / "README.md")
    assert len(again.data.eval_results) == 4
    assert again.text.count("## Evaluation") == 1
    assert again.text.count("| b.txt | perplexity |") == 1
    assert before.strip() in again.text


def test_translations_are_recorded_too(tmp_path, run_cli):
    save_checkpoints(tmp_path, "bart", preset="rfa", num_features=8)
    (tmp_path / "a.en").write_text("w5 w6\nw7 w8\n")
    (tmp_path / "a.de").write_text("w9 w6\nw7\n")
    options = ["--references", tmp_path / "a.de", "--max-new-tokens", 4, "--record"]
    assert run_cli("evaluate", tmp_path / "bart", tmp_path / "a.en", "--task", "translation", *options) == 0
    (result,) = json.loads((tmp_path / "bart" / "evaluation.json").read_text())
    card = ModelCard.load(tmp_path / "bart" / "README.md")
    (found,) = card.data.eval_results
    assert (found.task_type, found.metric_name) == ("translation", next(iter(result["scores"])))
    row = next(line for line in card.text.splitlines() if line.startswith("| a.en"))
    assert row.count("|") == 5


def test_a_name_on_the_hub_takes_no_record(tmp_path, run_cli, capsys):
    (tmp_path / "a.txt").write_text("w5 w6")
    assert run_cli("evaluate", "someone/model", tmp_path / "a.txt", "--record") == 1
    assert "is not a folder with a checkpoint" in capsys.readouterr().err
