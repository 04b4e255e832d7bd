"""Compares vLLM with transformers on one converted checkpoint; runs in an environment that has vLLM (`test_vllm.py`).

    python hf-rfa-vllm/tests/vllm_checks.py CHECKPOINT CHECK… [--tokens 200] [--prompts 16] [--dtype float32] [--engine JSON]

prints one line of JSON: the figures of the checks. The reference is transformers' model, one prompt at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

from hf_rfa.models.cache_names import cache_argument

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, whose blocks can then be counted

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import LLM, SamplingParams

import hf_rfa  # noqa: F401  # registers the RFA models with transformers

Prompt = list[int]


class Checks:
    """A checkpoint in vLLM and in transformers."""

    def __init__(self, checkpoint: str, arguments: argparse.Namespace) -> None:
        dtype = getattr(torch, arguments.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        options = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 512} | arguments.engine
        self.llm = LLM(checkpoint, dtype=arguments.dtype, skip_tokenizer_init=True, enforce_eager=True, **options)
        self.tokens, self.seed = arguments.tokens, torch.Generator().manual_seed(0)
        self.prompts = [self.prompt(length) for length in range(1, 8 * arguments.prompts, 8)]
        self.known: dict[tuple[int, ...], Prompt] = {}

    def prompt(self, length: int) -> Prompt:
        """Return random tokens."""
        return torch.randint(5, self.model.config.vocab_size, (length,), generator=self.seed).tolist()

    @torch.inference_mode()
    def expected(self, prompt: Prompt, count: int) -> Prompt:
        """Return the tokens that transformers continues a prompt with, greedily."""
        found = self.known.setdefault(tuple(prompt), [])
        if len(found) < count:
            cache, inputs = DynamicCache(config=self.model.config), torch.tensor([prompt])
            found.clear()
            while len(found) < count:
                logits = self.model(inputs, **cache_argument(cache)).logits
                inputs = logits[:, -1:].argmax(-1)
                found.append(int(inputs))
        return found[:count]

    def sampling(self, count: int, **options: Any) -> SamplingParams:
        """Return the settings of greedy generation of ``count`` tokens."""
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **options)

    def generate(self, prompts: list[Prompt], count: int) -> list[Prompt]:
        """Return the tokens that vLLM continues prompts with, all at once."""
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(inputs, self.sampling(count), use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def run(
        self, arrivals: dict[int, list[tuple[str, Prompt, int, int]]], after: Callable[[int], None]
    ) -> dict[str, Prompt]:
        """Return the tokens of requests (name, prompt, tokens, priority) that arrive at steps, by name."""
        engine, found, step = self.llm.llm_engine, {}, 0
        while arrivals or engine.has_unfinished_requests():
            for name, prompt, count, priority in arrivals.pop(step, []):
                inputs: Any = {"prompt_token_ids": prompt}
                engine.add_request(name, inputs, self.sampling(count), priority=priority)
            for each in engine.step():
                if each.finished:
                    found[each.request_id] = list(each.outputs[0].token_ids)
            after(step)
            step += 1
        return found

    @torch.inference_mode()
    def logprobs(self) -> dict[str, Any]:
        """Compare the log-probabilities of prompts and continuations with transformers', which generates them token by token.

        What transformers computes of the whole text at once says how much of a difference is rounding. Two tokens of nearly
        equal importance can change places in a slot by it.
        """
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        settings = self.sampling(self.tokens, logprobs=5, prompt_logprobs=5)
        differences: list[list[float]] = []
        of_transformers: list[list[float]] = []
        for prompt, found in zip(self.prompts, self.llm.generate(inputs, settings, use_tqdm=False), strict=True):
            text, cache = [*prompt, *found.outputs[0].token_ids], DynamicCache(config=self.model.config)
            parts = [prompt, *([token] for token in text[len(prompt) :])]
            rows = [self.model(torch.tensor([part]), **cache_argument(cache)).logits[0] for part in parts]
            expected = torch.cat(rows).float().log_softmax(-1)
            whole = self.model(torch.tensor([text])).logits[0].float().log_softmax(-1)
            given: Any = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs]
            differences.append([])
            of_transformers.append([])
            for place, tokens in enumerate(given):
                chosen = torch.tensor(list(tokens))
                logprobs = torch.tensor([each.logprob for each in tokens.values()])
                differences[-1].append(float((expected[place, chosen] - logprobs).abs().max()))
                of_transformers[-1].append(float((expected[place, chosen] - whole[place, chosen]).abs().max()))
        return {
            "largest_difference": max(map(max, differences)),
            "median": statistics.median(each for places in differences for each in places),
            "places": sum(map(len, differences)),
            "largest_by_prompt": [float(f"{max(places):.1e}") for places in differences],
            "of_transformers_by_prompt": [float(f"{max(places):.1e}") for places in of_transformers],
        }

    def greedy(self) -> dict[str, Any]:
        """Compare the tokens of prompts, in one batch and each alone, with transformers'."""
        expected = [self.expected(prompt, self.tokens) for prompt in self.prompts]
        together = self.generate(self.prompts, self.tokens)
        alone = [self.generate([prompt], self.tokens)[0] for prompt in self.prompts]
        return {
            "together": sum(map(list.__eq__, together, expected)),
            "alone": sum(map(list.__eq__, alone, expected)),
            "of": len(self.prompts),
            "lengths": [len(each) for each in self.prompts],
            "first_deviations": [
                next((place for place, pair in enumerate(zip(*each, strict=True)) if pair[0] != pair[1]), None)
                for each in zip(together, expected, strict=True)
            ],
        }

    def arrivals(self, count: int = 64) -> dict[str, Any]:
        """Compare the tokens of requests of mixed lengths that arrive over time."""
        lengths = torch.randint(1, 150, (2, count), generator=self.seed).tolist()
        requests = [(f"{n}", self.prompt(a), 1 + b // 4, 0) for n, (a, b) in enumerate(zip(*lengths, strict=True))]
        steps: dict[int, list[Any]] = {}
        for index, request in enumerate(requests):
            steps.setdefault(index * 3 // 2, []).append(request)
        found = self.run(steps, lambda step: None)
        same = sum(self.expected(prompt, tokens) == found.get(name) for name, prompt, tokens, _ in requests)
        return {"same": same, "of": count}

    def aborts(self) -> dict[str, Any]:
        """Compare the tokens of requests that take the blocks of aborted ones; run it with few blocks."""
        first = [(f"aborted {n}", self.prompt(40 + n), 100, 0) for n in range(4)]
        then = [(f"{n}", self.prompt(3 + 20 * n), 30, 0) for n in range(4)]

        def abort(step: int) -> None:
            if step == 20:
                self.llm.llm_engine.abort_request([name for name, *_ in first])

        found = self.run({0: first, 21: then}, abort)
        same = sum(self.expected(prompt, tokens) == found.get(name) for name, prompt, tokens, _ in then)
        return {"same": same, "of": len(then), "finished": sorted(found)}

    def preemptions(self) -> dict[str, Any]:
        """Compare the tokens of requests that are preempted and begin again in other blocks; run it with few blocks."""
        requests = [(f"{n}", self.prompt(30 - 5 * n), 30 + n, 0) for n in range(6)]
        scheduler, preempted = self.core().scheduler, set()

        def preempt(step: int) -> None:
            if step in (7, 20, 21):
                self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
                preempted.update(each.request_id for each in scheduler.requests.values() if each.num_preemptions)

        found = self.run({0: requests}, preempt)
        same = sum(self.expected(prompt, tokens) == found.get(name) for name, prompt, tokens, _ in requests)
        return {"same": same, "of": len(requests), "preempted": len(preempted)}

    def prefixes(self, turns: int = 4) -> dict[str, Any]:
        """Compare conversations at once, whose turns begin with the turn before, and first with a prompt that all share.

        Run it with prefix caching. Of a turn vLLM has the tokens up to the last whole block of the prompt before, which it
        leaves by one token at least.
        """
        size, shared = self.llm.llm_engine.vllm_config.cache_config.block_size, self.prompt(50)
        texts = [[*shared, *self.prompt(9 + 20 * n)] for n in range(3)]
        before, same = [len(shared)] * len(texts), 0
        cached: list[int] = []
        expected: list[int] = []
        self.generate([shared], 1)
        for _ in range(turns):
            inputs: Any = [{"prompt_token_ids": text} for text in texts]
            for index, found in enumerate(self.llm.generate(inputs, self.sampling(30), use_tqdm=False)):
                answer, text = list(found.outputs[0].token_ids), texts[index]
                same += answer == self.expected(text, 30)
                cached.append(found.num_cached_tokens)
                expected.append((before[index] - 1) // size * size)
                before[index] = len(text)
                texts[index] = [*text, *answer, *self.prompt(17)]
        return {"same": same, "of": len(texts) * turns, "cached": cached, "expected": expected}

    def memory(self) -> dict[str, Any]:
        """Return the bytes that vLLM's cache holds of one sequence, by its number of tokens."""
        pool, states = self.core().scheduler.kv_cache_manager.block_pool, self.served_model().rfa_states
        block_bytes = states.get_kv_cache_spec(self.llm.llm_engine.vllm_config).page_size_bytes
        found, longest = {}, self.llm.llm_engine.vllm_config.model_config.max_model_len
        for length in (100, min(8000, longest - 8)):
            held: list[int] = []
            free = pool.get_num_free_blocks()
            request = ("one", self.prompt(length), 8, 0)
            self.run({0: [request]}, lambda step, held=held, free=free: held.append(free - pool.get_num_free_blocks()))
            found[length] = max(held) * block_bytes
        return {"bytes": found}

    def core(self) -> Any:
        """Return vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    def served_model(self) -> Any:
        """Return vLLM's model."""
        return self.core().model_executor.driver_worker.worker.get_model()


def main() -> None:
    """Run the checks that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("checks", nargs="+")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", type=json.loads, default={})
    arguments = parser.parse_args()
    checks = Checks(arguments.checkpoint, arguments)
    print(json.dumps({name: getattr(checks, name)() for name in arguments.checks}))  # noqa: T201


if __name__ == "__main__":
    main()
