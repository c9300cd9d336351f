# SPDX-License-Identifier: Apache-2.0
"""What is learnt from conversations, against transformers and TRL's training templates.

TRL has published chat templates in two versions: as a model comes with it, and with
generation blocks. What transformers marks under the second is what we find under the
first, except for the prompt (TRL counts headers and opened thoughts, too).
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hetjax.data.chat.sandbox import SandboxedTemplate, TemplateRefuses
from hetjax.data.chat.turns import written
from hetjax.data.sources.rows import Conversation
from tests.data.chat_templates import MARKED, PLAIN
from tests.data.test_turns import CHATS, EOS, SPECIAL, learnt

FOLDER = Path(import_module("trl").__file__ or "").parent / "chat_templates"
NAMES = sorted(
    path.stem.removesuffix("_training") for path in FOLDER.glob("*_training*")
)
# Tokens that end an answer, and tokens that begin a message
ENDS = (
    *SPECIAL,
    *(
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|end|>",
        "<|endoftext|>",
        "<|eot_id|>",
    ),
    *("<|user|>", "<|observation|>", "<|return|>", "<|call|>", "<|eot|>", "<turn|>"),
    *("<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<eos>"),
)
LAST = {
    "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>",
    "gemma": "<eos>",
    "gptoss": "<|return|>",
}


# Templates of models with vision, which want lists as contents
SEEING = {"idefics3", "llava_next", "smolvlm"}


def _marked(source: str, chat: Conversation, special: dict[str, str]) -> Any:
    """Return the text of transformers, and what is between generation blocks."""
    utils: Any = import_module("transformers.utils.chat_template_utils")
    (text,), (spans,) = utils.render_jinja_template(
        [list(chat.messages)],
        tools=list(chat.tools) or None,
        chat_template=source,
        return_assistant_tokens_mask=True,
        **special,
    )
    return text, [text[start:end] for start, end in spans]


def _special(name: str) -> dict[str, str]:
    eos = LAST.get(name, "<|im_end|>")
    if name.startswith("deepseek"):
        eos = ENDS[3]
    return {"bos_token": "<bos>", "eos_token": eos}


def _without_blanks(texts: list[str]) -> str:
    return "".join("".join(texts).split())


@pytest.mark.parametrize("chat", ["one", "two", "reasoned"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_trls_training_templates(name: str, chat: str):
    special = _special(name)
    source = (FOLDER / f"{name}.jinja").read_text()
    training = (FOLDER / f"{name}_training.jinja").read_text()
    if name in SEEING:
        with pytest.raises(TemplateRefuses):
            written(SandboxedTemplate(source, special), CHATS[chat], ENDS)
        return
    _, expected = _marked(training, CHATS[chat], special)
    found = learnt(written(SandboxedTemplate(source, special), CHATS[chat], ENDS))
    theirs, ours = _without_blanks(expected), _without_blanks(found)
    at = 0
    for one in found:  # in order, and the last one to the end
        at = theirs.index(_without_blanks([one]), at) + len(_without_blanks([one]))
    assert at == len(theirs)
    answers = [m["content"].strip() for m in CHATS[chat].messages[1::2]]
    assert all(said in one for said, one in zip(answers, found, strict=True)), ours


CALLING = [
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink"),
    *("qwen3_6", "nemotron_3_nano", "nemotron_3_super", "glm4moe", "deepseekv3"),
    "gptoss",
]


@pytest.mark.parametrize("name", CALLING)
def test_calls_without_content_are_learnt_as_trl_learns_empty_ones(name: str):
    special = _special(name)
    source = (FOLDER / f"{name}.jinja").read_text()
    training = (FOLDER / f"{name}_training.jinja").read_text()
    theirs = _without_blanks(_marked(training, CHATS["empty"], special)[1])
    for content in ("empty", "null", "missing"):
        found = learnt(
            written(SandboxedTemplate(source, special), CHATS[content], ENDS)
        )
        assert len(found) == 2
        at = 0
        for one in map(_without_blanks, ([text] for text in found)):
            at = theirs.index(one, at) + len(one)
        assert at == len(theirs)
        assert "weather" in found[0] and "It is 20." in found[1]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", PLAIN)
def test_small_templates_are_rendered_as_transformers_renders_them(form, chat):
    try:
        text, expected = _marked(MARKED[form], CHATS[chat], EOS)
    except Exception:
        pytest.skip("transformers knows one way to say a call alone")
    (ours,) = written(SandboxedTemplate(MARKED[form], EOS), CHATS[chat], SPECIAL)
    assert (ours.text, learnt([ours])) == (text, expected)
