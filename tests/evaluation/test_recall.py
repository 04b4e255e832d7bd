"""The recall suite: oracles that recall all, nothing, or what lies near, and the control that sees a window and sinks."""

from __future__ import annotations

import json
import math
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    GPT2LMHeadModel,
)
from transformers.cache_utils import DynamicCache

from hf_rfa import bench
from hf_rfa.convert import convert
from hf_rfa.errors import InputError
from hf_rfa.evaluation.memory import cache_memory
from hf_rfa.evaluation.recall import recall_suite, window_and_sinks
from hf_rfa.evaluation.recall.probes import DEPTHS, Rows, needle, repeated, score_tokens
from hf_rfa.evaluation.recall.suite import Probe, make_probes, run_probe
from hf_rfa.models.cache_names import cache_argument
from tests.conftest import DEMO_MODEL, DEMO_TEXT, leftovers, tiny_parent_config, tiny_seq2seq_config
from tests.families import base_config, make_gpt2


class Oracle(nn.Module):
    """Says what followed the longest repetition of its last tokens, among the last ``view`` tokens; a guess without one."""

    def __init__(self, vocab_size: int, view: int | None) -> None:
        super().__init__()
        self.embeddings, self.view, self.device = nn.Embedding(vocab_size, 1), view, torch.device("cpu")

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def next_token(self, tokens: list[int], random: Random) -> int:
        seen = tokens[-self.view :] if self.view is not None else tokens
        best, found = 0, random.randrange(self.embeddings.num_embeddings)
        for place in range(len(seen) - 1):
            same = 0
            while same <= place and seen[place - same] == seen[-1 - same]:
                same += 1
            if same > 0 and same >= best:
                best, found = same, seen[place + 1]
        return found

    def forward(self, input_ids, use_cache, logits_to_keep):
        random = Random(0)
        logits = torch.zeros(len(input_ids), len(logits_to_keep), self.embeddings.num_embeddings)
        for row, tokens in enumerate(input_ids.tolist()):
            for column, place in enumerate(logits_to_keep.tolist()):
                logits[row, column, self.next_token(tokens[: place + 1], random)] = 9.0
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Tokens each of which occurs once."""
    return torch.tensor(Random(1).sample(range(3000), 1200))


def all_probes(tokenizer, text, seed=0):
    return list(make_probes(tokenizer, 256, text, quick=True, seed=seed))


@pytest.mark.parametrize("view", [None, 40])
def test_an_oracle_scores_as_far_as_it_sees(tokenizer, text, view):
    """With all in view everything that was said before is recalled; with 40 tokens what lies within them, exactly."""
    probes = all_probes(tokenizer, text)
    assert {(probe.name, probe.length) for probe in probes} == {("text again", 128), ("needle in text", 256)}
    short = Probe("text again", 32, None, repeated(text[None, :32]))
    oracle = Oracle(len(tokenizer), view)
    for probe in [short, *probes]:
        figure = run_probe(oracle, probe)
        if view is None:
            assert figure.accuracy == 1, probe
        elif probe.depth is None:  # a token stands one length before its copy, after the one that it follows
            assert figure.accuracy > 0.97 if probe.length < view else figure.accuracy < 0.1, probe
        else:
            assert figure.accuracy == float(probe.length * (1 - probe.depth) < view / 2), probe


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_needle_stands_at_its_depth(tokenizer, depth):
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    length = 200
    rows = needle(tokenizer, ids("The river is wide. The wind is cold. " * 20), length, depth, 3, Random(depth))
    assert rows.ids.shape[1] == pytest.approx(length, abs=2)
    for row, scored in zip(rows.ids, rows.scored, strict=True):
        end = int(scored.nonzero().max()) + 1
        text, answer = tokenizer.decode(row[:end]), tokenizer.decode(row[scored])
        sentence = text[text.rindex("The secret") :]
        assert text.count(sentence) == 2
        assert sentence.endswith(answer)
        assert 100 <= int(answer) <= 999
        before = len(ids(text[: text.index("The secret")]))
        assert before / (end - 2 * len(ids(sentence))) == pytest.approx(depth, abs=0.03)


@torch.no_grad()
def test_scores_are_those_of_the_logits():
    model = GPT2LMHeadModel(tiny_parent_config()).eval()
    ids = torch.randint(0, 61, (5, 20))
    scored = torch.rand(5, 20) < 0.3
    scored[:, 0] = False
    score = score_tokens(model, Rows(ids, scored))
    log_probs = model(ids).logits[:, :-1].double().log_softmax(-1)
    nats = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    assert score.mean_nats == pytest.approx(float(nats[scored[:, 1:]].mean()), rel=1e-5)
    right = log_probs.argmax(-1) == ids[:, 1:]
    assert score.accuracy == pytest.approx(float(right[scored[:, 1:]].double().mean()))


def test_likelihoods_that_are_not_finite_are_an_error():
    model = GPT2LMHeadModel(tiny_parent_config()).eval()
    model.transformer.ln_f.weight.data.fill_(torch.nan)
    ids = torch.randint(0, 61, (2, 9))
    with pytest.raises(InputError, match="not finite"):
        score_tokens(model, Rows(ids, torch.arange(9).expand(2, -1) > 3))


def test_every_row_counts_where_all_scored_tokens_are_right():
    model = Oracle(20, None)
    ids = torch.tensor([[1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 4]])
    scored = torch.tensor([[False] * 4 + [True] * 2] * 2)
    score = score_tokens(model, Rows(ids, scored))
    assert (score.accuracy, score.answers().accuracy) == (0.75, 0.5)
    assert score.answers().mean_nats == pytest.approx(2 * score.mean_nats)


# The control


@pytest.fixture(params=["gpt2", "llama"])
def softmax_model(request):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(base_config(request.param)).eval()


@torch.no_grad()
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (5, 3), (40, 4)])
def test_the_control_is_softmax_attention_with_that_mask(softmax_model, window, sinks):
    """Against the eager form with the mask given as such, whole and in splits with a cache."""
    ids = torch.randint(0, 61, (2, 30))
    seen = [[t - window < key <= t or (key < sinks and key <= t) for key in range(30)] for t in range(30)]
    mask = torch.where(torch.tensor(seen), 0.0, -1e9).expand(2, 1, -1, -1)
    softmax_model.set_attn_implementation("eager")
    wanted = softmax_model(ids, attention_mask=mask).logits
    plain = softmax_model(ids).logits
    with window_and_sinks(softmax_model, window, sinks):
        torch.testing.assert_close(softmax_model(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        cache = DynamicCache(config=softmax_model.config)
        parts = [softmax_model(part, **cache_argument(cache)).logits for part in ids.split([7, 1, 22], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(softmax_model(ids).logits, plain)
    assert torch.equal(plain, wanted) == (window >= 30)


def test_models_that_would_not_notice_the_window_are_refused():
    """Attention of its own, or converted: the control would have the model's own figures."""
    bloom = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=24, n_layer=1, n_head=2)).eval()
    for model, match in ((bloom, r"(?i)bloom"), (make_gpt2({}), "Name its teacher")):
        with pytest.raises((InputError, ValueError), match=match), window_and_sinks(model, 4, 1):
            pass


# The suite


@pytest.fixture(scope="module")
def report(tokenizer, text):
    """The suite on a model of the demo's shape, with its teacher."""
    teacher, model = bench.pair(AutoConfig.from_pretrained(DEMO_MODEL), 1024, window_size=8)

    def run(**options):
        return recall_suite(model, tokenizer, text, teacher=teacher, quick=True, max_length=256, **options)

    return run, run(), model, teacher


def test_the_suite_compares_with_the_teacher_and_a_window_of_the_same_bytes(report):
    _, results, model, teacher = report
    softmax, control, own = results.columns
    assert (softmax.name, own.name) == ("softmax", "this model")
    window = int(control.name.split()[1])
    assert control.name == f"window {window} + 4 sinks"
    assert control.num_bytes == pytest.approx(own.num_bytes, abs=cache_memory(teacher).per_token / 2)
    assert own.worth == pytest.approx(cache_memory(model).worth(cache_memory(teacher), 0))
    assert all(math.isfinite(figure.nats) for column in results.columns for figure in column.figures)
    assert len({len(column.figures) for column in results.columns}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": torch.arange(900)}, "the text has 900 tokens, but the recall suite needs 1,024"),
        ({"max_length": 100}, "at least 128 tokens"),
        ({"max_length": 10**6}, "the tokens of a row are 1000000, but this model has"),
        ({"teacher": GPT2LMHeadModel(tiny_parent_config())}, "do not belong together"),
        ({"controls": [(0, 4)]}, "at least 1"),
        ({"model": BartForConditionalGeneration(tiny_seq2seq_config("bart"))}, "use hf-rfa evaluate --task"),
    ],
)
def test_what_cannot_be_measured_is_refused(report, tokenizer, text, change, message):
    with pytest.raises(InputError, match=message):
        recall_suite(**({"model": report[3], "tokenizer": tokenizer, "text": text, "quick": True} | change))


def test_the_command_line_writes_a_table_and_a_section_of_the_card(tmp_path, run_cli, capsys):
    folder = tmp_path / "converted"
    convert(DEMO_MODEL, folder, preset="exact", window_size=12, num_sinks=2, num_slots=0)
    words = [DEMO_TEXT, "--teacher", DEMO_MODEL, "--quick", "--max-length", 128]
    assert run_cli("recall", folder, *words, "--record", "--output", tmp_path / "out") == 0
    assert "teacher's" in capsys.readouterr().out
    assert leftovers(tmp_path / "out") == ["recall.json", "recall.md"]
    card = (folder / "README.md").read_text()
    assert card.count("## Recall") == 1
    assert "| | softmax | window 10 + 4 sinks | this model |" in card
    saved = json.loads((folder / "recall.json").read_text())
    assert saved["data"] == DEMO_TEXT.name
    assert not [name for name in leftovers(folder) if name.startswith(".")]
