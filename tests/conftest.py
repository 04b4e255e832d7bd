"""Fixtures: small models made on the spot, the demo's checkpoint, and material that may lie beside the repository."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network, and none may use it

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
DEMO_MODEL = ROOT / "demo" / "model"
DEMO_TEXT = ROOT / "demo" / "heldout.txt.gz"

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")
logging.disable_progress_bar()
if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: more threads than that would only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that has been imported, which it would look through at every conversion."""
    gc.freeze()


def shared(path: str) -> Path:
    """Return a path of the material beside the repository, or skip the test."""
    if not (SHARED / path).exists():
        pytest.skip(f"needs {SHARED / path}, which is not here")
    return SHARED / path


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _small_conversions() -> Iterator[None]:
    """Let conversions read less than a user's: more than what is kept, as random weights never end an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_rfa.convert.inputs.OUTPUT_TOKENS", 48)
        patch.setattr("hf_rfa.convert.calibrate.calibration.COMPARED_TOKENS", 256)
        yield


def tiny_parent_config(**options) -> GPT2Config:
    """A GPT-2 configuration small enough for any test; its weights are large enough for attention to matter."""
    values = {"vocab_size": 61, "n_positions": 96, "n_embd": 24, "n_layer": 2, "n_head": 3, "initializer_range": 0.3}
    values |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    values["classifier_dropout"] = 0.0  # of heads, which else take 0.1
    return GPT2Config(**{**values, **options})


def tiny_seq2seq_config(family: str, **options) -> PreTrainedConfig:
    """A configuration with an encoder, small enough for any test, its encoder and decoder of different shapes."""
    values = {"vocab_size": 61, "max_position_embeddings": 96, "d_model": 24, "init_std": 0.3, "dropout": 0.0}
    values |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    values |= {"decoder_layers": 3, "decoder_attention_heads": 3, "decoder_ffn_dim": 40}
    values |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    values["forced_eos_token_id"] = None
    if family == "whisper":
        values |= {"max_target_positions": values.pop("max_position_embeddings"), "max_source_positions": 20}
        values |= {"num_mel_bins": 8, "suppress_tokens": None, "begin_suppress_tokens": None}
    return CONFIG_MAPPING[family](**{**values, **options})


def save_tiny_tokenizer(folder: Path, *, size: int = 61) -> None:
    """Save a tokenizer whose words are w4, w5, …, for the models of `tiny_seq2seq_config`."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(4, size))]
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    core.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)


def words(count: int, start: int = 0) -> str:
    """Return a text of so many of that tokenizer's words."""
    return " ".join(f"w{4 + (start + n * n) % 57}" for n in range(count))


def leftovers(folder: Path) -> list[str]:
    """Return the names in a folder: what a refusal or an interruption has left there."""
    return sorted(path.name for path in folder.iterdir())


def refused(match: str, source: str | Path, folder: Path, **options) -> str:
    """Check that a conversion is refused and leaves nothing in a folder; return the error's text."""
    from hf_rfa.convert import InputError, convert

    before = leftovers(folder)
    with pytest.raises(InputError, match=match) as error:
        convert(source, options.pop("destination", folder / "never"), **options)
    assert leftovers(folder) == before
    return str(error.value)


def copy_of(source: Path, destination: Path) -> Path:
    """Copy a checkpoint, which may be read-only, to a folder that may be written to; return this."""
    shutil.copytree(source, destination)
    for path in destination.rglob("*"):
        path.chmod(0o644)
    destination.chmod(0o755)
    return destination


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Folders of tiny softmax checkpoints with a tokenizer, by family; for reading alone."""
    from .families import COMMON, save_softmax_model

    folders = {family: tmp_path_factory.mktemp("checkpoints") / family for family in COMMON}
    for family, folder in folders.items():
        save_softmax_model(family, folder)
    return folders


@pytest.fixture(scope="session")
def tiny_parent(tmp_path_factory) -> Path:
    """Folder of a tiny softmax GPT-2 checkpoint."""
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    torch.manual_seed(1)
    GPT2LMHeadModel(tiny_parent_config()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """What trainings start from: a GPT-2 and a BART, and converted (FAMILY-rfa), ``rows.jsonl`` and ``text.txt``."""
    from .training import save_checkpoints, write_rows

    license_of = "license: other\nlicense_name: tiny\nlicense_link: LICENSE.md"
    card = f"---\n{license_of}\nlanguage:\n- en\npipeline_tag: translation\n---\n# The parent\n"
    options = {"preset": "rfa", "feature_map": "exponential", "num_features": 8, "gate": True}
    folder = save_checkpoints(tmp_path_factory.mktemp("material"), "gpt2", card=card, **options)
    save_checkpoints(folder, "bart", card=card, encoder_layers="all", **options)
    rows = [
        {"text": words(5 + n % 9, n), "label": "ab"[n % 3 // 2], "source": words(4, n), "target": words(2 + n % 5, n)}
        for n in range(60)
    ]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "text.txt").write_text(words(500))
    return folder


@pytest.fixture
def pair(material):
    """The converted GPT-2 of ``material``, and its teacher."""
    from hf_rfa.inference import load_model

    return load_model(str(material / "gpt2-rfa"))[0], load_model(str(material / "gpt2"))[0]


@pytest.fixture(scope="session")
def family_from_outside(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a softmax model of `tests/bigbird_pegasus.py`, and of what ``hf-rfa convert --import`` makes of it."""
    from hf_rfa import FAMILIES
    from hf_rfa_cli import main as cli

    base, converted = (tmp_path_factory.mktemp("own-family") / name for name in ("softmax", "converted"))
    torch.manual_seed(1)
    config = tiny_seq2seq_config("bigbird_pegasus", attention_type="original_full")
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(base)
    save_tiny_tokenizer(base)
    options = ["--window-size", "4", "--max-positions", "200", "--import", str(ROOT / "tests" / "bigbird_pegasus.py")]
    cli.app(["convert", str(base), str(converted), *options], standalone_mode=False)
    del FAMILIES["bigbird_pegasus"]  # of which other tests know nothing
    return base, converted


@pytest.fixture(scope="session")
def whisper(tmp_path_factory) -> Path:
    """Folder of a tiny Whisper (`tests.speech.save_whisper`)."""
    from .speech import save_whisper

    folder = tmp_path_factory.mktemp("speech") / "whisper"
    save_whisper(folder)
    return folder


@pytest.fixture(scope="session")
def speech(tmp_path_factory) -> Path:
    """A .jsonl file of files of speech (`tests.speech.save_speech`)."""
    from .speech import save_speech

    return save_speech(tmp_path_factory.mktemp("utterances"))


@pytest.fixture(scope="session")
def converted_whisper(whisper, speech, tmp_path_factory) -> Path:
    """Folder of the tiny Whisper, converted with its cross attention."""
    from hf_rfa.convert import convert

    folder = tmp_path_factory.mktemp("converted") / "rfa"
    options = {"preset": "rfa", "feature_map": "exponential", "num_features": 8, "cross_layers": "all"}
    convert(whisper, folder, calibrate_on=speech, force=True, **options)
    return folder


@pytest.fixture(scope="session")
def speech_parts(whisper):
    """The tiny Whisper with its tokenizer and what makes its features."""
    from hf_rfa.inference import load_model
    from hf_rfa.inference.transcription import load_feature_extractor

    return (*load_model(str(whisper), kind="speech"), load_feature_extractor(whisper))


@pytest.fixture
def run_cli(monkeypatch):
    """The command line in this process: it takes words, and returns the exit status."""
    from hf_rfa_cli import main as cli

    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["hf-rfa", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    return run


@pytest.fixture
def refused_command(run_cli, capsys):
    """A command line that has to be refused: it takes words, and returns the message, its line breaks taken out."""

    def run(*words: object) -> str:
        assert run_cli(*words) == 1
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return " ".join(said.split())

    return run
