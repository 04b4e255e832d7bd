"""Models in hard use: many requests at once, several threads, states on disk, pipelines, exported steps."""

from __future__ import annotations

import copy
import errno
import threading
import warnings

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from safetensors.torch import save_file
from transformers import DynamicCache, GPT2LMHeadModel, pipeline

from hf_rfa import (
    InputError,
    RFABartConfig,
    RFABartForConditionalGeneration,
    RFAGPT2Config,
    RFAGPT2ForSequenceClassification,
    RFAGPT2LMHeadModel,
    cache_files,
    cache_num_bytes,
    load_cache,
    save_cache,
)
from hf_rfa.convert import convert
from hf_rfa.export import DecodingStep

from .conftest import save_tiny_tokenizer, tiny_parent_config, tiny_seq2seq_config

OPTIONS = {"do_sample": False, "num_beams": 1, "pad_token_id": 1}


def gpt2(**options):
    torch.manual_seed(0)
    config = RFAGPT2Config.from_parent(tiny_parent_config(eos_token_id=2), num_features=8, **options)
    return RFAGPT2LMHeadModel(config).eval()


def bart(**options):
    torch.manual_seed(0)
    config = RFABartConfig.from_parent(tiny_seq2seq_config("bart"), num_features=8, **options)
    return RFABartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("options", [{"gate": True}, {"window": 3}, {"softmax_layers": [0]}])
def test_64_requests_of_mixed_lengths_in_one_batch(options):
    model = gpt2(**options)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 60, (1 + n % 13,), generator=generator) for n in range(64)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([torch.ones(width - len(each), dtype=torch.long), each]) for each in prompts])
    mask = torch.stack([(torch.arange(width) >= width - len(each)).long() for each in prompts])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=10, **OPTIONS)[:, width:]
    for each, tokens in zip(prompts, found, strict=True):
        alone = model.generate(each[None], max_new_tokens=10, **OPTIONS)[0, len(each) :]
        assert torch.equal(tokens[: len(alone)], alone)


def test_two_threads_generate_on_one_model():
    model = gpt2(gate=True)
    prompts = [torch.randint(3, 60, (1, 5 + n), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    expected = [model.generate(each, max_new_tokens=20, **OPTIONS) for each in prompts]
    model.train().eval()  # so that the threads fold the matrices anew, at once
    found: dict[int, torch.Tensor] = {}

    def work(numbers):
        for number in numbers:
            found[number] = model.generate(prompts[number], max_new_tokens=20, **OPTIONS)

    threads = [threading.Thread(target=work, args=(range(start, 6, 2),)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in enumerate(expected):
        assert torch.equal(found[number], tokens)


@pytest.mark.parametrize("options", [{}, {"gate": True, "window": 3}, {"softmax_layers": [1]}])
def test_a_cache_goes_on_from_disk(options, tmp_path):
    model = gpt2(**options)
    prompt = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(prompt[:, :-1]).past_key_values
        save_cache(cache, tmp_path / "prompt.safetensors")
        expected = model(prompt[:, -1:], past_key_values=cache).logits
        for _ in range(2):  # what is loaded does not change what is there
            loaded = load_cache(tmp_path / "prompt.safetensors", model)
            assert loaded.get_seq_length() == 8
            assert torch.equal(model(prompt[:, -1:], past_key_values=loaded).logits, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompt.safetensors"]
    loaded = load_cache(tmp_path / "prompt.safetensors", model)
    again = model.generate(prompt, past_key_values=loaded, max_new_tokens=6, **OPTIONS)
    assert torch.equal(again, model.generate(prompt, max_new_tokens=6, **OPTIONS))


@pytest.mark.parametrize(
    "options", [{}, {"softmax_layers": [0], "softmax_cross_layers": [1]}, {"softmax_cross_layers": [0, 1, 2]}]
)
def test_a_cache_with_a_source_goes_on_from_disk(options, tmp_path):
    model = bart(**options)
    source = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    start = torch.tensor([[2, 5, 6], [2, 7, 8]])
    with torch.no_grad():
        outputs = model(source, decoder_input_ids=start, use_cache=True)
        save_cache(outputs.past_key_values, tmp_path / "c")
        loaded = load_cache(tmp_path / "c", model)
        given = {
            "decoder_input_ids": torch.tensor([[9], [10]]),
            "encoder_outputs": (outputs.encoder_last_hidden_state,),
        }
        expected = model(**given, past_key_values=outputs.past_key_values).logits
        torch.testing.assert_close(model(**given, past_key_values=loaded).logits, expected)
        assert cache_num_bytes(loaded) == cache_num_bytes(outputs.past_key_values)
    with pytest.raises(InputError, match=r"of cross attention: the file has .*, and the model "):
        load_cache(tmp_path / "c", bart(**options | {"softmax_cross_layers": [2] if options else [0]}))


def test_a_cache_whose_cross_attention_saw_no_source_goes_on_from_disk(tmp_path):
    model = gpt2(add_cross_attention=True)
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]])).past_key_values
        save_cache(cache, tmp_path / "c")
        loaded = load_cache(tmp_path / "c", model)
        expected, found = (model(torch.tensor([[8]]), past_key_values=each).logits for each in (cache, loaded))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"softmax_cross_layers": [1]}])
def test_a_cache_of_beams_goes_on_from_disk(options, tmp_path):
    """The beams of a source share its state; they do in the file, and after it."""
    model = bart(**options)
    source = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    found = model.generate(
        source, num_beams=3, max_new_tokens=5, eos_token_id=None, pad_token_id=1, return_dict_in_generate=True
    )
    save_cache(found.past_key_values, tmp_path / "c")
    loaded = load_cache(tmp_path / "c", model)
    assert cache_num_bytes(loaded) == cache_num_bytes(found.past_key_values)
    for cache in (found.past_key_values, loaded):  # as beam search goes on
        cache.reorder_cache(torch.tensor([2, 0, 0, 3, 5, 4]))
    with torch.no_grad():
        encoded = model.get_encoder()(source).last_hidden_state.repeat_interleave(3, dim=0)
        given = {"decoder_input_ids": torch.arange(5, 11)[:, None], "encoder_outputs": (encoded,)}
        expected, again = (model(**given, past_key_values=each).logits for each in (found.past_key_values, loaded))
    torch.testing.assert_close(again, expected)


def test_a_cache_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    model = gpt2()
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6]])).past_key_values
    save_cache(cache, tmp_path / "prompt")
    before = (tmp_path / "prompt").read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(before[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_cache(cache, tmp_path / "prompt")
    assert [path.name for path in tmp_path.iterdir()] == ["prompt"]
    assert (tmp_path / "prompt").read_bytes() == before


def test_what_is_no_cache_of_this_model_is_refused(tmp_path):
    model = gpt2()
    with pytest.raises(InputError, match="holds nothing yet"):
        save_cache(DynamicCache(config=model.config), tmp_path / "x")
    with pytest.raises(InputError, match="cannot read a cache"):
        load_cache(tmp_path / "nothing", model)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(InputError, match="cannot read a cache"):
        load_cache(tmp_path / "text", model)
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(InputError, match="holds no cache of hf-rfa"):
        load_cache(tmp_path / "other", model)
    with torch.no_grad():
        save_cache(model(torch.tensor([[5, 6]])).past_key_values, tmp_path / "own")
    with pytest.raises(InputError, match="the file has state, and the model keys and values"):
        load_cache(tmp_path / "own", gpt2(softmax_layers=[0]))
    with pytest.raises(InputError, match="layers of self attention, and the model has 1"):
        load_cache(tmp_path / "own", gpt2(n_layer=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "own", "text"]


def test_pipelines(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(tiny_parent_config(eos_token_id=2)).save_pretrained(tmp_path / "gpt2")
    save_tiny_tokenizer(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "rfa", num_features=8)
    texts = pipeline("text-generation", str(tmp_path / "rfa"), device="cpu")
    found = texts(["w5 w6", "w7 w8 w9"], max_new_tokens=5, do_sample=False)
    assert [each[0]["generated_text"].startswith(text) for each, text in zip(found, ["w5 w6", "w7 w8 w9"], strict=True)]
    model = RFAGPT2ForSequenceClassification.from_pretrained(tmp_path / "rfa", num_labels=3, pad_token_id=1)
    model.save_pretrained(tmp_path / "classifier")
    save_tiny_tokenizer(tmp_path / "classifier")
    classes = pipeline("text-classification", str(tmp_path / "classifier"), device="cpu", top_k=None)
    (scores,) = classes(["w5 w6 w7"])
    with torch.no_grad():
        expected = model.eval()(**classes.tokenizer("w5 w6 w7", return_tensors="pt")).logits.softmax(-1)[0]
    assert {each["label"]: each["score"] for each in scores} == {
        f"LABEL_{n}": pytest.approx(float(p), rel=1e-4) for n, p in enumerate(expected)
    }


def offloaded(model, folder, how):
    """Return the model with weights on disk, or in memory and brought to where they are used, by accelerate."""
    if how in ("device_map", "auto"):
        model.save_pretrained(folder / "model", max_shard_size="20KB")
        tensors = model.state_dict()
        owners = {key: key.rpartition(".")[0] for key in tensors}
        # Whatever belongs to a module without modules in it; BART itself has a buffer.
        places = {name: "disk" for name in owners.values() if not any(model.get_submodule(name).children())}
        places |= {key: "cpu" for key, owner in owners.items() if owner not in places}
        size = sum(tensor.nbytes for tensor in tensors.values())
        options = {"device_map": places, "offload_buffers": True}
        if how == "auto":
            options = {"device_map": "auto", "max_memory": {"cpu": size // 2}}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")
            return type(model).from_pretrained(folder / "model", offload_folder=folder / "offload", **options)
    copied = copy.deepcopy(model)
    options = {"execution_device": torch.device("cpu"), "offload_buffers": True}
    if how == "disk_offload":
        return disk_offload(copied, folder / "offload", **options)
    return cpu_offload(copied, **options)


@pytest.mark.parametrize("how", ["device_map", "auto", "disk_offload", "cpu_offload"])
@pytest.mark.parametrize(
    "options", [{"gate": True}, {"window": 3}, {"softmax_layers": [0], "feature_map": "exponential"}]
)
@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_weights_that_are_not_in_memory(family, options, how, tmp_path):
    """Every weight and buffer, those of feature maps too, comes when its module is called and goes again."""
    model = {"gpt2": gpt2, "bart": bart}[family](**options)
    with torch.no_grad():  # maps are not as they start
        for name, tensor in model.state_dict().items():
            if ".feature_map." in name or ".gate." in name:
                tensor.add_(0.1 * torch.rand_like(tensor))
    moved = offloaded(model, tmp_path, how)
    absent = {name for name, tensor in moved.state_dict().items() if tensor.is_meta}
    assert any(".feature_map." in name for name in absent)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    extra = {"decoder_input_ids": ids[:, :4]} if family == "bart" else {}
    for _ in range(2):  # the second time from what was folded the first time
        with torch.no_grad():
            assert torch.equal(moved(ids, **extra).logits, model(ids, **extra).logits)
    for beams in (1, 3):
        given = OPTIONS | {"num_beams": beams, "max_new_tokens": 7}
        assert torch.equal(moved.generate(ids, **given), model.generate(ids, **given))
    assert {name for name, tensor in moved.state_dict().items() if tensor.is_meta} == absent


STEPS = [{}, {"gate": True}, {"feature_map": "gaussian", "unit_norm": True}, {"window": 3, "gate": True}]


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_a_decoding_step_is_exported_once_for_all_positions(options):
    model = gpt2(**options)
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(tokens[:, :4]).past_key_values
        states = DecodingStep.states(cache)
        before = [state.clone() for state in states]
        step = DecodingStep(model)
        exported = torch.export.export(step, (tokens[:, 4:5], torch.full((2, 1), 4), states)).module()
        step(tokens[:, 4:5], torch.full((2, 1), 4), states)
        assert all(map(torch.equal, states, before))
        for at in range(4, 12):
            logits, states = exported(tokens[:, at : at + 1], torch.full((2, 1), at), states)
            expected = model(tokens[:, at : at + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model", [lambda: gpt2(softmax_layers=[0]), lambda: bart()], ids=["hybrid", "encoder"])
def test_a_step_whose_cache_grows_is_refused(model):
    with pytest.raises(InputError, match="whose layers are all RFA"):
        DecodingStep(model())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": True, "feature_map": "gaussian"},
        {"softmax_layers": [0]},
        {"window": 7},
        pytest.param({"window": 7, "gate": True}, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_forward_pass_is_exported_once_for_all_lengths(options):
    """Lengths below a window, below a chunk of the recurrence, of one, and of several."""
    model = gpt2(**options, chunk_size=16)
    tokens = torch.randint(3, 60, (2, 90), generator=torch.Generator().manual_seed(0))
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=96)}, "use_cache": None}
    exported = torch.export.export(
        model, (tokens[:, :20].clone(),), {"use_cache": False}, dynamic_shapes=length
    ).module()
    for count in (2, 15, 16, 17, 90):
        expected = model(tokens[:, :count], use_cache=False).logits
        found = exported(tokens[:, :count].clone(), use_cache=False).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "dynamo"),
    [({"gate": True}, True), ({"gate": True}, False), ({"window": 3, "gate": True}, True)],
    ids=["dynamo", "tracer", "window"],
)
@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_a_decoding_step_in_onnx(options, dynamo, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = gpt2(**options)
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate.weight" in name:  # not as they start, which reads nothing
                parameter.normal_(0.0, 0.5)
        cache = model(tokens[:, :4]).past_key_values
        states = DecodingStep.states(cache)
        arguments = (tokens[:, 4:5], torch.full((2, 1), 4), states)
        torch.onnx.export(DecodingStep(model), arguments, tmp_path / "step.onnx", dynamo=dynamo)
        session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
        names = [each.name for each in session.get_inputs()]
        for at in range(4, 8):
            values = [tokens[:, at : at + 1], torch.full((2, 1), at), *states]
            found = session.run(None, {name: value.numpy() for name, value in zip(names, values, strict=True)})
            logits, *states = map(torch.from_numpy, found)
            expected = model(tokens[:, at : at + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


def test_linear_layers_in_8_bits():
    """torch's dynamic quantisation of the projections; features and states stay in float32."""
    model = bart()
    source = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    start = torch.tensor([[2, 5, 6], [2, 7, 8]])
    with torch.no_grad():
        expected = model(source, decoder_input_ids=start).logits
        with pytest.warns(DeprecationWarning, match="torch.ao.quantization"):
            small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
        found = small(source, decoder_input_ids=start).logits
    assert any("quantized" in type(module).__module__ for module in small.modules())
    assert float((found - expected).norm() / expected.norm()) < 0.05
