# SPDX-License-Identifier: Apache-2.0
"""Parses options into the fields of a dataclass, with errors in three parts.

Owns the spelling of lists and of errors, and the short help with only the common
options. Does not own the options, the choice of common ones, nor the other help texts
(the commands' own files).
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from io import StringIO
from itertools import dropwhile, takewhile
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
from hetjax.errors import BadInput
from hetjax.training.settings.checks import option
from hetjax.training.settings.presets import PRESETS, Preset, preset

T = TypeVar("T")
_LISTS = ConstructorRegistry()
_IS_REPEATED = tyro.conf.UseAppendAction
_NUM_NEAREST = 3  # suggestions for an unknown option
_LIKENESS = 0.7  # least similarity of a suggestion; 1: equal
_SHORT, _ALL = ("-h", "--help"), "--help-all"
HELP = (*_SHORT, _ALL)


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
        description += "\n\nThese are the usual options; --help-all lists them all."
    elif _ALL in arguments:
        arguments = ["--help"]
    options = [option(name) for name in _names(default)]
    arguments = in_our_words(arguments, options)
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
        raise _wrong_value(printed.getvalue(), program, arguments) from ended
    if unknown:
        raise _unknown(unknown[0], options, program)
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
    fix = f"{program} tiny, say; {program} --help tells more"
    return BadInput(got=got, allowed=allowed, fix=fix)


def preset_lines() -> str:
    """Return a help line for every preset."""
    width = max(map(len, PRESETS))
    lines = (f"  {name:<{width}}  {p.summary}" for name, p in PRESETS.items())
    return "\n".join(lines)


def _names(default: Any) -> Iterator[str]:
    """Yield the dotted names of all fields, including those of groups."""
    for each in fields(default):
        value = getattr(default, each.name)
        if is_dataclass(value):
            yield from (f"{each.name}.{name}" for name in _names(value))
        else:
            yield each.name.removesuffix("_")  # appended to Python's keywords


def _wrong_value(box: str, program: str, arguments: Sequence[str]) -> BadInput:
    """Turn Tyro's box (a title, the problem, a rule, help texts) into a BadInput."""
    lines = [line.strip("\u2502|+ ") for line in box.splitlines()[1:]]
    rows = dropwhile(_is_rule, lines)
    problem = " ".join(" ".join(takewhile(lambda row: not _is_rule(row), rows)).split())
    named = re.search(r"--[\w.-]*\w", problem)
    return BadInput(
        got=_typed(named.group(), arguments) if named else " ".join(arguments),
        allowed=problem,
        fix=f"{program} --help",
    )


def _is_rule(row: str) -> bool:
    """Return whether a row is a line across the box. Tyro draws it in ASCII if UTF-8 is
    in doubt."""
    return not row.strip("-\u2500\u256d\u256e\u2570\u256f ")


def _typed(name: str, arguments: Sequence[str]) -> str:
    """Return the option with its values as last typed, which is what counts."""
    for i, argument in reversed(list(enumerate(arguments))):
        if argument.partition("=")[0].replace("_", "-") == name:
            rest = [] if "=" in argument else arguments[i + 1 :]
            values = takewhile(lambda word: not word.startswith("--"), rest)
            return " ".join([argument, *values])
    return name


def _unknown(argument: str, options: list[str], program: str) -> BadInput:
    """Return the error for an unknown option, with the nearest known ones."""
    every = f"{program} {_ALL} lists them all"
    typed = argument.partition("=")[0]
    if not typed.startswith("-"):
        return BadInput(
            got=f"{typed!r}, which belongs to no option",
            allowed=f"options and their values, as {program} --help lists them",
            fix=f"leave {typed!r} out, or write the option that it belongs to before "
            "it",
        )
    spelled = typed.replace("_", "-")
    names = [name.removeprefix("--") for name in (*options, *HELP, "--quiet")]
    word = spelled.removeprefix("--")
    alike = get_close_matches(word, names, n=_NUM_NEAREST, cutoff=_LIKENESS)
    near = [f"--{name}" for name in alike]
    return BadInput(
        got=f"unknown option {typed!r}",
        allowed=f"{', '.join(near)}, ...: {every}" if near else f"options: {every}",
        fix=f"did you mean {near[0]!r}?" if near else f"{program} {_ALL}",
    )


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
        words = [word for argument in arguments for word in argument.split(",")]
        if len(words) < least:
            raise ValueError(f"no word in a list of {metavar}")
        for word in words:
            if value(word) is None:
                shown = word if len(word) < 40 else f"{word[:37]}..."
                raise ValueError(f"{shown!r} in a list of {metavar}")
        return tuple(value(word) for word in words)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda given: isinstance(given, tuple),
        str_from_instance=lambda given: [",".join(map(str, given))],
    )


def _integer(word: str) -> int | None:
    return int(word) if word.isdecimal() and len(word) < 20 else None
