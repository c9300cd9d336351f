# SPDX-License-Identifier: Apache-2.0
"""Parses options into the fields of a dataclass, with errors in three parts.

Owns the spelling of lists, and the short help with only the common options. Does not
own the options, the choice of common ones, nor the other help texts (the commands' own
files), nor the words of errors (`invalid.py`).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr
from dataclasses import field, fields, is_dataclass, make_dataclass
from io import StringIO
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
)

from hetjax.cli.options.aliases import in_our_words
from hetjax.cli.options.invalid import (
    HELP_ALL,
    options_of,
    unknown_argument,
    wrong_value,
)
from hetjax.errors import BadInput
from hetjax.training.settings.presets import PRESETS, Preset, preset

T = TypeVar("T")
_LISTS = ConstructorRegistry()
_IS_REPEATED = tyro.conf.UseAppendAction
_SHORT = ("-h", "--help")
HELP = (*_SHORT, HELP_ALL)


def parse_options(
    default: T,
    arguments: Sequence[str],
    *,
    program: str,
    description: str,
    markers: tuple[Any, ...] = (),
    common: Collection[str] = (),
) -> T:
    """Return `default` changed by the given options; `markers` are Tyro's.

    --help shows the `common` fields, or all fields if there are none; --help-all shows
    all. Raises BadInput for an unknown option and for a value of the wrong type,
    SystemExit after it has printed help.
    """
    if common and any(word in arguments for word in _SHORT):
        default = _with_help_of(default, frozenset(common))
        description += "\n\nThese are the usual options; --help-all lists every option."
    elif HELP_ALL in arguments:
        arguments = ["--help"]
    options = [*options_of(default)]
    arguments = in_our_words(arguments, [option.name for option in options])
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            config, unknown = tyro.cli(
                type(default),
                prog=program,
                description=description,
                args=arguments,
                default=default,
                return_unknown_args=True,
                registry=_LISTS,
                config=(tyro.conf.AvoidSubcommands, *markers),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        box = printed.getvalue()
        raise wrong_value(box, options, program, arguments) from ended
    if unknown:
        others = (*HELP, "--quiet")
        raise unknown_argument(unknown[0], options, others, program, arguments)
    return config


def _with_help_of(default: Any, shown: frozenset[str]) -> Any:
    """Return the same values in a subclass of which Tyro shows only these fields."""
    kind, values, changed = type(default), {}, []
    types = get_type_hints(kind, include_extras=True)
    for each in fields(default):
        name, value = each.name, getattr(default, each.name)
        inner = {x.partition(".")[2] for x in shown if x.partition(".")[0] == name}
        if is_dataclass(value) and inner:
            value = _with_help_of(value, frozenset(inner))
            changed.append((name, type(value), field(default=value)))
        elif not inner:
            hidden = Annotated[types[name], tyro.conf.Suppress]
            changed.append((name, hidden, field(default=value)))
        values[name] = value
    return make_dataclass(
        kind.__name__, changed, bases=(kind,), frozen=True, kw_only=True
    )(**values)


def preset_first(
    arguments: Sequence[str], *, program: str
) -> tuple[str, Preset, list[str]]:
    """Return the preset's name, the preset and the other arguments.

    Raises BadInput if the first argument is no preset.
    """
    name, *rest = arguments
    if name.startswith("-"):
        raise BadInput(
            got=f"{name!r} in place of a preset's name, which comes first",
            allowed=preset_usage(program),
            fix=f"{program} tiny {' '.join(arguments)}",
        )
    return name, preset(name), rest


def preset_usage(program: str) -> str:
    """Return the usage of the program, and where its presets are listed."""
    return f"{program} PRESET [options], with a preset that {program} --help lists"


def nothing_given(program: str, *, got: str, allowed: str) -> BadInput:
    """Return the error to raise if there are no arguments."""
    fix = f"{program} tiny, say; {program} --help says more"
    return BadInput(got=got, allowed=allowed, fix=fix)


def preset_lines() -> str:
    """Return a help line for every preset."""
    width = max(map(len, PRESETS))
    lines = (f"  {name:<{width}}  {p.summary}" for name, p in PRESETS.items())
    return "\n".join(lines)


@_LISTS.primitive_rule
def _list(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return how to type a field that is a tuple of any length; None for others."""
    if get_origin(info.type) is not tuple or _IS_REPEATED in info.markers:
        return None
    (kind, *_) = get_args(info.type)
    if kind is int:
        return _list_of(_integer, "INT,INT,...")
    if get_origin(kind) is Literal:
        words = {word: word for word in get_args(kind)}
        return _list_of(words.get, ",".join(words))
    return _list_of(lambda word: word or None, "[NAME,NAME,...]", least=0)


def _list_of(
    value: Callable[[str], Any], metavar: str, least: int = 1
) -> PrimitiveConstructorSpec[Any]:
    """Return how to type a list, with commas or spaces. `value` converts a word; None
    if it is invalid."""

    def read(arguments: list[str]) -> tuple[Any, ...]:
        words = (word for argument in arguments for word in argument.split(","))
        found = tuple(map(value, words))
        if len(found) < least or None in found:
            raise ValueError(f"not a list of {metavar}")  # `invalid.py` says more
        return found

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda given: isinstance(given, tuple),
        str_from_instance=lambda given: [",".join(map(str, given))],
    )


def _integer(word: str) -> int | None:
    return int(word) if word.isdecimal() and len(word) < 20 else None
