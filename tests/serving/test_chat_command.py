"""``hf-rfa chat``: a conversation in the terminal, kept at every turn."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_rfa import InputError
from hf_rfa.inference.generation import messages_text
from hf_rfa.serving.conversation import Conversation
from tests.conftest import copy_of


@pytest.fixture
def chat(folder, run_cli, tmp_path, monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """The command with lines that are typed: it returns the answers, and its report on one line."""
    monkeypatch.chdir(tmp_path)

    def run(*lines: str, session: str | None = "talk", checkpoint: Path = folder, status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ["--session", session] if session else []
        assert run_cli("chat", checkpoint, "--max-new-tokens", 6, *options) == status
        out, err = capsys.readouterr()
        return out.replace("> ", "").strip(), " ".join(err.split())

    return run


def test_a_conversation_is_what_the_template_writes_of_it(loaded):
    model, tokenizer = loaded
    conversation = Conversation(model, tokenizer, system="w9")
    messages = [{"role": "system", "content": "w9"}]
    for number in range(4):
        messages.append({"role": "user", "content": f"w{20 + number} w8"})
        ids = torch.tensor([tokenizer(messages_text(tokenizer, messages), add_special_tokens=False)["input_ids"]])
        new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        expected = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        answer = conversation.say(messages[-1]["content"], max_new_tokens=9, do_sample=False)
        assert answer.text == expected
        messages.append({"role": "assistant", "content": expected})
    assert conversation.turns == 4


def test_a_conversation_goes_on_from_its_file(chat):
    whole, report = chat("w20 w8", "w21", "w22", "/stats", session=None)
    assert re.search(r"turns: 3, [\d,]+ tokens, [\d,]+ bytes, [\d,.]+ tokens/s", report)
    begun, report = chat("w20 w8", "w21")
    assert report.endswith("kept in talk: go on with --session talk")
    undone, report = chat("w33", "/undo", "/undo", "/save copy", "w22")
    assert "taken back there is no turn to take back kept in copy" in report
    later, _ = chat("/load copy", "w22", "/exit", "w23", session=None)
    assert whole == f"{begun}\n{later}"
    assert undone.endswith(later)


def test_foreign_and_damaged_files_are_refused(chat, folder, tmp_path):
    chat("w20 w8")
    other = copy_of(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text().replace("w6", "w7"))
    assert "with another template" in chat(checkpoint=other, status=1)[1]
    kept = Path("talk").read_bytes()
    Path("talk").write_bytes(kept[:-40] + bytes(40))
    assert "is damaged" in chat(status=1)[1]
    assert "is damaged" in chat("/load talk", "w20", session=None)[1]
    Path("talk").write_bytes(kept[:-40])
    assert "cannot read a cache" in chat(status=1)[1]


def test_ctrl_c_ends_an_answer_and_keeps_the_conversation(chat, monkeypatch):
    from hf_rfa.inference import streams

    feed, calls = streams.Reading.feed, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return feed(*args)

    monkeypatch.setattr(streams.Reading, "feed", interrupted)
    _, report = chat("w20 w8", "w21", "/stats")
    assert "(interrupted)" in report
    assert "turns: 2" in report


def test_a_message_that_is_refused_is_no_turn_to_take_back(loaded, monkeypatch):
    talk = Conversation(*loaded)
    talk.say("w20 w8", max_new_tokens=4)
    monkeypatch.setattr(talk._tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template"):
        talk.say("w21", max_new_tokens=4)
    assert talk.undo()
    assert (talk.turns, talk.reading.tokens) == (0, 0)
