# SPDX-License-Identifier: Apache-2.0
"""Tiny tokenizers made with `transformers`, and its results on texts and chats.

`python -m tests.against_transformers.tokenizer_cases` writes them to
tests/data/tokenizers, for environments without `transformers`.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parents[1] / "data" / "tokenizers"
TEXTS = ["", "Once upon a time", "  two\n\nlines \u00e9 \U0001f600", "<|im_end|> </s>"]
_TRAINED_ON = ["Once upon a time there was a user who said hello to an assistant."] * 4

USER, SAYS = "user", "assistant"
CHATS = [
    [(USER, "Hello there"), (SAYS, "Hi! \u00e9")],
    [("system", "Be kind."), (USER, " a <b> \n"), (SAYS, "one\n two"), (USER, "c")],
    [(USER, "a"), (SAYS, "<think>\nwhy\n</think>\n\nb"), (USER, "c"), (SAYS, " d ")],
]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}OPEN{{ message['content'] + '<|im_end|>' }}"
    "CLOSE{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
_HEADERS = """{{- bos_token }}
{%- set ns = namespace(date=none) %}
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<s>' + message['role'] + '\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
OPEN{{- message['content'] | trim + '</s>' }}CLOSE
    {%- else %}{{- message['content'] | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n\\n' }}{%- endif %}
"""
_THINKING = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if not loop.last and '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {#- -#}
        OPEN{{- content + '<|im_end|>' }}CLOSE{{- '\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_JSON = (
    "{{ messages[0] | tojson }}{{ dict(a=1) }}{% for message in messages %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% if message['role'] == 'assistant' %}OPEN{{ message['content'] }}{{ eos_token }}"
    "CLOSE{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": _CHATML, "headers": _HEADERS, "thinking": _THINKING}
TEMPLATES |= {"json": _JSON}
_MARKS = "{% generation %}", "{% endgeneration %}"


def template_of(name: str, marks: tuple[str, str] = ("", "")) -> str:
    """Return a template without generation blocks, or with them."""
    open_, close = marks
    return TEMPLATES[name].replace("OPEN", open_).replace("CLOSE", close)


# What the post-processor puts around a text; the config's fields change nothing
AROUND: dict[str, dict[str, Any]] = {
    "bare": {"processor": None},
    "opened": {"processor": "<s> $A"},
    "config": {"processor": None, "add_bos_token": True},
    "both_ends": {"processor": "<s> $A </s>", "add_bos_token": False},
}


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def make(folder: Path, template: str | list[dict[str, str]] | None, around: str) -> Any:
    """Save a tokenizer with transformers, and load it as its users do."""

    transformers: Any = import_module("transformers")  # a few environments have it
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(_TRAINED_ON, trainer)
    given = dict(AROUND[around])
    if single := given.pop("processor"):
        core.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>"
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | given, indent=1) + "\n")
    return transformers.AutoTokenizer.from_pretrained(folder)


def expected_texts(theirs: Any) -> list[list[int]]:
    return [theirs(text)["input_ids"] for text in TEXTS]


def expected_chats(theirs: Any, marked: str) -> list[dict[str, Any]]:
    """Return text and ids by the tokenizer's template, the mask by the marked one."""
    found = []
    for chat in map(messages_of, CHATS):
        text = theirs.apply_chat_template(chat, tokenize=False)
        both = theirs.apply_chat_template(
            chat, chat_template=marked, return_dict=True, return_assistant_tokens_mask=1
        )
        assert theirs.apply_chat_template(chat)["input_ids"] == both["input_ids"]
        learnt = [bool(one) for one in both["assistant_masks"]]
        found.append({"text": text, "ids": both["input_ids"], "learnt": learnt})
    return found


def case_of(folder: Path, name: str, around: str) -> dict[str, Any]:
    """Return a tokenizer's case: what transformers makes of texts and chats with it."""
    theirs = make(folder, template_of(name), around)
    return {
        "texts": expected_texts(theirs),
        "chats": expected_chats(theirs, template_of(name, _MARKS)),
        "marked": template_of(name, _MARKS),
    }


CASES = list(zip(TEMPLATES, AROUND, strict=True))


def write() -> None:
    for name, around in CASES:
        folder = FOLDER / name
        found = case_of(folder, name, around)
        text = json.dumps(found, indent=1) + "\n"
        (folder / "expected.json").write_text(text)


if __name__ == "__main__":
    sys.exit(write())
