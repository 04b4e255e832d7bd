"""Decoders exported to ONNX: the graph against torch, for any split, padding and length; refusals; whole folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_rfa import InputError
from hf_rfa.export import export, exporting
from hf_rfa.inference import load_model
from tests.exported import OPTIONS, SUMMARY, saved
from tests.families import make, tokens

pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'hf-rfa[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'hf-rfa[export]'")

LENGTH = 200


def with_graph(folder: Path, **options: Any) -> tuple[Any, Path]:
    """Return a tiny model and the folder of its graph, which reads 16 tokens at a time."""
    from hf_rfa.export import onnx_model

    torch.manual_seed(0)
    checkpoint = saved(folder / "model", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_model, "PASS_LENGTH", 16)
        export(str(checkpoint), folder / "graph")
    return load_model(str(checkpoint))[0], folder / "graph"


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> tuple[Any, Path]:
    """A model without features, with another rule of importance than a learned one."""
    return with_graph(tmp_path_factory.mktemp("exact"), importance="key_norm")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Any, Path]:
    """A model with a summary, whose last two layers repeat the graph of another."""
    heads = {"retrieval_heads": [[0, 1], [2, 0]], "num_hidden_layers": 4}
    return with_graph(tmp_path_factory.mktemp("summary"), **SUMMARY, **heads)


@pytest.fixture(params=[True, False], ids=["by blocks", "by tokens"])
def int8(exported, tmp_path, request) -> Path:
    """The file of the same graph with weights of 8 bits."""
    import onnx_ir as ir

    from hf_rfa.export.int8 import quantize
    from hf_rfa.export.onnx_model import save

    path = tmp_path / "int8.onnx"
    model = ir.load(exported[1] / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.export.int8.LEAST_SIZE", 1)
        quantize(model, by_blocks=request.param)
    save(model, path)
    return path


def read(path: Path, ids: Tensor, mask: Tensor, lengths: list[int]) -> list[Tensor]:
    """Return the logits after every one of some pieces of a text."""
    from hf_rfa.export.running import RunningGraph

    running = RunningGraph(path, batch=len(ids))
    parts = zip(ids.split(lengths, 1), mask.split(lengths, 1), strict=True)
    return [running.read(*part) for part in parts]


@pytest.mark.parametrize("kind", ["exact", "exported"])
@pytest.mark.parametrize(
    "lengths",
    [[1] * LENGTH, [LENGTH], [63, 1, 1, 70, 65], [1, 63, 136], [7] * 28 + [4]],
    ids=["steps", "at once", "odd", "1 and 63", "sevens"],
)
@torch.no_grad()
def test_a_graph_gives_the_models_logits_however_texts_are_split_and_padded(kind, lengths, request):
    model, folder = request.getfixturevalue(kind)
    ids, mask = tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :17], mask[2, :64] = 0, 0
    expected = model(ids, attention_mask=mask).logits
    end = 0
    for length, found in zip(lengths, read(folder / "model.onnx", ids, mask, lengths), strict=True):
        end += length
        begun = mask[:, end - 1] == 1
        assert_close(found[begun], expected[begun, end - 1], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_padding_may_stand_anywhere(exported):
    """Before, between and behind tokens, and a row may have none in a call."""
    model, folder = exported
    ids, mask = tokens(2, 40), torch.randint(0, 2, (2, 40))
    mask[:, -1], mask[1, 20:30] = 1, 0
    expected = model(ids, attention_mask=mask).logits[:, -1]
    for lengths in ([40], [20, 10, 10], [1] * 40):
        assert_close(read(folder / "model.onnx", ids, mask, lengths)[-1], expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_prompt_of_500_tokens(exported):
    model, folder = exported
    ids = tokens(1, 500)
    (found,) = read(folder / "model.onnx", ids, torch.ones_like(ids), [500])
    assert_close(found, model(ids).logits[:, -1], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_with_weights_of_8_bits_a_prompt_at_once_is_one_read_token_by_token(exported, int8):
    model, _ = exported
    ids = tokens(1, 100)
    mask, expected = torch.ones_like(ids), model(ids).logits[0]
    steps = read(int8, ids, mask, [1] * 100)
    for lengths in ([100], [63, 1, 36]):
        assert_close(read(int8, ids, mask, lengths)[-1], steps[-1], atol=1e-4, rtol=1e-3)
    found = torch.cat(steps)
    assert not torch.allclose(found, expected, atol=1e-4)
    assert float((found - expected).norm() / expected.norm()) < 0.2


@torch.no_grad()
def test_transformers_js_finds_two_states_a_layer_and_counts_the_tokens(exported, tmp_path):
    """A cache of no bytes grows by a token each: whose length it asks."""
    import onnx_ir as ir

    from hf_rfa.export import runtimes
    from hf_rfa.export.onnx_model import save
    from hf_rfa.export.running import RunningGraph

    model, folder = exported
    file = ir.load(folder / "model.onnx")
    layers = runtimes.name_for_transformers_js(file.graph)
    save(file, tmp_path / "model.onnx")
    runtimes.write_transformers_js_config(model, layers, "model.onnx", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    running, ids = RunningGraph(tmp_path / "model.onnx"), tokens(1, 30)
    found = [running.read(part)[0] for part in ids.split([10, 20], 1)]
    assert_close(found[1], model(ids).logits[0, -1], atol=1e-4, rtol=1e-3)
    known = set()
    for number, kind in enumerate(config["layer_types"]):
        is_ours = kind == "linear_attention"
        names = (
            ("past_conv.{}", "past_recurrent.{}") if is_ours else ("past_key_values.{}.key", "past_key_values.{}.value")
        )
        known |= {name.format(number) for name in names}
    assert {*running.names[2:]} <= known
    assert running.states[running.names.index(f"past_key_values.{layers}.key") - 2].shape() == [1, 1, 30, 0]


def test_browsers_find_all_weights_that_stand_beside_a_graph(tmp_path):
    """They look for those of the graph itself, not of its branches and passes, whose constants grow with the model."""
    import onnx_ir as ir

    heads = {"hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}
    checkpoint = saved(tmp_path / "model", **SUMMARY, **heads)
    export(str(checkpoint), tmp_path / "graph", runtime="transformers.js")
    model = ir.load(tmp_path / "graph/onnx/model.onnx")
    inner = [graph for graph in model.graphs() if graph is not model.graph]
    assert inner
    for graph in inner:
        assert not [value for value in graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)]


@torch.no_grad()
def test_onnxruntime_genai_writes_what_the_model_writes(tmp_path):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    checkpoint = saved(tmp_path / "model", **SUMMARY)
    export(str(checkpoint), tmp_path / "graph", runtime="genai")
    model, ids = load_model(str(checkpoint))[0], tokens(1, 20)
    expected = model.generate(ids, min_new_tokens=20, max_new_tokens=20, do_sample=False)[0, 20:].tolist()
    loaded = genai.Model(str(tmp_path / "graph"))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=40, min_length=40)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(ids[0].tolist())
    found = []
    for _ in expected:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert found == expected


def test_a_folder_says_what_was_measured(exported):
    _, folder = exported
    report = json.loads((folder / "export.json").read_text())
    assert report["difference"] < 1e-4
    assert report["split_difference"] < 1e-4
    assert report["same_top"] == 1
    assert report["num_bytes"] == sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    assert (folder / "tokenizer.json").is_file()


def test_a_graph_that_differs_is_not_kept(tmp_path, monkeypatch):
    """With another graph's weights, say: what was at the destination stays."""
    checkpoint = saved(
        tmp_path / "model", num_hidden_layers=1, retrieval_heads=[], retrieval_window=0, retrieval_slots=0
    )
    monkeypatch.setattr(exporting, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(InputError, match="it is not kept"):
        export(str(checkpoint), tmp_path / "graph")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


REFUSED = [
    ("bart", {"feature_map": "positive"}, "has an encoder"),
    (
        "llama",
        {"softmax_layers": [1], "max_distance": None, "distance_step": None},
        r"not converted \(full_attention\)",
    ),
    ("llama", {"feature_map": "positive", "max_distance": None, "distance_step": None}, "has features"),
    ("llama", {**SUMMARY, "gate": True, "max_distance": None, "distance_step": None}, "has gates"),
]


@pytest.mark.parametrize(("family", "options", "message"), REFUSED, ids=["encoder", "softmax", "features", "gates"])
def test_what_cannot_be_exported_is_refused_before_weights_are_loaded(family, options, message, tmp_path):
    fields = {} if family == "bart" else {**OPTIONS, **options}
    make(family, fields).config.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=message):
        export(str(tmp_path / "model"), tmp_path / "graph")
