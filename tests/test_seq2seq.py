"""RFA models with an encoder: one set of tests run over families, feature maps and kinds of attention."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.cache_utils import DynamicLayer

import hf_rfa
from hf_rfa import (
    RFABartConfig,
    RFABartForConditionalGeneration,
    RFALayer,
    RFAMarianConfig,
    RFAMarianMTModel,
    RFASourceLayer,
)
from hf_rfa.convert.base_model import softmax_base_model
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.masking import rows_in_runs

from .conftest import tiny_seq2seq_config

VARIANTS = {
    "both": {},
    "both-gate": {"gate": True, "chunk_size": 5},
    "paper": {
        "feature_map": "gaussian",
        "unit_norm": True,
        "num_features": 16,
        "num_cross_features": 32,
        "gate": True,
    },
    "cross-only": {"softmax_layers": [0, 1, 2]},
    "causal-only": {"softmax_cross_layers": [0, 1, 2]},
    "everything": {"softmax_encoder_layers": []},
    "everything-signed": {"feature_map": "gaussian", "unit_norm": True, "softmax_encoder_layers": []},
    "per-layer": {"softmax_layers": [0], "softmax_cross_layers": [1], "softmax_encoder_layers": [1]},
    "elu": {"feature_map": "elu", "softmax_encoder_layers": []},
    "hedgehog": {"feature_map": "hedgehog", "num_features": 8},
}
FAMILIES = {"bart": (RFABartConfig, RFABartForConditionalGeneration), "marian": (RFAMarianConfig, RFAMarianMTModel)}
SOURCE_LENGTH, LENGTH = 17, 23


def make(name_or_options="both", *, family="bart", dtype=torch.float32, cls=None, **parent_options):
    options = VARIANTS[name_or_options] if isinstance(name_or_options, str) else name_or_options
    config_class, default = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class.from_parent(tiny_seq2seq_config(family, **parent_options), **options)
    return (cls or default)(config).to(dtype).eval()


@pytest.fixture(
    params=[*(("bart", name) for name in sorted(VARIANTS)), ("marian", "both-gate"), ("marian", "per-layer")]
)
def model(request):
    return make(request.param[1], family=request.param[0])


@pytest.fixture
def source():
    return torch.randint(3, 61, (3, SOURCE_LENGTH))


@pytest.fixture
def target():
    return torch.randint(3, 61, (3, LENGTH))


def ragged(source, side="right"):
    """A mask for sources of three lengths."""
    mask = torch.ones_like(source)
    for row, length in enumerate([SOURCE_LENGTH, 9, 3]):
        padded = slice(length, None) if side == "right" else slice(0, SOURCE_LENGTH - length)
        mask[row, padded] = 0
    return mask


@torch.no_grad()
def logits(model, source, target, **options):
    return model(source, decoder_input_ids=target, use_cache=False, **options).logits


def rfa_modules(model, kind):
    return [module for module in model.modules() if isinstance(module, RFAAttentionMixin) and module.rfa_kind == kind]


def test_each_kind_of_attention_is_chosen_per_layer():
    model = make("per-layer")
    assert [module.rfa_layer_idx for module in rfa_modules(model, "causal")] == [1, 2]
    assert [module.rfa_layer_idx for module in rfa_modules(model, "cross")] == [0, 2]
    assert [module.rfa_layer_idx for module in rfa_modules(model, "encoder")] == [0]
    model = make("paper")
    assert [len(rfa_modules(model, kind)) for kind in ("causal", "cross", "encoder")] == [3, 3, 0]
    assert {module.feature_map.feature_dim for module in rfa_modules(model, "causal")} == {32}
    assert {module.feature_map.feature_dim for module in rfa_modules(model, "cross")} == {64}
    assert all(module.gate is not None for module in rfa_modules(model, "causal"))
    assert all(module.gate is None for module in rfa_modules(model, "cross")), "gates act in causal attention only"
    matrices = [module.feature_map.projection for module in rfa_modules(make(), "causal")[:1]]
    matrices += [module.feature_map.projection[:, :128] for module in rfa_modules(make(), "cross")[:1]]
    assert not torch.equal(*matrices), "cross attention draws its own matrices"


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1], [22], [5, 6, 7, 20]])
def test_multi_token_forwards_on_a_warm_cache_equal_one_pass(model, source, target, cuts):
    mask = ragged(source)
    expected = logits(model, source, target, attention_mask=mask)
    cache, found = None, []
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        output = model(
            source,
            attention_mask=mask,
            decoder_input_ids=target[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=3e-4, rtol=1e-4)
    assert cache.get_seq_length() == LENGTH
    for index, layer in enumerate(cache.cross_attention_cache.layers):
        assert isinstance(layer, RFASourceLayer) == model.config.is_rfa("cross", index)
        assert layer.get_seq_length() == SOURCE_LENGTH
    for index, layer in enumerate(cache.self_attention_cache.layers):
        assert isinstance(layer, RFALayer) == model.config.is_rfa("causal", index)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_batched_equals_single_for_mixed_source_lengths(model, source, target, side):
    mask = ragged(source, side)
    found = logits(model, source, target, attention_mask=mask)
    other_pads = torch.where(mask.bool(), source, (source + 5) % 61)
    torch.testing.assert_close(logits(model, other_pads, target, attention_mask=mask), found, atol=1e-5, rtol=1e-5)
    if side == "right":  # BART's positions count padding, so that left padding is another input
        for row in range(3):
            single = logits(model, source[row : row + 1, mask[row].bool()], target[row : row + 1])
            torch.testing.assert_close(found[row : row + 1], single, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_padding_of_the_decoder_neither_enters_nor_decays_the_state(source, target):
    for name in ("both-gate", "per-layer"):
        model = make(name)
        mask = torch.ones_like(target)
        mask[1, 6:9] = 0
        found = logits(model, source, target, decoder_attention_mask=mask)
        changed = torch.where(mask.bool(), target, (target + 3) % 61)
        kept = mask.bool()
        other = logits(model, source, changed, decoder_attention_mask=mask)
        torch.testing.assert_close(other[kept], found[kept], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits(model, source, target)[1, 10:], found[1, 10:])


@torch.no_grad()
def test_the_decoder_is_causal_and_the_encoder_is_not(model, source, target):
    changed = target.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 61
    expected = logits(model, source, target)
    torch.testing.assert_close(logits(model, source, changed)[:, :12], expected[:, :12], atol=1e-5, rtol=1e-5)
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    encoder = model.get_encoder()
    first = encoder(source).last_hidden_state[:, 0]
    assert not torch.allclose(encoder(other).last_hidden_state[:, 0], first)


@torch.no_grad()
def test_output_attentions_are_the_weights_that_give_the_output(source, target):
    model = make("everything")
    mask = ragged(source)
    options = {"attention_mask": mask, "output_attentions": True, "output_hidden_states": True, "use_cache": False}
    output = model(source, decoder_input_ids=target, **options)
    torch.testing.assert_close(output.logits, logits(model, source, target, attention_mask=mask))
    assert len(output.encoder_attentions) == 2
    assert len(output.decoder_attentions) == len(output.cross_attentions) == 3
    for weights, tokens in ((output.encoder_attentions[0], mask), (output.cross_attentions[1], mask)):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert (weights.transpose(1, 3)[tokens == 0] == 0).all(), "padding must get no weight"
    assert (output.decoder_attentions[0].triu(1) == 0).all()
    layer = model.model.encoder.layers[0].self_attn
    hidden = output.encoder_hidden_states[0]
    merged = (output.encoder_attentions[0] @ layer.project(hidden)[2]).transpose(1, 2).reshape(hidden.shape)
    expected = layer(hidden, padding_mask=mask)[0]
    torch.testing.assert_close(layer.out_proj(merged), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_output_attentions_of_a_step_on_a_warm_cache(source, target):
    model = make()
    mask = ragged(source).repeat_interleave(2, dim=0)  # beams: rows in runs of two
    source, target = source.repeat_interleave(2, dim=0), target.repeat_interleave(2, dim=0)
    whole = model(source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
    assert whole.past_key_values.cross_attention_cache.layers[0].rows_per_state == 2
    cache = model(source, attention_mask=mask, decoder_input_ids=target[:, :9]).past_key_values
    step = model(
        source, attention_mask=mask, decoder_input_ids=target[:, 9:10], past_key_values=cache, output_attentions=True
    )
    for found, expected in zip(step.cross_attentions, whole.cross_attentions, strict=True):
        torch.testing.assert_close(found, expected[:, :, 9:10], atol=1e-5, rtol=1e-4)


def test_a_gradient_step_reaches_every_parameter(model, source, target):
    """Only cross, only causal or both: each trains."""
    model.train()
    loss = model(source, attention_mask=ragged(source), labels=target).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # Marian's positions are fixed
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
    before = float(loss.detach())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad / (1e-6 + parameter.grad.norm())
        assert float(model(source, attention_mask=ragged(source), labels=target).loss) < before


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["both-gate", "everything", "per-layer"])
def test_gradient_checkpointing_changes_nothing(name, reentrant, source, target):
    plain, checkpointed = make(name).train(), make(name).train()
    enable = getattr(checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    for model in (plain, checkpointed):
        model(source, attention_mask=ragged(source), labels=target, use_cache=False).loss.backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)


@torch.no_grad()
def test_save_load_save_is_identical_and_says_which_layers(model, source, target, tmp_path):
    for module in model.modules():  # calibrated constants have to survive too
        if isinstance(module, hf_rfa.FeatureMap):
            for buffer in module.buffers():
                buffer.add_(0.01 * torch.randn_like(buffer))
    model.save_pretrained(tmp_path / "one")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "one").eval()
    assert type(again) is type(model)
    for kind in ("causal", "cross", "encoder"):
        count = model.config.num_layers_for(kind)
        chosen = [index for index in range(count) if again.config.is_rfa(kind, index)]
        assert chosen == [module.rfa_layer_idx for module in rfa_modules(model, kind)]
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    assert torch.equal(logits(again, source, target), logits(model, source, target))
    shared = {module.weight.data_ptr() for module in (again.lm_head, again.get_input_embeddings())}
    shared |= {stack.embed_tokens.weight.data_ptr() for stack in (again.get_encoder(), again.get_decoder())}
    assert len(shared) == 1, "tied weights must stay tied"


@pytest.mark.parametrize(
    ("cls", "auto"),
    [
        (hf_rfa.RFABartModel, AutoModel),
        (hf_rfa.RFABartForConditionalGeneration, AutoModelForSeq2SeqLM),
        (hf_rfa.RFABartForConditionalGeneration, AutoModelForPreTraining),
        (hf_rfa.RFABartForSequenceClassification, AutoModelForSequenceClassification),
        (hf_rfa.RFABartForQuestionAnswering, AutoModelForQuestionAnswering),
        (hf_rfa.RFABartForCausalLM, AutoModelForCausalLM),
        (hf_rfa.RFAMarianModel, AutoModel),
        (hf_rfa.RFAMarianMTModel, AutoModelForSeq2SeqLM),
        (hf_rfa.RFAMarianForCausalLM, AutoModelForCausalLM),
    ],
)
def test_auto_classes_and_heads(cls, auto, source, target, tmp_path):
    family = "bart" if "Bart" in cls.__name__ else "marian"
    model = make("both-gate", family=family, cls=cls)
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is cls
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[family][0]
    source[:, -1] = 2  # the classifier reads the end-of-text token
    inputs = {} if "CausalLM" in cls.__name__ else {"decoder_input_ids": source}
    with torch.no_grad():
        torch.testing.assert_close(again(source, **inputs)[0], model(source, **inputs)[0])


def test_classification_heads_train(source):
    source[:, -1] = 2
    labels = torch.tensor([0, 1, 2])
    for cls, wanted in (
        (hf_rfa.RFABartForSequenceClassification, {"labels": labels}),
        (hf_rfa.RFABartForQuestionAnswering, {"start_positions": labels, "end_positions": labels + 2}),
        (hf_rfa.RFABartForCausalLM, {"labels": source}),
    ):
        loss = make("both", cls=cls)(source, **wanted).loss
        loss.backward()
        assert torch.isfinite(loss)


@pytest.mark.parametrize("switches", [{"scale_embedding": True}, {"activation_function": "relu"}, {}])
@torch.no_grad()
def test_with_very_many_features_it_is_the_parent(switches, source, target):
    """All three kinds of attention approach the softmax parent's."""
    counts = dict.fromkeys(("num_features", "num_cross_features", "num_encoder_features"), 20_000)
    model = make({**counts, "softmax_encoder_layers": []}, init_std=0.1, **switches)
    parent = softmax_base_model(
        model, "BartForConditionalGeneration", tiny_seq2seq_config("bart", init_std=0.1, **switches)
    )
    assert type(parent) is BartForConditionalGeneration
    mask = ragged(source)
    expected = logits(parent, source, target, attention_mask=mask)
    found = logits(model, source, target, attention_mask=mask)
    assert float((found - expected).norm() / expected.norm()) < 0.03
    few = make({"num_features": 4, "num_cross_features": 4}, init_std=0.1, **switches)
    assert float((logits(few, source, target, attention_mask=mask) - expected).norm() / expected.norm()) > 0.03


def test_dropouts_act_in_training_only(source, target):
    for name in ("attention_dropout", "dropout", "activation_dropout", "decoder_layerdrop", "encoder_layerdrop"):
        model = make("everything", **{name: 0.5})
        assert torch.equal(logits(model, source, target), logits(model, source, target))
        model.train()
        outputs = [logits(model, source, target) for _ in range(4)]
        assert any(not torch.equal(outputs[0], other) for other in outputs[1:]), name


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_no_quadratic_mask_is_built(implementation, source, target):
    """Neither T × T nor T × S entries, padded or not, and at a later step nothing as long as the source."""
    config = RFABartConfig.from_parent(tiny_seq2seq_config("bart"), softmax_encoder_layers=[])
    model = RFABartForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()
    masks, steps = [], []

    def look(module, args, kwargs):
        found = [*args, *kwargs.values()]
        masks.extend(x.numel() for x in found if torch.is_tensor(x) and x.ndim == 4)
        if len(args) > 2 and args[0].shape[1] == 1:
            steps.extend(kwargs.get(name) for name in ("source_padding_mask", "padding_mask"))

    for layer in [*model.get_encoder().layers, *model.get_decoder().layers]:
        layer.register_forward_pre_hook(look, with_kwargs=True)
    for mask in (None, ragged(source)):
        cache = model(source, attention_mask=mask, decoder_input_ids=target).past_key_values
        model(source, attention_mask=mask, decoder_input_ids=target[:, :1], past_key_values=cache)
    assert masks
    assert max(masks) == 1
    assert steps
    assert all(mask is None for mask in steps)


@torch.no_grad()
def test_inputs_that_cannot_be_honoured_are_refused(source, target):
    model = make("everything")
    with pytest.raises(ValueError, match="softmax_layers"):
        model(source, decoder_input_ids=target, decoder_attention_mask=torch.ones(3, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="softmax_layers"):
        model(source, attention_mask=torch.ones(3, 1, SOURCE_LENGTH, SOURCE_LENGTH), decoder_input_ids=target)
    with pytest.raises(ValueError, match=r"position 96.*96 positions.*--max-positions 97"):
        model(torch.full((1, 97), 5), decoder_input_ids=target[:1])
    with pytest.raises(ValueError, match=r"position 96.*--max-positions 97"):
        model(source[:1], decoder_input_ids=torch.full((1, 97), 5))
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        rfa_modules(model, "cross")[0].attend_to_source(torch.zeros(1, 1, 24), None)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused(source, target):
    parent = BartForConditionalGeneration(tiny_seq2seq_config("bart")).eval()
    used = parent(source, decoder_input_ids=target).past_key_values
    with pytest.raises(TypeError, match="filled by another model"):
        make()(source, decoder_input_ids=target, past_key_values=used)
    assert all(type(layer) is DynamicLayer for layer in used.self_attention_cache.layers), (
        "refused before it is changed"
    )
    with pytest.raises(TypeError, match="filled by another model"):
        make("cross-only")(source, decoder_input_ids=target, past_key_values=used)
    ours = make()(source, decoder_input_ids=target).past_key_values
    with pytest.raises(TypeError, match="filled by another model"):
        make("causal-only")(source, decoder_input_ids=target, past_key_values=ours)
    with pytest.raises(TypeError, match="self-attention layer wrote"):
        RFASourceLayer().update(torch.ones(1), torch.ones(1))


@torch.no_grad()
def test_a_decoder_that_stands_alone(target):
    """Its cache has the decoder's number of layers, though its configuration has an encoder's too."""
    for family, cls in (("bart", hf_rfa.RFABartForCausalLM), ("marian", hf_rfa.RFAMarianForCausalLM)):
        model = make("both-gate", family=family, cls=cls, dtype=torch.float64)
        assert len(DynamicCache(config=model.config).layers) == 3
        expected = model(target, use_cache=False).logits
        first = model(target[:, :8], use_cache=True)
        second = model(target[:, 8:], past_key_values=first.past_key_values)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), expected)
        ids = target[:1, :5]
        found = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=1)
        for _ in range(20):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(found, ids)


@torch.no_grad()
def test_a_decoder_alone_given_an_encoders_output(source, target):
    model = make("both", cls=hf_rfa.RFABartForCausalLM)
    hidden = torch.randn(3, SOURCE_LENGTH, 24)
    options = {"encoder_hidden_states": hidden, "encoder_attention_mask": ragged(source)}
    expected = model(target, use_cache=False, **options).logits
    cache = DynamicCache(config=model.config)  # as `generate` builds it for a model without an encoder
    first = model(target[:, :8], past_key_values=cache, use_cache=True, **options)
    assert isinstance(first.past_key_values, EncoderDecoderCache)
    second = model(target[:, 8:], past_key_values=first.past_key_values, **options)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_close_to_float32(model, dtype, source, target):
    mask = ragged(source)
    expected = logits(model, source, target, attention_mask=mask)
    model = copy.deepcopy(model).to(dtype)
    found, cache, steps = logits(model, source, target, attention_mask=mask), None, []
    for t in range(LENGTH):
        output = model(
            source, attention_mask=mask, decoder_input_ids=target[:, t : t + 1], past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        steps.append(output.logits)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    assert all(layer.state.dtype == torch.float32 for layer in layers if isinstance(layer, RFALayer))
    tolerance = {torch.bfloat16: 0.2, torch.float16: 0.03}[dtype]
    for result in (found, torch.cat(steps, dim=1)):
        assert torch.isfinite(result).all()
        assert float((result.float() - expected).norm() / expected.norm()) < tolerance


def test_rows_in_runs():
    rows = torch.randn(4, 5, 3)
    mask = torch.ones(4, 5)
    for beams in (1, 2, 3):
        repeated = rows.repeat_interleave(beams, dim=0)
        assert rows_in_runs(repeated, None) == beams
        assert rows_in_runs(repeated, mask.repeat_interleave(beams, dim=0)) == beams
    uneven = torch.cat([rows[:1].repeat(4, 1, 1), rows[1:2].repeat(2, 1, 1)])
    assert rows_in_runs(uneven, None) == 2
    same, other = rows[:1].repeat(2, 1, 1), mask[:2].clone()
    other[1, 3:] = 0
    assert rows_in_runs(same, None) == 2
    assert rows_in_runs(same, other) == 1, "equal hidden states under different padding are different sources"


@given(runs=st.lists(st.integers(1, 12), min_size=1, max_size=5))
@settings(max_examples=40)
def test_rows_in_runs_divide_every_run(runs):
    """One row of every n stands for all of them, however many times a source was repeated, and no larger n does."""
    source = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))[:, None, None].float()
    count = rows_in_runs(source, None)
    stand_in = [n for n in range(1, len(source) + 1) if torch.equal(source[::n].repeat_interleave(n, dim=0), source)]
    assert count == max(stand_in)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_layers_draw_the_same_random_matrices(family):
    """Nor two kinds of attention of one layer: what one gets wrong by chance, the next ones would get wrong too."""
    options = {"softmax_encoder_layers": [], "num_cross_features": 128, "num_features": 128}
    model = make(options, family=family, encoder_attention_heads=3)
    matrices = [layer.feature_map.projection.flatten() for layer in model.modules() if hasattr(layer, "feature_map")]
    assert len(matrices) == 2 + 2 * 3
    for index, one in enumerate(matrices):
        for other in matrices[:index]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.2


@torch.no_grad()
def test_autocast_leaves_states_in_float32(source, target):
    model = make("everything")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(source, decoder_input_ids=target)
        step = model(source, decoder_input_ids=target[:, :1], past_key_values=output.past_key_values)
    caches = (step.past_key_values.self_attention_cache, step.past_key_values.cross_attention_cache)
    assert all(layer.state.dtype == torch.float32 for cache in caches for layer in cache.layers)
    assert torch.isfinite(step.logits).all()
