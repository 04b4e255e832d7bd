"""Recipes of fine-tuning and of distillation, and new models."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    Seq2SeqTrainingArguments,
)

from hf_rfa.convert import InputError
from hf_rfa.finetune.arguments import FinetuneArguments, read_overrides
from hf_rfa.finetune.data import load_data, load_pairs, packed_blocks, select_columns, single_documents, token_pairs
from hf_rfa.finetune.recipe import FOLDER, Recipe, Stage, fast_bf16, load_settings, product_seconds
from hf_rfa.finetune.tasks import finetune
from hf_rfa_cli.options import UsageError
from hf_rfa_cli.train import finetune_parser, finetune_values
from tests.conftest import leftovers, save_tiny_tokenizer, words
from tests.training import run, write_rows

RECIPES = sorted(path.stem for path in (FOLDER / "finetune").glob("*.yaml"))
TINY = {"gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2}, "bart": {"encoder_layers": 1, "decoder_layers": 1}}
TINY["llama"] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY["llama"] |= {"num_attention_heads": 2, "num_key_value_heads": 2}
TINY["bart"] |= {name: 16 for name in ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")}
TINY["bart"] |= {name: 2 for name in ("encoder_attention_heads", "decoder_attention_heads")}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    save_tiny_tokenizer(folder / "tokenizer")
    rows = [{"text": words(3 + n % 7, n), "target": words(9 - n % 7, 3 * n), "label": n % 2} for n in range(80)]
    for row in rows:
        row |= {"source": row["text"], "prompt": row["target"]}
        row["translation"] = {"en": row["source"], "de": row["target"]}
    write_rows(folder / "rows.jsonl", rows)
    for name, column in (("a.en", "source"), ("a.de", "target")):
        (folder / name).write_text("\n".join(row[column] for row in rows))
    return folder


def parse(words: list[str]):
    return finetune_parser().parse_dict(finetune_values(words), allow_extra_keys=True)


@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains(name, small, material, tmp_path):
    """With the data and the size of its model replaced, and two steps."""
    recipe = load_settings(name, small=small)
    family = recipe.get("model_type", "rfa_gpt2").removeprefix("rfa_")
    options = {"train": material / "rows.jsonl", "evaluate": material / "rows.jsonl", "output-dir": tmp_path / "out"}
    options |= {"max-steps": 2, "warmup-steps": 1, "save-steps": 2, "block-length": 32, "use-cpu": True}
    options |= {"per-device-train-batch-size": 2, "per-device-eval-batch-size": 8}
    if "model_type" in recipe:
        positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
        options["config-overrides"] = json.dumps(TINY[family] | {positions: 32})
    else:
        AutoTokenizer.from_pretrained(material / "tokenizer").save_pretrained(tmp_path / "model")
        config = AutoConfig.for_model("rfa_gpt2", vocab_size=64, n_positions=32, pad_token_id=1, **TINY["gpt2"])
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        options |= {"model": tmp_path / "model"}
    if "tokenizer" in recipe:
        options["tokenizer"] = material / "tokenizer"
    words = ["--recipe", name, *(["--small"] if small else [])]
    words += [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    options, arguments = parse(words)
    metrics = finetune(options, arguments)
    expected = {"clm": "eval_perplexity", "seq2seq": "eval_bleu", "classify": "eval_accuracy"}[recipe["task"]]
    assert metrics[expected] >= 0
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["model_type"] == recipe.get("model_type", "rfa_gpt2")
    for field, value in recipe.get("config_overrides", {}).items():
        if field not in {**TINY[family], "n_positions": 0, "max_position_embeddings": 0}:
            assert saved[field] == value, field
    expected_files = ["model", "out"] if "model_type" not in recipe else ["out"]
    assert leftovers(tmp_path) == expected_files


def test_options_of_the_command_line_win_over_the_recipe(tmp_path):
    (tmp_path / "my.yaml").write_text(
        "{task: clm, max_steps: 9, config_overrides: {n_layer: 3, n_head: 2},\n"
        " small: {max_steps: 5, config_overrides: {n_layer: 2}}}\n"
    )
    shared = ["--train", "x", "--recipe", str(tmp_path / "my.yaml"), "--output_dir", "y", "--use_cpu"]
    options, arguments = parse(shared)
    assert (arguments.max_steps, read_overrides(options.config_overrides)) == (9, {"n_layer": 3, "n_head": 2})
    options, arguments = parse([*shared, "--small"])
    assert (arguments.max_steps, read_overrides(options.config_overrides)) == (5, {"n_layer": 2, "n_head": 2})
    for dash in "_-":
        words = ["--small", f"--max{dash}steps", "7", f"--config{dash}overrides", '{"n_head": 4}']
        options, arguments = parse([*shared, *words])
        assert (arguments.max_steps, read_overrides(options.config_overrides)) == (7, {"n_layer": 2, "n_head": 4})


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--recipe", "nothing"], "there is no recipe nothing. Pass a YAML file, or one of: copy, "),
        (["--recipe", "none.yaml", "--small"], "has no small variant"),
        (["--small"], "pass --recipe with it"),
        (["--recipe", "wrong.yaml"], "wrong.yaml: max_steps must be int, got 'many'"),
        (["--recipe", "unknown.yaml"], r"unknown.yaml has no setting max_step. Did you mean max_steps\?"),
        (["--task", "clm", "--train", "x", "--max-step-s", "3"], r"no option --max-step-s. Did you mean --max-steps\?"),
        (["--recipe", "copy", "--train", "x"], "--output is missing"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_named(words, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.yaml").write_text("task: clm\n")
    (tmp_path / "wrong.yaml").write_text("{task: clm, train: x, max_steps: many}\n")
    (tmp_path / "unknown.yaml").write_text("{task: clm, train: x, max_step: 3}\n")
    with pytest.raises((InputError, UsageError), match=match):
        finetune_values(words)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "pass either --model, a checkpoint, or --model-type"),
        ({"model": "m", "config_overrides": "{}"}, "--config-overrides goes with --model-type"),
        ({"model_type": "gpt2"}, "--model-type needs a tokenizer"),
        ({"model_type": "gpt2", "tokenizer": "t", "config_overrides": "[1]"}, "must be a JSON object such as"),
        ({"model_type": "gpt9", "byte_tokenizer": True}, "cannot make a configuration of type gpt9"),
        ({"model_type": "gpt2", "byte_tokenizer": True, "config_overrides": '{"layers": 3}'}, "has no field layers"),
        ({"model": "m", "task": "seq2seq", "prompt_column": "a"}, "--prompt-column is an option of the task clm"),
        ({"model": "m", "task": "seq2seq", "evaluate_references": "a"}, "needs --evaluate"),
        ({"model": "m", "task": "classify", "streaming": True}, "--streaming does not fit --task classify"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match, tmp_path):
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, max_steps=2)
    with pytest.raises(InputError, match=match):
        finetune(FinetuneArguments(**{"task": "clm", "train": "none.jsonl", **options}), arguments)
    assert leftovers(tmp_path) == []


def test_prompts_are_read_and_not_learned(material):
    tokenizer = ByT5Tokenizer(extra_ids=0)
    data = select_columns(load_data(str(material / "rows.jsonl")), "rows", {"text": "text", "prompt": "prompt"})
    ids, labels, starts = [], [], set()
    for row, source in zip(single_documents(data, tokenizer, length=500), data, strict=True):
        prompt, text = (list(source[name].encode()) for name in ("prompt", "text"))
        expected = [byte + 3 for byte in prompt + text] + [tokenizer.eos_token_id]
        assert row["input_ids"] == expected
        assert row["labels"] == [-100] * len(prompt) + expected[len(prompt) :]
        starts.add(len(ids))
        ids, labels = ids + row["input_ids"], labels + row["labels"]
    for start, row in enumerate(packed_blocks(data, tokenizer, length=64)):
        stretch = slice(64 * start, 64 * start + 64)
        assert row["input_ids"] == ids[stretch]
        first = [index in starts or index == stretch.start for index in range(*stretch.indices(len(ids)))]
        assert [position == 0 for position in row["position_ids"]] == first, "a document, or a piece of it, begins"
        assert all(after in (0, before + 1) for before, after in pairwise(row["position_ids"]))
        learned = zip(row["position_ids"], labels[stretch], strict=True)
        assert row["labels"] == [-100 if position == 0 else label for position, label in learned]
    assert start == len(ids) // 64 - 1 > 0


def test_pairs_come_from_lines_and_from_columns_in_columns(material):
    tokenizer = AutoTokenizer.from_pretrained(material / "tokenizer")
    rows = load_data(str(material / "rows.jsonl"))
    pairs = select_columns(rows, "rows", {"source": "translation.en", "target": "translation.de"})
    for row, source in zip(token_pairs(pairs, tokenizer, length=32), rows, strict=True):
        assert row["input_ids"] == tokenizer(source["translation"]["en"])["input_ids"]
        assert row["labels"] == tokenizer(source["translation"]["de"])["input_ids"]
    lines = load_pairs(material / "a.en", material / "a.de")
    assert lines.to_dict() == {name: rows[name] for name in ("source", "target")}


def new_model(material, model_type: str, **overrides) -> dict:
    """Return the options for a new model of a type."""
    overrides |= TINY["gpt2" if "gpt2" in model_type else "bart"]
    tokenizer = str(material / "tokenizer")
    return {"model_type": model_type, "tokenizer": tokenizer, "config_overrides": json.dumps(overrides), "model": None}


@pytest.mark.parametrize("model_type", ["rfa_gpt2", "rfa_bart"])
def test_a_new_model_takes_its_ids_from_the_tokenizer(model_type, material, tmp_path):
    task = "clm" if "gpt2" in model_type else "seq2seq"
    columns = {} if task == "clm" else {"source_column": "prompt", "target_column": "text"}
    run(material, tmp_path, task=task, steps=2, seed=3, **new_model(material, model_type), **columns)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = (AutoModelForCausalLM if task == "clm" else AutoModelForSeq2SeqLM).from_pretrained(tmp_path / "out")
    assert model.config.model_type == model_type
    assert getattr(model.config, "feature_seed", 3) == 3, "the seed of the training draws the random vectors"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    if task == "seq2seq":
        assert model.config.decoder_start_token_id == tokenizer.eos_token_id
    model.generate(**tokenizer("w5 w6", return_tensors="pt"), max_new_tokens=3)


def test_the_seed_sets_the_weights_of_a_new_model(material, tmp_path):
    options = new_model(material, "rfa_gpt2", feature_seed=5)
    for number, name in enumerate("ab"):
        torch.manual_seed(number)
        run(material, tmp_path / name, steps=1, seed=3, **options)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out").config.feature_seed == 5
    a, b = ((tmp_path / name / "out" / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


# Distillation


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("transfer: {steps: -1}", r"transfer.steps must be a number of at least 0, got -1"),
        ("end_to_end: {kl_weight: 2}", r"end_to_end.kl_weight must be from 0 to 1, got 2"),
        ("end_to_end: {learning_rate: fast}", r"end_to_end: learning_rate must be float, got 'fast'"),
        ("transfer: {bf16: 1}", r"transfer: bf16 must be .*bool.*auto.*, got 1"),
        ("transfers: {steps: 3}", r"recipe.yaml has no setting transfers. Did you mean transfer"),
        ("- 1", "holds no settings"),
        ("a: [", "cannot read the recipe"),
    ],
)
def test_recipes_are_checked(text, match, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=match):
        Recipe.load(tmp_path / "recipe.yaml")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU says itself whether it computes in bf16")
@pytest.mark.parametrize(("in_bf16", "faster"), [(0.6, True), (0.7, False), (1.8, False)])
def test_bf16_is_chosen_where_a_processor_is_faster_in_it(in_bf16, faster, monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: in_bf16}
    monkeypatch.setattr("hf_rfa.finetune.recipe.product_seconds", seconds.get)
    fast_bf16.cache_clear()
    resolved = Recipe.load("pretrained").resolve(SimpleNamespace(is_encoder_decoder=False), 512)
    fast_bf16.cache_clear()
    assert (resolved.end_to_end.bf16, resolved.transfer.bf16) == (faster, False)


def test_timing_a_processor_draws_no_random_numbers():
    """A run is the same whether the precision was asked before or not: the answer is remembered."""
    before = torch.get_rng_state()
    assert product_seconds(torch.bfloat16) > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("positions", "pairs", "lengths", "sizes", "shares"),
    [
        (8192, False, (1024, 2048), (2, 1), (0.0, 0.5)),  # two blocks of 1,024 teach less end to end
        (1500, False, (1024, 1500), (2, 1), (0.0, 0.5)),
        (512, False, (512, 512), (4, 4), (0.0, 0.5)),
        (8192, True, (1024, 1024), (8, 8), (0.0, 0.0)),
    ],
)
def test_blocks_are_as_long_as_a_step_end_to_end(positions, pairs, lengths, sizes, shares):
    """And repeat themselves, which pairs cannot."""
    config = SimpleNamespace(is_encoder_decoder=pairs)
    recipe = Recipe(Stage(steps=1), Stage(steps=1, repeating_share=0.5))
    stages = recipe.resolve(config, positions).stages().values()
    assert tuple(stage.block_length for stage in stages) == lengths
    assert tuple(stage.batch_size for stage in stages) == sizes
    assert tuple(stage.repeating_share for stage in stages) == shares
