"""A family from outside the package: `modeling_rfa_mbart.py` beside this file is all that it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MBartConfig, MBartForConditionalGeneration

from hf_rfa import FAMILIES, Family, RFABartConfig, RFABartModel, bench, cache_num_bytes, cli, register_family
from hf_rfa.families import NAME_TABLES

from .conftest import save_tiny_tokenizer, tiny_seq2seq_config

FAMILY = Path(__file__).with_name("modeling_rfa_mbart.py")
#: Loads the checkpoint by the code in it: without hf_rfa first, then with it, but without the family's module.
ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_rfa":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForSeq2SeqLM
try:
    AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.meta_path[0]
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__)
print(model.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=9).tolist())
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a softmax mBART and of what ``hf-rfa convert --import`` makes of it."""
    base, converted = (tmp_path_factory.mktemp("own-family") / name for name in ("mbart", "converted"))
    values = {
        name: value for name, value in tiny_seq2seq_config("bart").to_dict().items() if name in vars(MBartConfig())
    }
    torch.manual_seed(1)
    MBartForConditionalGeneration(MBartConfig(**{**values, "model_type": "mbart"})).save_pretrained(base)
    save_tiny_tokenizer(base)
    options = ["--window", "4", "--encoder-layers", "all", "--max-positions", "200"]
    cli.app(["convert", str(base), str(converted), "--import", str(FAMILY), *options], standalone_mode=False)
    yield base, converted
    del FAMILIES["mbart"]


def test_it_is_converted_with_every_weight(folders):
    softmax, rfa = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders)
    assert type(rfa).__name__ == "RFAMBartForConditionalGeneration"
    assert rfa.config.max_position_embeddings == 200
    kept = rfa.state_dict()
    for name, tensor in softmax.state_dict().items():
        assert "embed_positions" in name or torch.equal(kept[name], tensor)


def test_it_decodes_with_a_cache_of_one_size_as_without(folders):
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[1]).eval()
    ids, sizes = torch.tensor([[5, 6, 7, 2]]), set()
    for count in (6, 60):
        options = {"do_sample": False, "num_beams": 1, "min_new_tokens": count, "max_new_tokens": count}
        answers = [model.generate(ids, **options, use_cache=use, return_dict_in_generate=True) for use in (True, False)]
        assert torch.equal(answers[0].sequences, answers[1].sequences)
        sizes.add(cache_num_bytes(answers[0].past_key_values))
    assert len(sizes) == 1


def test_everything_that_goes_by_family_knows_it(folders):
    assert NAME_TABLES[AutoModelForSeq2SeqLM]["rfa_mbart"] == "RFAMBartForConditionalGeneration"
    softmax, rfa = bench.pair(MBartConfig.from_pretrained(folders[0]), 30)
    assert (softmax.config.model_type, rfa.config.model_type) == ("mbart", "rfa_mbart")


def test_its_checkpoints_load_where_hf_rfa_is_installed_and_the_family_is_not(folders, tmp_path):
    """Its file imports hf_rfa by name, so without hf_rfa transformers says that it is missing."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ELSEWHERE, str(folders[1])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    refusal, module, tokens = done.stdout.splitlines()
    assert refusal.endswith("were not found in your environment: hf_rfa. Run `pip install hf_rfa`")
    assert module.startswith("transformers_modules.")
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[1])
    assert tokens == str(model.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=9).tolist())


class Misnamed(RFABartModel):
    """Has no softmax class of its name."""


MISNAMED = "Misnamed subclasses no class Misnamed. Name it RFA and the name of its softmax class."


class SameModelType(RFABartConfig):
    model_type = "bart"


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (MBartConfig, RFABartModel, "MBartConfig has no RFA fields. Mix RFAConfigMixin"),
        (RFABartConfig, Misnamed, MISNAMED),
        (SameModelType, RFABartModel, "'bart' is already used by a Transformers config"),
    ],
)
def test_what_is_not_declared_right_is_refused(config, model, message):
    before = dict(FAMILIES)
    with pytest.raises(ValueError, match=message):
        register_family(Family(rfa_config=config, models=(model,)))
    assert before == FAMILIES
