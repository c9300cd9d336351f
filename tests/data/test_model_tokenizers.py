# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates of Hugging Face folders, against transformers' results
on the same texts and chats (by `tests/against_transformers/tokenizer_cases.py`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers

from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.chat.conversations import RowEncoder
from hetjax.data.chat.sandbox import TemplateRefuses
from hetjax.data.hugging_face import check_fits, read_tokenizer
from hetjax.data.sources.rows import Completion, Conversation
from hetjax.data.tokenizer import Tokenizer
from hetjax.errors import BadInput
from tests.against_transformers.tokenizer_cases import CHATS, FOLDER, TEXTS, messages_of

NAMES = sorted(path.name for path in FOLDER.iterdir())


def _expected(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "expected.json").read_text())


def check_like_transformers(folder: Path, expected: dict[str, Any]) -> None:
    """Compare our reading of a folder with transformers' results on it."""
    read = read_tokenizer(folder)
    for text, ids in zip(TEXTS, expected["texts"], strict=True):
        found = read.ids.encode_documents([text]).tolist()
        end = [read.ids.end_of_document]
        # a document gets an end, even if the processor adds none to a text
        if "</s>" not in text:
            assert found in (ids, ids + end) and found[-1:] == end
        bare = read.ids.core.encode(text, add_special_tokens=False).ids
        assert ids[len(read.ids.opening) :][: len(bare)] == bare
    assert read.template is not None
    special = read.template.special_tokens
    for source in (read.template.source, expected["marked"]):
        template = ChatTemplate(source, special, read.template.special)
        rows = [Conversation(tuple(messages_of(chat))) for chat in CHATS]
        encoded = list(RowEncoder(read.ids, template).encoded(rows))
        for row, found, wanted in zip(rows, encoded, expected["chats"], strict=True):
            assert template.render(row.messages) == wanted["text"]
            assert found.tokens == wanted["ids"]
            assert found.learnt == wanted["learnt"]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_what_is_learnt_are_those_of_transformers(name: str):
    check_like_transformers(FOLDER / name, _expected(name))


LONG = "def f(x):\n\n    return x\n\n\nOnce upon a time\n" * 6_000


def _is_as_a_whole(ids: Tokenizer) -> bool:
    found = ids.encode_documents([LONG]).tolist()
    return found == [*ids.opening, *ids.encode(LONG), ids.end_of_document]


@pytest.mark.parametrize("name", NAMES)
def test_a_document_of_several_pieces_has_the_ids_that_it_has_as_a_whole(name: str):
    assert _is_as_a_whole(read_tokenizer(FOLDER / name).ids)


def test_pieces_have_no_blank_before_them_where_a_tokenizer_puts_one_before_a_text():
    letters = {character: at for at, character in enumerate(sorted({*LONG, "\u2581"}))}
    core = tokenizers.Tokenizer(models.BPE(letters, []))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    assert core.encode("O").tokens == ["\u2581", "O"]
    assert _is_as_a_whole(Tokenizer(core, end=0))


def test_of_a_prompt_with_a_completion_the_completion_and_the_end_are_learnt():
    ids = read_tokenizer(FOLDER / "headers").ids
    (row,) = RowEncoder(ids, None).encoded([Completion("Once upon", " a time")])
    learnt = [t for t, counts in zip(row.tokens, row.learnt, strict=True) if counts]
    assert ids.decode(learnt) == " a time</s>"
    assert ids.decode(row.tokens) == "<s>Once upon a time</s>"
    assert row.num_bytes == len(b" a time")


def test_a_conversation_in_which_the_assistant_is_silent_is_left_out_with_a_warning():
    read = read_tokenizer(FOLDER / "chatml")
    silent = Conversation(({"role": "user", "content": "hi"},))
    with pytest.warns(UserWarning, match="left out: 1 row without an answer to learn"):
        assert not list(RowEncoder(read.ids, read.template).encoded([silent]))


def test_what_a_template_refuses_is_told_with_its_words():
    read = read_tokenizer(FOLDER / "headers")
    odd = Conversation(({"role": "tool", "content": "hi"},))
    with pytest.raises(BadInput) as caught:
        list(RowEncoder(read.ids, read.template).encoded([odd]))
    assert "refuses: unknown role tool" in caught.value.got
    assert "hi" in caught.value.fix


def test_messages_need_a_template():
    read = read_tokenizer(FOLDER / "chatml")
    row = Conversation(({"role": "user", "content": "hi"},))
    with pytest.raises(BadInput, match="without a chat template"):
        list(RowEncoder(read.ids, None).encoded([row]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str):
    with pytest.raises(TemplateRefuses):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_turns_that_cannot_be_found_are_refused():
    template = ChatTemplate("{{ messages | map(attribute='content') | sort }}", {})
    messages = [{"role": r, "content": r[0]} for r in ("user", "assistant")]
    (found,) = template.written([Conversation(tuple(messages))])
    assert isinstance(found, TemplateRefuses) and "message 2" in str(found)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    ids = read_tokenizer(FOLDER / "chatml").ids
    check_fits(ids, ids.vocab_size, FOLDER)
    with pytest.raises(BadInput) as caught:
        check_fits(ids, ids.vocab_size - 1, FOLDER)
    assert f"ids up to {ids.vocab_size - 1}, but a model" in caught.value.got


def _copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / "chatml", tmp_path / "copy"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str):
    folder = _copy(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(BadInput, match=f"{name} is not a tokenizer's file"):
        read_tokenizer(folder)
    (folder / name).unlink()
    with pytest.raises(BadInput, match=f"{name} cannot be read"):
        read_tokenizer(folder)


def test_of_several_templates_the_default_is_taken_and_a_file_before_them(
    tmp_path: Path,
):
    folder = _copy(tmp_path)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": n, "template": n} for n in ("default", "tool_use")]
    path.write_text(json.dumps(config | {"chat_template": named}))
    template = read_tokenizer(folder).template
    assert template is not None and template.source == "default"
    path.write_text(json.dumps(config | {"chat_template": named[1:]}))
    with pytest.raises(BadInput, match="with chat templates tool_use"):
        read_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("file")
    template = read_tokenizer(folder).template
    assert template is not None and template.source == "file"
