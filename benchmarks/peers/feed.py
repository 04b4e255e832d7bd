"""Feed rows of tokens to a softmax model, one token at a time, whose cache an eviction method of kvpress keeps at a size.

    PYTHON -m benchmarks.peers.feed MODEL ROWS SCORES --method TOVA --budget 64

It runs in an environment with kvpress and its transformers (`environment.py`), and imports nothing of hf-rfa. ROWS holds
token ids and which of them are scored, both [N, T]; SCORES gets the negative log-likelihoods and which tokens are the most
likely ones, the bytes of the cache and the seconds. It prints a line after every token.

A press of kvpress scores the tokens of the cache at every step; the one with the lowest score is dropped, per layer and
key-value head. kvpress' own `DecodingPress` with an interval of 1 differs in three ways: it keeps tokens in the order of
their scores, while the window, SnapKV and LagKV read them in order of time; it forgets a layer's inputs at every
compression, of which SnapKV needs the last ones; and it rotates all of SnapKV's queries by the last position.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from kvpress import (
    CAMPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

#: Last inputs of a layer that SnapKV makes queries of.
SNAPKV_WINDOW = 8


class HeavyHitters:
    """H2O (Zhang et al. 2023): the most recent half of the budget, and the tokens with the largest sum of attention weights.

    kvpress has no press of it for a cache of given size: its `ObservedAttentionPress` sees one step's weights.
    """

    def __init__(self, budget: int) -> None:
        self.recent = budget // 2
        self.sums: dict[int, Tensor] = {}

    def score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: None, kwargs: Any) -> Tensor:
        """Return the sums of the weights [B, H, k] that the tokens of the cache have got, infinite for recent ones."""
        weights = CAMPress._compute_current_token_attention(module, hidden, keys, kwargs)
        weights = CAMPress._aggregate_attention_per_kv_head(weights, keys.shape[1])[:, :, 0]
        before = self.sums.get(module.layer_idx, weights[..., :0])
        self.sums[module.layer_idx] = F.pad(before, (0, 1)) + weights
        scores = self.sums[module.layer_idx].clone()
        scores[..., -self.recent :] = torch.inf
        return scores

    def keep(self, module: Any, indices: Tensor) -> None:
        """Keep the sums of some tokens."""
        self.sums[module.layer_idx] = self.sums[module.layer_idx].gather(-1, indices)


#: What kvpress' press of StreamingLLM makes of a cache whose keys stay as they were rotated. StreamingLLM itself numbers keys
#: by their place in the cache (`benchmarks.streams`).
WINDOW = "window with sinks, absolute positions"
#: The methods, and how many of a layer's last inputs each reads.
METHODS: dict[str, tuple[Callable[[int], Any], int]] = {
    WINDOW: (lambda budget: StreamingLLMPress(n_sink=4), 1),
    "TOVA": (lambda budget: TOVAPress(), 1),
    "H2O": (HeavyHitters, 1),
    "SnapKV": (lambda budget: SnapKVPress(window_size=SNAPKV_WINDOW, kernel_size=5), SNAPKV_WINDOW + 1),
    "LagKV": (lambda budget: LagKVPress(n_sink=4, lag_size=16), 1),
    "KeyDiff": (lambda budget: KeyDiffPress(), 1),
    "Knorm": (lambda budget: KnormPress(), 1),
}


class Eviction:
    """Drops the token with the lowest score from a layer's cache as soon as this holds ``budget`` tokens."""

    def __init__(self, method: str, budget: int) -> None:
        make, self.inputs = METHODS[method]
        self.press, self.budget = make(budget), budget
        self.hidden: dict[int, Tensor] = {}
        self.rotations: list[Tensor] = []

    def hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Score the tokens of a layer's cache after its attention, as a forward hook."""
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        keys, values = cache.keys, cache.values
        before = self.hidden.get(module.layer_idx, kwargs["hidden_states"][:, :0])
        hidden = torch.cat([before, kwargs["hidden_states"]], dim=1)[:, -self.inputs :]
        self.hidden[module.layer_idx] = hidden
        if module.layer_idx == 0:
            held = self.rotations or [each[:, :0] for each in kwargs["position_embeddings"]]
            pairs = zip(held, kwargs["position_embeddings"], strict=True)
            self.rotations = [torch.cat(pair, dim=1)[:, -self.inputs :] for pair in pairs]
        counts = isinstance(self.press, HeavyHitters)
        length = keys.shape[2]
        if length < self.budget and not counts:
            return
        self.press.compression_ratio = 0.5 / length  # by which the window drops one token
        scores = self.press.score(module, hidden, keys, values, None, {"position_embeddings": self.rotations})
        if length < self.budget:
            return
        kept = scores.topk(length - 1, dim=-1).indices.sort(dim=-1).values
        if counts:
            self.press.keep(module, kept)
        chosen = kept[..., None].expand(-1, -1, -1, keys.shape[-1])
        cache.keys, cache.values = keys.gather(2, chosen), values.gather(2, chosen)

    def num_bytes(self) -> int:
        """Return the bytes that a method holds beside the cache, of all rows: inputs of layers, and sums of weights."""
        inputs = self.hidden.values() if self.inputs > 1 else ()
        sums = self.press.sums.values() if isinstance(self.press, HeavyHitters) else ()
        return sum(tensor.nbytes for tensor in (*inputs, *sums))

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Attach the hooks to a model's layers for as long as the context lasts."""
        attention = [layer.self_attn for layer in model.model.layers]
        for module in attention:
            module.rotary_emb = model.model.rotary_emb
        hooks = [module.register_forward_hook(self.hook, with_kwargs=True) for module in attention]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def feed(model: Any, ids: Tensor, scored: Tensor) -> dict[str, Any]:
    """Return (nats, correct), [N, T] each, the most bytes that the cache of a row had, and the seconds."""
    nats = torch.zeros(ids.shape, dtype=torch.float64)
    correct = torch.zeros(ids.shape, dtype=torch.bool)
    cache, most = DynamicCache(), Counter[int]()

    def measure(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = cache.layers[module.layer_idx]
        most[module.layer_idx] = max(most[module.layer_idx], (layer.keys.nbytes + layer.values.nbytes) // len(ids))

    # Before the hooks that evict: what attention has read.
    hooks = [
        each.self_attn.register_forward_hook(measure, with_kwargs=True, prepend=True) for each in model.model.layers
    ]
    start = time.perf_counter()
    for position in range(ids.shape[1] - 1):
        place = torch.tensor([position])
        options = {"past_key_values": cache, "cache_position": place, "position_ids": place[None], "use_cache": True}
        hidden = model.model(ids[:, position, None], **options).last_hidden_state[:, 0]
        rows = scored[:, position + 1]
        if bool(rows.any()):
            logits, targets = model.lm_head(hidden[rows]).float(), ids[rows, position + 1]
            nats[rows, position + 1] = F.cross_entropy(logits, targets, reduction="none").double()
            correct[rows, position + 1] = logits.argmax(-1) == targets
        sys.stdout.write(f"{position + 1}\n")
        sys.stdout.flush()
    seconds = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    return {"nats": nats, "correct": correct, "cache_bytes": most.total(), "seconds": seconds}


def main() -> None:
    """Feed the rows of a file, and write another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("scores")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument(
        "--budget", type=int, required=True, help="tokens of the cache that a query sees at most, its own included"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    rows = torch.load(arguments.rows)
    eviction = Eviction(arguments.method, arguments.budget)
    with eviction(model):
        scores = feed(model, rows["ids"], rows["scored"])
        scores["other_bytes"] = eviction.num_bytes() // len(rows["ids"])
    torch.save(scores, arguments.scores)


if __name__ == "__main__":
    main()
