"""Requests in one batch answer as `generate` does, whenever they come and wherever their beginning was kept."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers.cache_utils import DynamicCache

from hf_rfa.errors import InputError
from hf_rfa.inference import cache_num_bytes, load_cache, save_cache
from hf_rfa.inference.cache_files import read_notes
from hf_rfa.serving.engine import BusyError
from hf_rfa.serving.rows import Rows, read
from hf_rfa.serving.sessions import Sessions, model_digest
from hf_rfa.serving.writing import Writing
from tests.families import make

MODELS = [("gpt2", "positive-gate"), ("gpt2", "slots-gate"), ("llama", "summary"), ("llama", "retrieval-gate")]
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(1000 * length + seed)
    return [chosen.randrange(4, 61) for _ in range(length)]


def test_rows_that_join_late_answer_as_they_would_alone(client_of):
    """More requests than rows, of lengths from 1 past the epochs of old tokens; they wait, join and leave as they can."""
    client = client_of()
    prompts = [prompt_of(length) for length in (1, 40, 2, 7, 90, 16, 17, 33)]
    asked = [client.ask(prompt, 5 + 4 * number) for number, prompt in enumerate(prompts)]
    for number, (prompt, request) in enumerate(zip(prompts, asked, strict=True)):
        assert client.answer(request) == client.alone(prompt, 5 + 4 * number)
    assert client.engine.requests == len(client.engine._rows) == 0


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_all_kinds_of_memories_share_a_batch(client_of, family, variant):
    client = client_of(make(family, variant, eos_token_id=2, pad_token_id=1))
    prompts = [prompt_of(length) for length in (1, 30, 9, 14)]
    asked = [client.ask(prompt) for prompt in prompts]
    assert [client.answer(each) for each in asked] == [client.alone(prompt) for prompt in prompts]


def test_sampling_with_a_seed_is_that_of_generate_alone(client_of):
    client = client_of()
    client.model.generation_config.repetition_penalty = 1.3  # what the checkpoint says goes for a server too
    try:
        asked = [client.ask(prompt_of(9), **SAMPLING, seed=seed) for seed in range(4)]
        for seed, each in enumerate(asked):
            assert client.answer(each) == client.alone(prompt_of(9), seed=seed, do_sample=True, **SAMPLING)
    finally:
        client.model.generation_config.repetition_penalty = None


@pytest.mark.parametrize("memory", [2**30, 0], ids=["in memory", "from disk"])
def test_a_turn_reads_only_what_is_new(client_of, tmp_path, memory):
    client = client_of(memory=memory, folder=tmp_path)
    first = prompt_of(50)
    answer = client.answer(client.ask(first))
    again = client.ask(first)
    assert client.answer(again) == answer
    assert again[0].cached == 49
    whole = first + answer + prompt_of(20, seed=1)
    later = client.ask(whole, **SAMPLING, seed=3)
    assert client.answer(later) == client.alone(whole, seed=3, do_sample=True, **SAMPLING)
    assert later[0].cached == 61  # all but the last token, which nobody has read
    another = client.ask(whole, owner="another")
    client.answer(another)
    assert another[0].cached == 0
    client.engine.close()
    restarted = client_of(memory=memory, folder=tmp_path)
    resumed = restarted.ask(whole)
    assert restarted.answer(resumed) == client.alone(whole)
    assert resumed[0].cached == len(whole) - 1


def test_what_is_aborted_frees_its_row_and_is_kept(client_of):
    client = client_of(rows=1)
    request, pieces = client.ask(prompt_of(30), 10_000)
    waiting, _ = client.ask(prompt_of(31))
    pieces.get(timeout=60)
    client.engine.cancel(waiting)
    client.engine.cancel(request)
    after = client.ask(prompt_of(8))
    assert client.answer(after) == client.alone(prompt_of(8))
    went_on = client.ask(request.tokens, 3)
    client.answer(went_on)
    assert went_on[0].cached == len(request.tokens) - 1 == 29 + request.new


def test_a_full_server_and_one_that_closes_refuse(client_of):
    client = client_of(rows=1, most_requests=2)
    pieces = [client.ask(prompt_of(5, seed), 10_000)[1] for seed in range(2)]
    with pytest.raises(BusyError, match="there are 2 requests already"):
        client.ask(prompt_of(6))
    client.engine.close()
    ends = []
    for each in pieces:
        while (piece := each.get(timeout=60)).finish is None:
            pass
        ends.append(piece.finish)
    assert ends == ["error", "error"]
    with pytest.raises(BusyError):
        client.ask(prompt_of(6))
    assert not [thread for thread in threading.enumerate() if thread is client.engine._thread]


def test_failures_reach_who_asked(client_of, monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    client = client_of()
    with monkeypatch.context() as patch:
        patch.setattr(client.engine._rows, "step", fail)
        assert client.ask(prompt_of(5))[1].get(timeout=60).finish == "error"
    assert client.answer(client.ask(prompt_of(5))) == client.alone(prompt_of(5))
    monkeypatch.setattr(client.engine._rows, "remove", fail)
    assert client.ask(prompt_of(5), 1)[1].get(timeout=60).finish == "error"
    assert client.engine.closing
    with pytest.raises(BusyError):
        client.ask(prompt_of(6))


def test_least_recently_used_sessions_go_first(loaded, tmp_path):
    model, _ = loaded
    caches = [DynamicCache(config=model.config) for _ in range(3)]
    with torch.no_grad():
        for seed, cache in enumerate(caches):
            read(model, cache, [prompt_of(10, seed)], [list(range(10))])
    size = cache_num_bytes(caches[0])
    for disk, found in ((0, [False, True, True]), (3 * size, [True, True, True])):
        sessions = Sessions(model, memory=2 * size, folder=tmp_path / str(disk), disk=disk)
        for seed, cache in enumerate(caches):
            sessions.keep("", prompt_of(10, seed), cache)
        assert [sessions.find("", [*prompt_of(10, seed), 5]) is not None for seed in range(3)] == found


def test_many_sessions_cost_an_answer_no_time(loaded, tmp_path):
    """Of 5,000 that are in files, an answer looks at none."""
    model, _ = loaded
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        read(model, cache, [prompt_of(10)], [list(range(10))])

    def seconds(folder: Path) -> float:
        sessions, times = Sessions(model, memory=2**30, folder=folder, disk=2**30), []
        for seed in range(20):
            start = time.perf_counter()
            sessions.keep("", prompt_of(10, seed), cache)
            times.append(time.perf_counter() - start)
        return min(times)

    (tmp_path / "many").mkdir()
    for number in range(5_000):
        (tmp_path / "many" / f"{number:064x}-10.memory").touch()
    assert seconds(tmp_path / "many") < 5 * seconds(tmp_path / "none")


def test_rows_go_on_while_a_file_is_written(client_of, tmp_path, monkeypatch):
    """The answer whose memory is written ends with its file; others do not wait, and a shutdown does."""
    writes, begun = threading.Event(), threading.Event()

    def slow(*args, **options):
        begun.set()
        assert writes.wait(60)
        save_cache(*args, **options)

    monkeypatch.setattr("hf_rfa.serving.sessions.save_cache", slow)
    client = client_of(folder=tmp_path)
    first = client.ask(prompt_of(20))
    assert begun.wait(60)
    later, pieces = client.ask(prompt_of(30), 200)
    for _ in range(5):
        assert pieces.get(timeout=60).finish is None
    assert not list(tmp_path.glob("*.memory"))
    again = client.ask(first[0].tokens, 2)  # found before it is in a file
    while not again[0].new:
        time.sleep(0.01)
    assert again[0].cached == len(first[0].tokens) - 1
    client.engine.cancel(later)
    closing = threading.Thread(target=client.engine.close)
    closing.start()
    writes.set()
    closing.join(60)
    assert client.answer(first) == client.alone(prompt_of(20))
    assert f"-{len(first[0].tokens) - 1}.memory" in "".join(path.name for path in tmp_path.glob("*.memory"))


def test_a_disk_that_is_full_costs_the_memory_alone(client_of, tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("hf_rfa.serving.sessions.save_cache", full)
    client = client_of(memory=0, folder=tmp_path)
    for _ in range(2):
        asked = client.ask(prompt_of(20))
        assert client.answer(asked) == client.alone(prompt_of(20))
        assert asked[0].cached == 0
    assert "a session is not kept in a file: No space left on device" in caplog.text
    assert not list(tmp_path.glob("*.memory"))


def damage(path: Path, how: str, model) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        del content[len(content) // 2 :]
    elif how == "zeros":  # as after a crash of the machine
        content[-100:] = bytes(100)
    else:
        save_cache(load_cache(path, model), path, notes={**read_notes(path), how: "0" * 64})
        return
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["torn", "zeros", "key"])
def test_a_torn_or_foreign_file_is_not_served(client_of, loaded, tmp_path, how, caplog):
    client = client_of(memory=0, folder=tmp_path)
    answer = client.answer(client.ask(prompt_of(20)))
    client.engine.close()
    for path in tmp_path.glob("*.memory"):
        damage(path, how, loaded[0])
    restarted = client_of(memory=0, folder=tmp_path)
    again = restarted.ask(prompt_of(20))
    assert restarted.answer(again) == answer
    assert again[0].cached == 0
    assert "a session is left out" in caplog.text


def test_a_secret_that_was_never_written_is_none(loaded, tmp_path):
    """A process that ended before it wrote the file left an empty one: names of sessions would be anybody's to find."""
    (model, _), names, tokens = loaded, set(), prompt_of(10)
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "secret").touch()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            read(model, cache, [tokens], [list(range(10))])
        sessions = Sessions(model, memory=2**20, folder=folder, disk=2**20)
        sessions.keep("", tokens, cache)
        sessions.close()
        assert (folder / "secret").stat().st_mode & 0o777 == 0o600
        assert Sessions(model, memory=0, folder=folder, disk=2**20).find("", [*tokens, 5]) is not None
        names |= {path.name for path in folder.glob("*.memory")}
    assert len(names) == 2


def test_models_have_digests_of_their_own(loaded):
    model, _ = loaded
    before = model_digest(model)
    assert model_digest(model) == before
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight[0, 0].item()
    weight.data[0, 0] += 1
    assert model_digest(model) != before
    weight.data[0, 0] = kept
    assert model_digest(model) == before


def test_models_whose_caches_grow_are_refused():
    with pytest.raises(InputError, match="layers whose cache grows"):
        Rows(make("gpt2", "hybrid"))


def test_text_comes_in_whole_characters_and_ends_before_a_stop_string():
    letters = sorted(ByteLevel.alphabet())
    by_bytes: Any = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    by_bytes.pre_tokenizer, by_bytes.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    by_words = Tokenizer(WordLevel({"<pad>": 0, "w1": 1, "w2": 2, "w3": 3}))
    by_words.add_special_tokens(["<pad>"])

    writing = Writing(SimpleNamespace(backend_tokenizer=by_words))
    assert [writing.put(token) for token in (1, 0, 0, 2, 3)] == ["w1", "", "", " w2", " w3"]

    def said(text: str, *stops: str) -> tuple[list[str], bool]:
        writing, parts = Writing(SimpleNamespace(backend_tokenizer=by_bytes), stops), []
        for token in by_bytes.encode(text).ids:
            parts.append(writing.put(token))
            if writing.stopped:
                break
        return [part for part in [*parts, writing.rest()] if part], writing.stopped

    assert said("aé€") == (["a", "é", "€"], False)
    parts, stopped = said("abcabd", "abd", "x")
    assert (stopped, "".join(parts)) == (True, "abc")
    assert said("aab", "abc") == (["a", "ab"], False)
