# SPDX-License-Identifier: Apache-2.0
"""Finds a trained model: in a run's newest checkpoint, or in a Hugging Face folder.

Owns how to tell one from the other, and the tokenizer, chat template and end tokens
that belong to the model. Does not own checkpoints (`run_checkpoints.py`) nor folders
(`models/hugging_face/`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.api.exporting import check_averaged, weight_reader
from hetjax.api.run_checkpoints import AskedStep, open_checkpoint, run_config
from hetjax.api.written_beside import GENERATION, first_folder
from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.chat.sandbox import TemplateRefuses
from hetjax.data.hugging_face import TOKENIZER, check_fits, kept_tokenizer
from hetjax.data.sources.messages import ASSISTANT
from hetjax.data.tokenizer import Tokenizer
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.reading import read_text
from hetjax.files.tables import as_kind
from hetjax.models.hugging_face.adapter_config import base_folder, has_adapters
from hetjax.models.hugging_face.configs import CONFIG
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.model import Model
from hetjax.models.named import allowed_name, load_named
from hetjax.serving.loaded_model import Read
from hetjax.training.directory.rundir import PLAN

_ENDS = "eos_token_id"
_SAID = "hetjax"  # an assistant's message, to see what the template puts after it


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSource:
    """A model with its tokenizer; `reading` opens its weights in a dtype.

    `ends` are the tokens that end a text. `run_dir` is None unless a run trained the
    model.
    """

    model: Model
    ids: Tokenizer
    template: ChatTemplate | None
    ends: frozenset[int]
    reading: Callable[[np.dtype], AbstractContextManager[Read]]
    run_dir: Path | None = None

    @property
    def num_words(self) -> int:
        """The number of the model's vocabulary rows that stand for a token."""
        known = self.ids.core.get_vocab(with_added_tokens=True)
        return min(self.model.vocab_size, max(known.values()) + 1)


def find_trained(
    name: str | Path,
    step: AskedStep = None,
    *,
    ema: bool = False,
    allow_model_code: str | None = None,
) -> TrainedSource:
    """Find the model of a run directory, of a folder, or of a name on the hub.

    `step` None: a run's newest checkpoint; "best": the one with the lowest validation
    loss. `ema`: the averages of its weights. A run's model that is a function is called
    only if `allow_model_code` names it. Raises BadInput for any other `name`, and for a
    folder without a tokenizer.
    """
    path = Path(name).expanduser()
    if (path / PLAN).exists():
        return _of_run(path, step, ema, allow_model_code)
    asked = {f"--step {step}": step is not None, "--ema": ema}
    for option in (option for option, is_asked in asked.items() if is_asked):
        raise BadInput(
            got=f"{option} for {str(name)!r}, which is not a run",
            allowed=f"{option.split()[0]} with the directory of a run",
            fix=f"leave {option.split()[0]} out",
        )
    is_folder = (path / CONFIG).is_file() or has_adapters(path)
    if path.exists() and not is_folder:
        raise BadInput(
            got=f"no run and no model in {str(name)!r}",
            allowed=f"the --run-dir of a run, a Hugging Face folder with {CONFIG}, "
            "weights and tokenizer, or a folder with PEFT adapters",
            fix="give the folder that train was given; presets train in runs/PRESET",
        )
    return _of_folder(local_folder(str(name)))


def _of_run(
    run_dir: Path, step: AskedStep, ema: bool, allow_model_code: str | None
) -> TrainedSource:
    config = run_config(run_dir)
    config = replace(config, model=allowed_name(config.model, allow_model_code))
    check_averaged(config, ema)
    ids, template = _tokenizer(run_dir)
    model, began_with = load_named(config.model), first_folder(config)
    check_fits(ids, model.vocab_size, run_dir)
    ends = set[int]() if began_with is None else _ends_named_by(began_with)

    @contextmanager
    def reading(dtype: np.dtype) -> Iterator[Read]:
        with open_checkpoint(config, step) as checkpoint:
            yield weight_reader(config, checkpoint, ema=ema)

    return TrainedSource(
        model=model,
        ids=ids,
        template=template,
        ends=frozenset(ends | {ids.end_of_document}),
        reading=reading,
        run_dir=run_dir,
    )


def _of_folder(folder: Path) -> TrainedSource:
    base = base_folder(folder)
    model = load_named(str(base))
    ids, template = _tokenizer(folder if (folder / TOKENIZER).is_file() else base)
    check_fits(ids, model.vocab_size, folder)

    @contextmanager
    def reading(dtype: np.dtype) -> Iterator[Read]:
        yield FolderWeights(folder, dtype)

    return TrainedSource(
        model=model,
        ids=ids,
        template=template,
        ends=frozenset(_ends_named_by(base) | {ids.end_of_document}),
        reading=reading,
    )


def _tokenizer(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return a model's tokenizer and chat template, or one that hetjax trained, which
    has no template. Raises BadInput if there is none."""
    if not (folder / TOKENIZER).is_file():
        raise BadInput(
            got=f"{str(folder)!r} without {TOKENIZER}",
            allowed="a folder with the model's tokenizer",
            fix="save it there: AutoTokenizer.from_pretrained(NAME)"
            f".save_pretrained({str(folder)!r})",
        )
    found = kept_tokenizer(folder)
    return found.ids, found.template


def _ends_named_by(folder: Path) -> set[int]:
    """Return the end tokens of the generation settings, otherwise of the config."""
    for name in (GENERATION, CONFIG):
        if (folder / name).is_file():
            ends = _ends_in(folder / name)
            if ends is not None:
                return {ends} if isinstance(ends, int) else set(ends)
    return set()


def _ends_in(file: Path) -> int | list[int] | None:
    """Return the end tokens in a file, or None. Raises BadInput for invalid ones."""
    try:
        settings = as_kind(json_value(read_text(file)), "a table", where=str(file))
    except ValueError:
        raise _bad_settings(f"{str(file)!r}, which is not a JSON object") from None
    found = settings.get(_ENDS)
    ids = found if isinstance(found, list) else [found]
    if found is not None and not all(map(_is_token, ids)):
        raise _bad_settings(f"{_ENDS} = {str(found)[:60]!r} in {str(file)!r}")
    return found


def _is_token(found: Any) -> bool:
    return type(found) is int and 0 <= found < 2**31


def _bad_settings(got: str) -> BadInput:
    return BadInput(
        got=got,
        allowed=f"a JSON object in which {_ENDS} is a token's number, a list of them, "
        "or missing",
        fix="fetch the file again, or correct it",
    )


def turn_ends(template: ChatTemplate, ids: Tokenizer) -> set[int]:
    """Return the special token, if any, that follows an assistant's message."""
    messages = [
        {"role": "user", "content": _SAID},
        {"role": ASSISTANT, "content": _SAID},
    ]
    try:
        text = template.render(messages)
    except TemplateRefuses:
        return set()
    after = ids.encode(text.rpartition(_SAID)[2].strip())
    special = ids.core.get_added_tokens_decoder()
    return {after[0]} if after and after[0] in special else set()
