# SPDX-License-Identifier: Apache-2.0
"""Explains options that cannot be parsed: unknown names, wrong and missing values.

Owns the words for each type of option. Does not own the parsing (`options.py`), nor
which values of a type a command allows (the commands and `training/settings/`).
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from hetjax.cli.options.aliases import NO, YES
from hetjax.errors import BadInput, did_you_mean
from hetjax.training.settings.checks import as_options, option

HELP_ALL = "--help-all"
_NUM_NEAREST = 3  # suggestions for an unknown option
_LIKENESS = 0.7  # least similarity of a suggestion; 1: equal
_LONGEST = 60  # characters of a wrong value that are shown
_SIMPLE = {int: "a whole number", float: "a number", Path: "a path", str: "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOption:
    """An option as typed (`name`), the type of its value and its default.

    `is_repeated`: it may be typed several times, which makes a list. `place`: what the
    help calls it if it is positional, otherwise empty.
    """

    name: str
    kind: Any
    default: Any
    is_repeated: bool = False
    place: str = ""


def options_of(default: Any, group: str = "") -> Iterator[CommandOption]:
    """Yield the options that set the fields of a dataclass, including its groups."""
    kinds = get_type_hints(type(default), include_extras=True)
    for each in fields(default):
        value = getattr(default, each.name)
        name = group + each.name.removesuffix("_")  # appended to Python's keywords
        if is_dataclass(value):
            yield from options_of(value, f"{name}.")
        else:
            yield _option(option(name), kinds[each.name], value)


def _option(name: str, kind: Any, default: Any) -> CommandOption:
    if get_origin(kind) is not Annotated:
        return CommandOption(name=name, kind=kind, default=default)
    plain, *notes = get_args(kind)
    is_repeated = tyro.conf.UseAppendAction in notes
    places = [note.metavar for note in notes if hasattr(note, "metavar")]
    return CommandOption(
        name=name,
        kind=get_args(plain)[0] if is_repeated else plain,
        default=default,
        is_repeated=is_repeated,
        place=places[0] if tyro.conf.Positional in notes else "",
    )


def allowed_values(kind: Any) -> str | None:
    """Return what a value of this type may be, in words; None for other types."""
    words = [_words(choice) for choice in _choices(kind) if choice is not NoneType]
    known = [word for word in words if word is not None]
    return " or ".join(known) if len(known) == len(words) else None


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _words(kind: Any) -> str | None:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is bool:
        return "True or False"
    if get_origin(kind) is Literal:
        *first, last = map(str, get_args(kind))
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(kind) is tuple:
        (each, *_) = get_args(kind)
        word = "a whole number from 0" if each is int else _words(each)
        return word and f"{word}, or several with commas between"
    return None


def _literals(kind: Any) -> list[str]:
    """Return the words that a value of this type, or each of a list, may be; none if
    it may be something else."""
    found: list[str] = []
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            found += map(str, get_args(choice))
        elif get_origin(choice) is tuple:
            found += _literals(get_args(choice)[0])
        elif choice is not NoneType:
            return []
    return found


def wrong_value(
    box: str, options: Sequence[CommandOption], program: str, arguments: Sequence[str]
) -> BadInput:
    """Return the error for a value that Tyro refuses or misses.

    `box` is what Tyro has printed: a title, the problem, a rule, help texts.
    """
    lines = [line.strip("\u2502|+ ") for line in box.splitlines()[1:]]
    rows = dropwhile(_is_rule, lines)
    problem = " ".join(" ".join(takewhile(lambda row: not _is_rule(row), rows)).split())
    named = re.search(r"--[\w.-]*\w(?:/--[\w.-]*\w)*", problem)
    place = next((each for each in options if each.place), None)
    if named is None and place is not None:
        return _no_place(place, program, arguments)
    names = named.group().split("/") if named else []
    typed = _typed(names, arguments)
    meant = next((each for each in options if each.name in names), None)
    allowed = None if meant is None else allowed_values(meant.kind)
    if meant is None or allowed is None:
        fix = f"{program} {HELP_ALL}"
        return BadInput(got=" ".join(typed), allowed=problem, fix=fix)
    again = "; repeat the option for more" if meant.is_repeated else ""
    return BadInput(
        got=" ".join(typed) if len(typed) > 1 else f"{typed[0]} without a value",
        allowed=f"{meant.name} with {allowed}{again}",
        fix=_fix(meant, typed[1:], program),
    )


def _no_place(place: CommandOption, program: str, arguments: Sequence[str]) -> BadInput:
    """Return the error for a positional argument that is missing, or typed as an
    option."""
    name, *values = _typed([place.name], arguments)
    others = [
        word
        for word in arguments
        if word.partition("=")[0] != name and word not in values
    ]
    first = shlex.join(values) or place.place
    return BadInput(
        got=f"no {place.place}",
        allowed=f"{program} {place.place} [options]",
        fix=f"write it first: {program} {first} {shlex.join(others)}".rstrip(),
    )


def _fix(meant: CommandOption, values: Sequence[str], program: str) -> str:
    """Return the value that was probably meant, or an example, or where to read."""
    literals = _literals(meant.kind)
    words = (word for value in values for word in value.split(","))
    wrong = next((word for word in words if word not in literals), None)
    if literals and wrong is not None:
        return did_you_mean(wrong, literals)
    if isinstance(meant.default, int | float | str) and meant.default != "":
        typed = as_options({meant.name.removeprefix("--"): meant.default})
        return f"{typed}, for example"
    return f"{program} {HELP_ALL} describes {meant.name}"


def _is_rule(row: str) -> bool:
    """Return whether a row is a line across the box. Tyro draws it in ASCII if UTF-8 is
    in doubt."""
    return not row.strip("-\u2500\u256d\u256e\u2570\u256f ")


def _typed(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the option and its values as last typed, under any of its names.

    If it was not typed, return its first name; without names, return all arguments.
    """
    for i, argument in reversed(list(enumerate(arguments))):
        name, has_value, value = argument.partition("=")
        if name.replace("_", "-") in names:
            rest = [value] if has_value else arguments[i + 1 :]
            values = takewhile(lambda word: not word.startswith("--"), rest)
            return [name, *map(_short, values)]
    return [*names[:1]] or [*arguments]


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST else f"{word[: _LONGEST - 3]}..."


def unknown_argument(
    argument: str,
    options: Sequence[CommandOption],
    others: Sequence[str],
    program: str,
    arguments: Sequence[str],
) -> BadInput:
    """Return the error for an argument that no option takes.

    `others` are the names of options beside `options`.
    """
    typed = argument.partition("=")[0]
    if typed.startswith("-"):
        return _unknown_name(typed, [*(o.name for o in options), *others], program)
    return _value_of_switch(argument, options, arguments) or BadInput(
        got=f"{typed!r}, which belongs to no option",
        allowed=f"options and their values, as {program} {HELP_ALL} lists them",
        fix=f"leave {typed!r} out, or write the option that it belongs to before it",
    )


def _value_of_switch(
    word: str, options: Sequence[CommandOption], arguments: Sequence[str]
) -> BadInput | None:
    """Return the error for a value after an option that has none; else None."""
    if word.lower() not in (*YES, *NO):
        return None
    for switch in (each for each in options if each.kind is bool):
        group, dot, name = switch.name.rpartition(".")
        off = f"{group}.no-{name}" if dot else f"--no-{name.removeprefix('--')}"
        for typed in (switch.name, off):
            if not _follows(word, typed, arguments):
                continue
            wants = (word.lower() in YES) == (typed == switch.name)
            leave_out = off if switch.default else f"leave {switch.name} out"
            return BadInput(
                got=f"{typed} {word}",
                allowed=f"{typed} without a value",
                fix=switch.name if wants else leave_out,
            )
    return None


def _follows(word: str, name: str, arguments: Sequence[str]) -> bool:
    """Return whether the word is written after the option's name, or after `=`."""
    spelled = [argument.replace("_", "-") for argument in arguments]
    pairs = zip(spelled, arguments[1:], strict=False)
    return f"{name}={word}" in spelled or (name, word) in pairs


def _unknown_name(typed: str, names: Sequence[str], program: str) -> BadInput:
    """Return the error for an unknown option, with the nearest known ones."""
    every = f"{program} {HELP_ALL} lists them all"
    word = typed.replace("_", "-").removeprefix("--")
    known = [name.removeprefix("--") for name in names]
    alike = get_close_matches(word, known, n=_NUM_NEAREST, cutoff=_LIKENESS)
    parts = [n for n in known if n.startswith(word) or word.startswith(f"{n}.")]
    alike = alike or parts[:_NUM_NEAREST]
    near = [f"--{name}" for name in alike]
    return BadInput(
        got=f"unknown option {typed!r}",
        allowed=f"{', '.join(near)}, ...: {every}" if near else f"options: {every}",
        fix=f"did you mean {near[0]!r}?" if near else f"{program} {HELP_ALL}",
    )
