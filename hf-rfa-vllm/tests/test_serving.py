"""Serving without a server: states in blocks, batches of many sequences in one row, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch
from hf_rfa_vllm import served_architectures
from hf_rfa_vllm.batches import group_tokens, serve
from hf_rfa_vllm.states import ALIGNMENT, state_layout
from hf_rfa_vllm.support import check_block_sizes, check_support
from torch.testing import assert_close
from transformers.cache_utils import DynamicCache

import hf_rfa
from hf_rfa.models import modeling_rfa_decoder
from hf_rfa.models.attention import RFAAttentionMixin
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import ROOT
from tests.families import CASES, draw_importance, has_encoder, make

PLUGIN = ROOT / "hf-rfa-vllm"
CASES = [case for case in CASES if not has_encoder(case[0])]
CONSTANT = [case for case in CASES if set(make(*case).config.cache_layer_types()) == {"rfa"}]
#: Sequences of the batches that a server computes one after the other: name, number of tokens, block.
BATCHES = [
    [("a", 7, 1), ("b", 1, 2), ("c", 7, 3)],
    [("a", 1, 1), ("b", 1, 2), ("d", 12, 4), ("c", 5, 3)],
    [("a", 1, 1), ("d", 1, 4), ("e", 2, 2), ("c", 1, 3)],  # b has ended, and e gets its block
    [("e", 1, 2), ("d", 3, 4), ("f", 1, 1)],
]


class Server:
    """What `hf_rfa_vllm.vllm_states.RFAStates` is, without vLLM: blocks that hold whatever was there before."""

    def __init__(self, model, num_blocks):
        layers = [module for module in model.modules() if isinstance(module, RFAAttentionMixin)]
        self.layouts = []
        for index, layer in enumerate(layers):
            offset = self.layouts[-1].end if index else 0
            self.layouts.append(state_layout(layer, model.dtype, offset=offset))
            serve(layer, self, index)
        self.blocks = torch.full((num_blocks, self.layouts[-1].end), -1, dtype=torch.int8)  # NaN in every float
        self.batch = None

    def groups(self):
        return self.batch

    def views(self, index):
        return self.layouts[index].views(self.blocks)


@pytest.fixture(params=CONSTANT, ids=str)
def models(request):
    """Two models of the same weights."""
    model, same = (make(*request.param).eval() for _ in range(2))
    draw_importance(model)
    same.load_state_dict(model.state_dict())
    return model, same


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, RFAAttentionMixin)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_block_has_room_for_what_a_cache_holds(models, dtype):
    model = models[0].to(dtype)
    cache, offset = DynamicCache(config=model.config), 0
    for length in (1, 30):
        model(torch.ones(1, length, dtype=torch.long), **cache_argument(cache))
        for attention, layer in zip(layers_of(model), cache.layers, strict=True):
            layout, tensors = state_layout(attention, dtype, offset=offset), layer.tensors()
            assert layout.pieces.keys() == tensors.keys()
            for name, piece in layout.pieces.items():
                assert (piece.shape, piece.dtype) == (tensors[name].shape[1:], tensors[name].dtype)
                assert piece.offset % ALIGNMENT == 0
            lost = layout.end - offset - sum(tensor.nbytes for tensor in tensors.values())
            assert lost < len(tensors) * ALIGNMENT
            offset = layout.end


@torch.no_grad()
def test_a_batch_computes_what_every_sequence_does_alone(models):
    check_batches(*(each.double() for each in models))  # how products are rounded depends on their sizes


@pytest.mark.parametrize("variant", ["slots", "retrieval"])
@torch.no_grad()
def test_sequences_go_on_past_l_each_by_itself(variant):
    """A server passes true positions, whatever stands beside a token in its row."""
    model, same = (make("llama", variant, max_distance=6, distance_step=2).double() for _ in range(2))
    check_batches(model, same, atol=1e-5)


def check_batches(model, alone, atol=1e-11):
    """Compare a server's batches with every sequence read by itself."""
    server, caches, texts = Server(model, 5), {}, {}
    for batch in BATCHES:
        starts, row, positions, expected, past = [0], [], [], [], []
        for name, count, _ in batch:
            tokens = torch.randint(1, 50, (count,))
            past.append(texts.get(name, 0))
            cache = caches.setdefault(name, DynamicCache(config=alone.config))
            positions.append(torch.arange(count) + texts.get(name, 0))
            texts[name] = texts.get(name, 0) + count
            expected.append(alone(tokens[None], **cache_argument(cache)).logits[0])
            row.append(tokens)
            starts.append(starts[-1] + count)
        server.batch = group_tokens(starts, past, torch.tensor([block for *_, block in batch]))
        given = model(torch.cat(row)[None], position_ids=torch.cat(positions)[None], use_cache=False).logits[0]
        assert_close(given, torch.cat(expected), atol=atol, rtol=max(1e-9, atol))


@torch.no_grad()
def test_a_dry_run_writes_nothing(models):
    server = Server(models[0], 2)
    assert models[0](torch.ones(1, 9, dtype=torch.long), use_cache=False).logits.isfinite().all()
    assert (server.blocks == -1).all()


def test_places_of_no_sequence_get_zeros():
    model = make("llama", "slots").eval()
    server = Server(model, 3)
    server.batch = group_tokens([0, 2], [0], torch.tensor([1]))
    attention, query = layers_of(model)[0], torch.randn(1, 4, 5, 6)
    output, _ = attention.attend(query, query[:, :2], query[:, :2], hidden_states=torch.randn(1, 5, 24))
    assert (output[0, :, :2] != 0).all()
    assert (output[0, :, 2:] == 0).all()


def test_groups_of_sequences_with_equally_many_tokens():
    groups = group_tokens([0, 1, 4, 5, 5, 8, 9], [7, 0, 3, 2, 0, 0], torch.arange(10, 16))
    found = [(group.tokens.tolist(), group.blocks.tolist(), group.past) for group in groups]
    assert found == [([[0], [4]], [10, 12], 3), ([[1, 2, 3], [5, 6, 7]], [11, 14], 0), ([[8]], [15], 0)]


def test_architectures_are_those_of_decoders():
    names = served_architectures()
    assert {"RFAGPT2LMHeadModel", "RFALlamaForCausalLM", "RFAQwen3ForCausalLM", "RFAOPTForCausalLM"} <= set(names)
    for name in names:
        assert hasattr(hf_rfa, name) or getattr(modeling_rfa_decoder, name).__name__ == name
    assert not any("Bart" in name or "Marian" in name for name in names)


def test_vllm_finds_the_plugin():
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"hf_rfa": "hf_rfa_vllm:register"}
    assert project["version"] == hf_rfa.__version__


def test_importing_it_imports_no_vllm():
    command = "import sys, hf_rfa_vllm.batches; assert not [name for name in sys.modules if name.startswith('vllm')]"
    subprocess.run([sys.executable, "-c", command], cwd=PLUGIN, check=True)


def settings(family, variant, **changes):
    """Return vLLM's configuration, as far as it is read."""
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **changes}
    config = make(family, variant).config
    return SimpleNamespace(
        model_config=SimpleNamespace(model="MODEL", hf_text_config=config, is_moe=changes.get("is_moe", False)),
        speculative_config=changes.get("speculative"),
        parallel_config=SimpleNamespace(**parallel),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (settings("llama", "hybrid"), r"layer 1 is of type 'full_attention'.*--layers all"),
        (settings("llama", "slots", speculative=object()), "speculative"),
        (settings("llama", "slots", pipeline_parallel_size=2), "--pipeline-parallel-size"),
        (settings("llama", "slots", tensor_parallel_size=4), "2 key-value heads .* among 4 ranks"),
        (settings("llama", "retrieval", tensor_parallel_size=2), "retrieval heads"),
        (settings("llama", "slots", is_moe=True), "experts"),
    ],
)
def test_what_cannot_be_served_is_refused(given, said):
    with pytest.raises(ValueError, match=f"cannot serve MODEL with vLLM: .*{said}"):
        check_support(given)


def block_sizes(mamba, tokens, *, given=True, prefix_caching=True):
    return SimpleNamespace(
        mamba_block_size=mamba,
        block_size=tokens,
        user_specified_block_size=given,
        enable_prefix_caching=prefix_caching,
    )


def test_a_size_of_blocks_that_has_no_effect_is_refused():
    for refused in (block_sizes(16, 32), block_sizes(16, 16, given=False)):  # a platform may change the default
        with pytest.raises(ValueError, match=r"--mamba-block-size 16 has no effect .* Pass --block-size 16"):
            check_block_sizes(refused)
    for taken in (block_sizes(None, 32), block_sizes(32, 32), block_sizes(512, 16, prefix_caching=False)):
        check_block_sizes(taken)


@pytest.mark.parametrize("case", CONSTANT, ids=str)
def test_what_can_be_served_is_not_refused(case):
    check_support(settings(*case))
