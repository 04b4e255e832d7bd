"""RFA-GPT-2: one set of tests run over feature maps, gates and hybrids."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    EncoderDecoderCache,
    GPT2LMHeadModel,
)

import hf_rfa
from hf_rfa import RFAGPT2Config, RFAGPT2LMHeadModel, RFAGPT2Model, cache_num_bytes
from hf_rfa.convert.base_model import softmax_base_model
from hf_rfa.errors import InputError
from hf_rfa.inference import use_attention_component

from .conftest import tiny_parent_config

VARIANTS = {
    "positive": {},
    "positive-gate": {"gate": True},
    "positive-trainable": {"trainable_projection": True, "orthogonal": False},
    "gaussian-paper": {"feature_map": "gaussian", "unit_norm": True, "num_features": 16},
    "gaussian-gate": {"feature_map": "gaussian", "gate": True, "num_features": 16},
    "arccos": {"feature_map": "arccos", "unit_norm": True},
    "elu": {"feature_map": "elu"},
    "t2r": {"feature_map": "t2r", "gate": True},
    "hedgehog": {"feature_map": "hedgehog"},
    "hybrid": {"softmax_layers": [1]},
    "window": {"window": 5},
    "window-gate": {"window": 4, "gate": True, "chunk_size": 7, "feature_map": "exponential"},
    "window-elu": {"window": 1, "feature_map": "elu"},
    "window-gaussian": {"window": 6, "feature_map": "gaussian", "num_features": 16, "softmax_layers": [1]},
    "small-chunks": {"chunk_size": 3, "gate": True},
    "float64-state": {"state_dtype": "float64"},
}
ODD_LENGTH = 29


def make(name_or_options, *, dtype=torch.float32, cls=RFAGPT2LMHeadModel, **parent_options):
    options = VARIANTS[name_or_options] if isinstance(name_or_options, str) else name_or_options
    torch.manual_seed(0)
    config = RFAGPT2Config.from_parent(tiny_parent_config(num_labels=3, **parent_options), **options)
    return cls(config).to(dtype).eval()


@pytest.fixture(params=sorted(VARIANTS))
def model(request):
    return make(request.param)


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, ODD_LENGTH))


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1], [28], [7, 8, 9, 20], [10, 20]])
def test_multi_token_forwards_on_a_warm_cache_equal_one_pass(model, ids, cuts):
    expected = logits(model, ids)
    cache, found = None, []
    for start, stop in zip([0, *cuts], [*cuts, ODD_LENGTH], strict=True):
        output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=2e-4, rtol=1e-4)
    assert cache.get_seq_length() == ODD_LENGTH


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_pads_neither_enter_nor_decay_the_state(model, ids, side):
    """Batched output equals single output, whatever the padding holds and wherever it is."""
    lengths, batch, mask = [ODD_LENGTH, 17, 4], ids.clone(), torch.ones_like(ids)
    positions = torch.arange(ODD_LENGTH).repeat(3, 1)
    kept = []
    for row, length in enumerate(lengths):
        pads = ODD_LENGTH - length
        start = {"left": 0, "right": length, "inside": length // 2}[side]
        mask[row, start : start + pads] = 0
        positions[row] = (mask[row].cumsum(0) - 1).clamp_min(0)
        kept.append(mask[row].bool())
    found = logits(model, batch, attention_mask=mask, position_ids=positions)
    other_pads = torch.where(mask.bool(), batch, (batch + 7) % 61)
    torch.testing.assert_close(
        logits(model, other_pads, attention_mask=mask, position_ids=positions)[mask.bool()], found[mask.bool()]
    )
    assert torch.isfinite(found).all()
    for row, keep in enumerate(kept):
        single = logits(model, batch[row : row + 1, keep])
        torch.testing.assert_close(found[row, keep], single[0], atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_single_token_steps_honour_the_padding_mask(ids):
    """Prefill token by token with left padding: a padded token must not enter the state."""
    model = make("positive-gate")
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = logits(model, ids, attention_mask=mask, position_ids=positions)
    cache = DynamicCache(config=model.config)
    for t in range(ODD_LENGTH):
        step = slice(t, t + 1)
        output = model(
            ids[:, step], attention_mask=mask[:, : t + 1], position_ids=positions[:, step], past_key_values=cache
        )
        torch.testing.assert_close(
            output.logits[mask[:, t] == 1, 0], expected[mask[:, t] == 1, t], atol=2e-4, rtol=1e-4
        )


@torch.no_grad()
def test_outputs_are_causal(model, ids):
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 61
    torch.testing.assert_close(logits(model, ids)[:, :15], logits(model, changed)[:, :15], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_output_attentions_are_the_weights_that_give_the_output(model, ids):
    output = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(exact(ids, output_attentions=True, use_cache=False).logits, logits(exact, ids))
    rfa_layers = [i for i in range(2) if i not in model.config.softmax_layers]
    assert len(output.attentions) >= len(rfa_layers)
    for weights, index in zip(output.attentions, rfa_layers, strict=False):
        layer = model.transformer.h[index]
        hidden = layer.ln_1(output.hidden_states[index])
        value = layer.attn.project(hidden)[2]
        expected = layer.attn(hidden)[0]
        merged = (weights @ value).transpose(1, 2).reshape(hidden.shape)
        torch.testing.assert_close(layer.attn.c_proj(merged), expected, atol=1e-4, rtol=1e-4)
        assert (weights.triu(1) == 0).all()


@torch.no_grad()
def test_output_attentions_on_a_warm_cache_cover_this_calls_tokens(ids):
    model = make("positive")
    whole = model(ids, output_attentions=True).attentions[0]
    cache = model(ids[:, :20]).past_key_values
    part = model(ids[:, 20:], past_key_values=cache, output_attentions=True).attentions[0]
    torch.testing.assert_close(part, whole[:, :, 20:, 20:], atol=1e-5, rtol=1e-4)


def test_a_gradient_step_reaches_every_parameter(model, ids):
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    # σ and W of maps whose scale cancels (arccos) may have a zero gradient; the projections may not
    assert all(block.attn.c_attn.weight.grad.abs().sum() > 0 for block in model.transformer.h)


def test_gradients_equal_those_of_the_parallel_form_in_float64(ids):
    for name in ("positive-gate", "gaussian-gate"):
        model = make({**VARIANTS[name], "chunk_size": 5}, dtype=torch.float64)
        reference = make({**VARIANTS[name], "chunk_size": 1000}, dtype=torch.float64)
        for each in (model, reference):
            each(ids, labels=ids).loss.backward()
        for (key, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=1e-8, msg=key)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["positive-gate", "hybrid", "redraw"])
def test_gradient_checkpointing_changes_nothing(name, reentrant, ids):
    options = {"redraw_pool": 10, "feature_map": "gaussian"} if name == "redraw" else VARIANTS[name]
    plain, checkpointed = make(options).train(), make(options).train()
    enable = getattr(checkpointed, "activation_checkpointing_enable", checkpointed.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    for model in (plain, checkpointed):
        torch.manual_seed(4)
        model(ids, labels=ids, use_cache=False).loss.backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)


@torch.no_grad()
def test_save_load_save_is_identical(model, ids, tmp_path):
    for module in model.modules():  # calibrated constants have to survive too
        if isinstance(module, hf_rfa.FeatureMap):
            for buffer in module.buffers():
                buffer.add_(0.01 * torch.randn_like(buffer))
    model.save_pretrained(tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(again) is type(model)
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    assert torch.equal(logits(again.eval(), ids), logits(model, ids))
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr(), "tied weights must stay tied"


@pytest.mark.parametrize(
    ("cls", "auto"),
    [
        (hf_rfa.RFAGPT2Model, AutoModel),
        (hf_rfa.RFAGPT2LMHeadModel, AutoModelForCausalLM),
        (hf_rfa.RFAGPT2LMHeadModel, AutoModelForPreTraining),
        (hf_rfa.RFAGPT2ForSequenceClassification, AutoModelForSequenceClassification),
        (hf_rfa.RFAGPT2ForTokenClassification, AutoModelForTokenClassification),
        (hf_rfa.RFAGPT2ForQuestionAnswering, AutoModelForQuestionAnswering),
    ],
)
def test_auto_classes_and_heads(cls, auto, ids, tmp_path):
    model = make("positive-gate", cls=cls, pad_token_id=0)
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert type(again) is cls
    assert type(AutoConfig.from_pretrained(tmp_path)) is RFAGPT2Config
    with torch.no_grad():
        torch.testing.assert_close(again(ids)[0], model(ids)[0])


def test_classification_heads_train(ids):
    labels = torch.tensor([0, 1, 2])
    for cls, target in (
        (hf_rfa.RFAGPT2ForSequenceClassification, {"labels": labels}),
        (hf_rfa.RFAGPT2ForTokenClassification, {"labels": ids % 3}),
        (hf_rfa.RFAGPT2ForQuestionAnswering, {"start_positions": labels, "end_positions": labels + 2}),
    ):
        loss = make("positive", cls=cls, pad_token_id=0)(ids, **target).loss
        loss.backward()
        assert torch.isfinite(loss)


def test_double_heads(ids):
    model = make("positive", cls=hf_rfa.RFAGPT2DoubleHeadsModel)
    choices = torch.stack([ids, ids.flip(0)], dim=1)
    mask = torch.ones_like(choices)
    mask[0, 0, 20:] = 0
    with torch.no_grad():
        output = model(choices, attention_mask=mask, mc_token_ids=torch.full((3, 2), 10))
        single = model(ids[:1, :20][:, None], mc_token_ids=torch.tensor([[10]]))
    assert output.logits.shape == (3, 2, ODD_LENGTH, 61)
    torch.testing.assert_close(output.logits[0, 0, :20], single.logits[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.mc_logits[0, 0], single.mc_logits[0, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "switches",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"n_inner": 11},
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.1},
    ],
)
@torch.no_grad()
def test_parent_switches_keep_their_meaning(switches, ids):
    """With very many features RFA approaches the softmax parent under every switch."""
    model = make({"num_features": 30_000}, initializer_range=0.1, **switches)
    parent = softmax_base_model(model, "GPT2LMHeadModel", tiny_parent_config(initializer_range=0.1, **switches))
    expected, plain = logits(parent, ids), logits(make({"num_features": 30_000}, initializer_range=0.1), ids)
    error = (logits(model, ids) - expected).norm() / expected.norm()
    assert float(error) < 0.06
    if "reorder_and_upcast_attn" not in switches:  # that one changes precision only, which RFA always has
        assert float((plain - expected).norm() / expected.norm()) > 2 * float(error)


def test_dropouts_act_in_training_only(ids):
    for dropout in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        model = make("positive", **{dropout: 0.5})
        assert torch.equal(logits(model, ids), logits(model, ids))
        model.train()
        assert not torch.equal(logits(model, ids), logits(model, ids)), dropout


def test_attention_dropout_keeps_the_mean(ids):
    attention = make("positive", attn_pdrop=0.3).transformer.h[0].attn.train()
    hidden = torch.randn(1, 6, 24)
    with torch.no_grad():
        mean = torch.stack([attention(hidden)[0] for _ in range(4000)]).mean(0)
        expected = attention.eval()(hidden)[0]
    assert float((mean - expected).norm() / expected.norm()) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("softmax_layers", [[], [0]])
def test_cross_attention_and_its_cache(softmax_layers, ids):
    model = make({"softmax_layers": softmax_layers}, add_cross_attention=True)
    source = torch.randn(3, 13, 24)
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 9:] = 0
    options = {"encoder_hidden_states": source, "encoder_attention_mask": mask}
    expected = logits(model, ids, **options)
    changed = torch.where(mask[..., None] == 1, source, 99.0)
    torch.testing.assert_close(logits(model, ids, encoder_hidden_states=changed, encoder_attention_mask=mask), expected)
    single = logits(model, ids[1:2], encoder_hidden_states=source[1:2, :9])
    torch.testing.assert_close(expected[1:2], single, atol=1e-4, rtol=1e-4)
    first = model(ids[:, :10], use_cache=True, **options)
    assert isinstance(first.past_key_values, EncoderDecoderCache)
    size = cache_num_bytes(first.past_key_values.cross_attention_cache)
    second = model(ids[:, 10:], past_key_values=first.past_key_values, use_cache=True, **options)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, atol=2e-4, rtol=1e-4)
    assert cache_num_bytes(first.past_key_values.cross_attention_cache) == size
    output = model(ids, output_attentions=True, use_cache=False, **options)
    assert len(output.cross_attentions) == 2 - len(softmax_layers)  # transformers' SDPA returns none
    torch.testing.assert_close(output.cross_attentions[-1].sum(-1), torch.ones(3, 3, ODD_LENGTH))
    assert (output.cross_attentions[-1][1, ..., 9:] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_no_quadratic_mask_is_built(implementation, ids, monkeypatch):
    """An all-RFA model must not build T × T masks, padded or not, whatever the attention implementation."""
    config = RFAGPT2Config.from_parent(tiny_parent_config())
    model = RFAGPT2Model._from_config(config, attn_implementation=implementation).eval()
    seen = []
    for block in model.h:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[2].numel()))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for attention_mask in (None, mask):
        cache = model(ids, attention_mask=attention_mask).past_key_values
        model(ids[:, :2], past_key_values=cache)
    assert seen
    assert max(seen) == 1


@torch.no_grad()
def test_masks_per_query_are_refused(ids):
    with pytest.raises(ValueError, match="softmax_layers"):
        make("positive")(ids, attention_mask=torch.ones(3, 1, ODD_LENGTH, ODD_LENGTH))


@torch.no_grad()
def test_positions_past_the_table_are_refused():
    model = make("positive")
    with pytest.raises(ValueError, match=r"position 96.*96 positions.*--max-positions 97"):
        model(torch.ones(1, 97, dtype=torch.long))
    cache = model(torch.ones(1, 96, dtype=torch.long)).past_key_values
    with pytest.raises(ValueError, match="--max-positions"):
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    padded = torch.arange(100).clamp_max(95)[None]  # more tokens than positions, none past the table
    assert torch.isfinite(model(torch.ones(1, 100, dtype=torch.long), position_ids=padded).logits).all()


@torch.no_grad()
def test_a_softmax_model_refuses_the_cache_of_an_rfa_model(ids):
    model = make("positive")
    parent = GPT2LMHeadModel(tiny_parent_config()).eval()
    with pytest.raises(TypeError, match=r"DynamicCache\(config=model.config\)"):
        parent(ids, past_key_values=DynamicCache(config=model.config))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_close_to_float32(model, dtype, ids):
    expected = logits(model, ids)
    model = copy.deepcopy(model).to(dtype)
    found = logits(model, ids).float()
    steps, cache = [], None
    for t in range(ODD_LENGTH):
        output = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    assert all(layer.state.dtype in (torch.float32, torch.float64) for layer in cache.layers if hasattr(layer, "state"))
    tolerance = {torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    for result in (found, torch.cat(steps, 1).float()):
        assert torch.isfinite(result).all()
        assert float((result - expected).norm() / expected.norm()) < tolerance


def test_feature_maps_stay_float32_when_a_16_bit_checkpoint_is_loaded(tmp_path):
    make("positive-gate").save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        attention = model.transformer.h[0].attn
        assert attention.c_attn.weight.dtype == dtype
        assert {x.dtype for x in attention.feature_map.state_dict().values()} == {torch.float32}
        assert attention.gate.bias.dtype == torch.float32


def test_gates_start_with_spans_spread_over_heads():
    gate = make("positive-gate").transformer.h[0].attn.gate
    log_gate, weight = gate(torch.randn(2, 5, 24))
    spans = 1 / weight[0, :, 0]
    torch.testing.assert_close(spans, torch.tensor([24.0, 96.0, 384.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(log_gate.exp() + weight, torch.ones_like(weight))


def test_a_gate_has_the_weights_of_a_linear_layer_and_is_none():
    """What adapts or quantises linear layers expects one tensor of them."""
    gate = make("positive-gate").transformer.h[0].attn.gate
    linear = torch.nn.Linear(24, 3)
    gate.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, 24)
    log_gate, weight = gate(x)
    torch.testing.assert_close(log_gate, linear(x).sigmoid().log().transpose(1, 2))
    torch.testing.assert_close(weight, 1 - linear(x).sigmoid().transpose(1, 2))
    assert not isinstance(gate, torch.nn.Linear)


@pytest.mark.parametrize("name", ["positive-gate", "gaussian-paper", "arccos"])
def test_autocast_leaves_phases_features_and_states_in_float32(name, ids):
    """Mixed precision rounds the projections, as it does the parent's, and nothing between them."""
    model = make(name)
    seen = []
    for block in model.transformer.h:
        block.attn.feature_map.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(ids, use_cache=True)
        assert all(layer.state.dtype == torch.float32 for layer in output.past_key_values.layers)
        assert {features.dtype for features in seen} == {torch.float32}
        inputs = []
        for block in model.transformer.h:
            block.attn.feature_map.register_forward_pre_hook(lambda module, args: inputs.append(args))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(ids)
        maps = [block.attn.feature_map for block in model.transformer.h]
        for features, feature_map, args in zip(seen, maps, inputs, strict=False):
            torch.testing.assert_close(features, feature_map(*args)[1], atol=0, rtol=0)
    loss = {}
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss[enabled] = model(ids, labels=ids).loss
        loss[enabled].backward()
    assert abs(float(loss[True].detach()) - float(loss[False].detach())) < 0.05


def test_each_part_of_windowed_attention_alone(ids):
    """The window alone ignores what has left it; the features alone are the model without a window."""
    model = make("window")
    both = logits(model, ids)
    use_attention_component(model, "linear")
    plain = make({})
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if "window_shift" not in key})
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))
    use_attention_component(model, "window")
    alone = logits(model, ids)
    assert not torch.allclose(alone, both, atol=1e-3)
    assert torch.allclose(alone[:, :5], both[:, :5], atol=1e-5), "before the window is full nothing has left it"
    changed = ids.clone()
    changed[:, 0] = 60 - changed[:, 0]
    reach = 2 * (5 - 1)  # two layers
    assert torch.equal(logits(model, changed)[:, reach + 1 :], alone[:, reach + 1 :])
    use_attention_component(model, "both")
    assert torch.equal(logits(model, ids), both)
    with pytest.raises(InputError, match="has none"):
        use_attention_component(plain, "linear")


def test_documents_packed_into_one_row_see_nothing_of_each_other(model):
    """Values and gradients are those of every document in a row of its own; softmax layers of hybrids keep them apart too."""
    documents = [torch.randint(1, 61, (1, length)) for length in (1, 9, 2, 13, 4)]
    positions = torch.cat([torch.arange(each.shape[1])[None] for each in documents], dim=1)
    model.train()
    packed = model(torch.cat(documents, dim=1), position_ids=positions).logits
    packed.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([model(each).logits for each in documents], dim=1)
    alone.square().sum().backward()
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    scale = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5 * scale, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("name", ["positive-gate", "gaussian-gate", "hybrid", "window-gate"])
def test_a_document_starts_wherever_positions_do_not_go_on(name):
    """Not at position 0 alone: a row may hold pieces from the middle of documents, or of one document twice."""
    model = make(name)
    pieces = [range(7, 12), range(3), range(2, 9), range(30, 34), range(33, 36)]
    ids = [torch.randint(1, 61, (1, len(piece))) for piece in pieces]
    positions = [torch.tensor([list(piece)]) for piece in pieces]
    packed = model(torch.cat(ids, dim=1), position_ids=torch.cat(positions, dim=1)).logits
    alone = [model(piece, position_ids=place).logits for piece, place in zip(ids, positions, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
