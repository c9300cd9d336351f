# SPDX-License-Identifier: Apache-2.0
"""Finds models by what a person types: a preset, files of Hugging Face, or a function.

Owns how these are distinguished, and whose names may call code: a function is called if
a person named it (`TypedName`), never because a file does. A name with a slash is a
path: of a folder with a `config.json`, of such a file, or of a TOML file with the same
fields. So is the name of an existing file or folder, unless a preset has that name. A
name with a colon is a function, `package.module:function`, that takes nothing and
returns a `Model` or a config. Does not own presets (`presets.py`), nor the content of
files (`hugging_face/`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from hetjax.errors import BadInput
from hetjax.files.importing import NamedCode, names_code
from hetjax.files.mirrors import meant_by
from hetjax.models.configs import DecoderConfig
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.presets import is_model_preset, model_config

if TYPE_CHECKING:
    from hetjax.models.model import Model


class TypedName(str):
    """A model's name that a person typed, or passed in Python: it may be a function.

    A plain `str` may come from another person's file, and calls no code. A string
    derived from a typed name, as by `format`, is a plain `str` again.
    """

    __slots__ = ()


def allowed_name(name: str, allow_model_code: str | None) -> str:
    """Return a name from a file, as a typed one if a person has allowed its code."""
    return TypedName(name) if name == allow_model_code else name


def load_named(name: str) -> "Model":
    """Return the model of that name. Raises BadInput if there is none.

    A function is called only if the name is a `TypedName`.
    """
    from hetjax.models.decoders import model_of  # importing JAX takes a second
    from hetjax.models.model import Model

    if is_function(name):
        made = _called(name)
        if not isinstance(made, Model | DecoderConfig):
            raise BadInput(
                got=f"model {name}, which returns a {type(made).__name__}",
                allowed="a function that returns a hetjax Model, or a config of one",
                fix="let it return hetjax.models.model.Model(...)",
            )
        return made if isinstance(made, Model) else model_of(made)
    return model_of(named_config(name))


def check_model_name(name: str) -> None:
    """Raise BadInput for a name of no model; of a function only the form is checked.

    Imports no JAX.
    """
    if is_function(name):
        _function(name).check_name()
    else:
        named_config(name)


def named_config(name: str) -> DecoderConfig:
    """Return the sizes of a preset or of a config file; raises their BadInput."""
    if not is_path(name):
        return model_config(name)
    return read_config(meant_by(name) or Path(name))[0]


def is_path(name: str) -> bool:
    """Whether the name is that of a file or a folder, which may be missing."""
    if "/" in name or name.endswith((".json", ".toml")):
        return True
    if is_model_preset(name):  # a folder of that name must not hide it
        return False
    return meant_by(name) is not None or Path(name).exists()


def is_function(name: str) -> bool:
    """Whether the name is that of a function."""
    return names_code(name)


def portable(name: str) -> str:
    """Return the name in a form that means the same in every folder of this machine."""
    return str(Path(name).absolute()) if is_path(name) else name


def _called(name: str) -> object:
    check_model_name(name)
    if not isinstance(name, TypedName):
        raise BadInput(
            got=f"model {name!r}, a function that a file names",
            allowed="functions that you type or pass in Python: hetjax does not "
            "call code just because a file names it",
            fix=f"if you trust that code: --allow-model-code {name} (in Python: "
            f"allow_model_code={name!r})",
        )
    function = _function(name)
    found = function.imported()
    function.check_takes_nothing(found)
    return found()


def _function(name: str) -> NamedCode:
    return NamedCode(
        name=name,
        what="model",
        kind="function",
        where="on every machine of the run",
        fix="give a function that returns hetjax.models.model.Model(...)",
    )
