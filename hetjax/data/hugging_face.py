# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face folder's tokenizer: ids, tokens around texts, chat template.

Owns which of the folder's files matter and what they mean. Does not own encoding
(`tokenizer.py`) nor the rendering of templates (`chat_template.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.tokenizer import Tokenizer, own_tokenizer, panics_refused
from hetjax.errors import BadInput
from hetjax.files.parsing import json_kind, json_value
from hetjax.files.reading import decoded, read_bytes

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, SPECIAL = "chat_template.jinja", "special_tokens_map.json"
FILES = (TOKENIZER, CONFIG, TEMPLATE, SPECIAL)  # the last two are optional
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")
_SPECIAL += ("cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTokenizer:
    """Converts text to a model's ids, and conversations to texts if the model chats."""

    ids: Tokenizer
    template: ChatTemplate | None


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """Read a folder's tokenizer; BadInput names the file that is missing or broken."""
    core, config = _core(folder), _json(folder / CONFIG)
    if (folder / SPECIAL).exists():
        config = _json(folder / SPECIAL) | config
    special = {
        name: _special(config[name], name, folder)
        for name in _SPECIAL
        if config.get(name)
    }
    with panics_refused():
        opening, closing = _around(core)
    end = closing[-1] if closing else _id(core, special, "eos_token", folder)
    source = _template(folder, config)
    template = None
    if source is not None:
        template = ChatTemplate(source, special, _special_of(core))
    return ModelTokenizer(ids=Tokenizer(core, opening, end), template=template)


def kept_tokenizer(folder: Path) -> ModelTokenizer:
    """Read a tokenizer that a run or a model keeps: a model's, or our own single file.

    BadInput names the file that is missing or broken.
    """
    if (folder / CONFIG).is_file():
        return read_tokenizer(folder)
    return ModelTokenizer(ids=own_tokenizer(_core(folder)), template=None)


def check_fits(ids: Tokenizer, vocab_size: int, folder: Path) -> None:
    """Raise BadInput if the model has no row for one of the tokenizer's ids.

    A model may have more rows than ids: many vocabularies are rounded up.
    """
    most = max(ids.core.get_vocab(with_added_tokens=True).values()) + 1
    if most > vocab_size:
        raise BadInput(
            got=f"the tokenizer of {folder} with ids up to {most - 1}, but a model "
            f"with a vocabulary of {vocab_size}",
            allowed=f"ids below {vocab_size}",
            fix="give the folder of the tokenizer that belongs to this model, or a "
            f"model with a vocabulary of {most} or more",
        )


def _core(folder: Path) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER
    try:
        with panics_refused():
            core = tokenizers.Tokenizer.from_str(_read(path))
    except BadInput:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise _broken(path, str(error)) from error
    core.no_truncation()
    core.no_padding()
    return core


def _special_of(core: tokenizers.Tokenizer) -> tuple[str, ...]:
    added = core.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)


def _around(core: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after a text.

    Only tokenizer.json counts: transformers ignores `add_bos_token` in other files.
    """
    bare = core.encode("a", add_special_tokens=False).ids
    whole = core.encode("a").ids
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), None)
    if at is None or not bare:
        raise BadInput(
            got=f"a {TOKENIZER} whose post_processor changes the text",
            allowed="a post_processor that only adds tokens before and after a text",
            fix="fetch or save the tokenizer again",
        )
    return tuple(whole[:at]), tuple(whole[at + len(bare) :])


def _ids(
    core: tokenizers.Tokenizer, special: Mapping[str, str], name: str
) -> list[int]:
    token = core.token_to_id(special[name]) if name in special else None
    return [] if token is None else [token]


def _id(
    core: tokenizers.Tokenizer, special: Mapping[str, str], name: str, folder: Path
) -> int:
    found = _ids(core, special, name)
    if not found:
        raise BadInput(
            got=f"{folder / CONFIG} with {name} {special.get(name)!r}",
            allowed=f"an {name} that is a token of {TOKENIZER}",
            fix=f"set {name} to the token that ends a text of this model",
        )
    return found[0]


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template: the file's before the config's; of several the default."""
    if (folder / TEMPLATE).exists():
        return _read(folder / TEMPLATE)
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, list) or not all(map(_is_named_template, found)):
        raise _broken(folder / CONFIG, "chat_template is not a template")
    named = {entry["name"]: entry["template"] for entry in found}
    if "default" not in named:
        raise BadInput(
            got=f"{folder / CONFIG} with chat templates {', '.join(sorted(named))}",
            allowed="one chat_template, or several, one of them named default",
            fix=f"save the template to use as {folder / TEMPLATE}",
        )
    return named["default"]


def _is_named_template(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    return all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _special(token: Any, name: str, folder: Path) -> str:
    """Return the text of a special token, which may be an object with other fields."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise _broken(folder / CONFIG, f"{name} = {str(token)[:60]}")
    return text


def _json(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        found = json_value(text)
    except ValueError as error:
        raise _broken(path, str(error)) from error
    if not isinstance(found, dict):
        raise _broken(path, f"{json_kind(found)}, not an object")
    return found


def _read(path: Path) -> str:
    try:
        data = read_bytes(path, what="tokenizer's file")
    except OSError as error:
        raise BadInput(
            got=f"{path} cannot be read ({error.strerror})",
            allowed=f"a folder with {TOKENIZER} and {CONFIG}, as transformers saves "
            "them",
            fix="correct --data.tokenizer, or save the tokenizer there with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
        ) from error
    return decoded(data, f"tokenizer's file {str(path)!r}")


def _broken(path: Path, what: str) -> BadInput:
    return BadInput(
        got=f"{path} is not a tokenizer's file ({what})",
        allowed=f"{TOKENIZER} and {CONFIG} as transformers saves them",
        fix="fetch or save the tokenizer again",
    )
