# SPDX-License-Identifier: Apache-2.0
"""Formats compiled rows as Markdown: faults, their reasons, types, and memory.

Owns the words of the tables. Does not own the rows (`compiling.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from experiments.compile.cells import PASSES, PROGRAMS, covering
from experiments.compile.targets import TARGETS

Row = dict[str, Any]

_FAULTS = {  # the beginning of a row's failure -> its word in the table
    "does not compile": "no compile",
    "not compiled within": "too slow",
    "the compiler died": "crash",
    "S x S": "S × S",
    "collectives": "collectives",
    "numbers in": "types",
    "no product": "types",
}


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of the rows, a row for each cell."""
    tables = (_head, _matrix, _reasons, _choices, _products, _hidden, _memory)
    parts = [table(rows) for table in tables]
    return "\n\n".join(filter(None, parts)) + "\n"


def _head(rows: Sequence[Row]) -> str:
    days = sorted({row["day"] for row in rows})
    compilers = sorted(
        {f"{TARGETS[r['target']].compiler} {r['compiler']}" for r in rows}
    )
    jax = ", ".join(sorted({row["jax"] for row in rows}))
    passed = sum(not (row["failures"] or "beyond" in row) for row in rows)
    return (
        f"{len(rows)} of the {len(covering())} programs were compiled, on "
        f"{' and '.join(dict.fromkeys((days[0], days[-1])))}, with JAX {jax}, "
        f"{' and '.join(compilers)}; {passed} are without fault{_unfit(rows)}. "
        f"Commits of the package, and programs: {_commits(rows)}."
    )


def _unfit(rows: Sequence[Row]) -> str:
    num = sum("beyond" in row for row in rows)
    verb = "is" if num == 1 else "are"
    told = f", {num} {verb} beyond the card by our own figure and refused"
    return told if num else ""


def _commits(rows: Sequence[Row]) -> str:
    found = Counter(row.get("commit", "not said") for row in rows)
    return ", ".join(f"{commit} {num}" for commit, num in found.most_common())


def _products(rows: Sequence[Row]) -> str:
    """Return the table of products in passes, by the types of their factors."""
    lines = []
    for target in TARGETS:
        found: Counter[str] = Counter()
        for row in rows:
            if row["target"] == target and row["program"] in PASSES:
                found.update(row.get("products", {}))
        if found:
            told = ", ".join(f"{num} of {types}" for types, num in found.most_common())
            lines.append([target, TARGETS[target].dtype, told])
    head = ["", "stages in", "products of matrices in passes"]
    return _table(head, lines) if lines else ""


def _hidden(rows: Sequence[Row]) -> str:
    """Return the table of passes' collectives, and of those that overlap with work."""
    lines = []
    for target in TARGETS:
        own = [
            row
            for row in rows
            if row["target"] == target and row["program"] in PASSES
            if "hidden_collectives" in row and row["collectives"]
        ]
        found = sum(sum(row["collectives"].values()) for row in own)
        hidden = sum(row["hidden_collectives"] for row in own)
        if own:
            lines.append([target, str(len(own)), str(found), str(hidden)])
    head = ["", "passes", "collectives", "beside which something is computed"]
    return _table(head, lines) if lines else ""


def _matrix(rows: Sequence[Row]) -> str:
    """Return the table of targets by programs: `ok`, the faults, or nothing."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["target"], row["program"]].append(row)
    lines = [
        [target, *(_word(found[target, program]) for program in PROGRAMS)]
        for target in TARGETS
    ]
    return _table(["", *PROGRAMS], lines)


def _word(rows: Sequence[Row]) -> str:
    """Return the rows' faults; if there are none, whether all fit the card."""
    faults = dict.fromkeys(_fault(fault) for row in rows for fault in row["failures"])
    fits = ["beyond the card" if "beyond" in row else "ok" for row in rows]
    return ", ".join(faults or sorted(set(fits), reverse=True))


def _fault(failure: str) -> str:
    known = (word for start, word in _FAULTS.items() if failure.startswith(start))
    return next(known, "copies")


def _reasons(rows: Sequence[Row]) -> str:
    """Return the table of reasons, with their number and their targets."""
    targets: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for failure in row["failures"]:
            targets[_reason(failure)].append(row["target"])
    lines = [
        [reason, str(len(where)), ", ".join(dict.fromkeys(where))]
        for reason, where in sorted(targets.items(), key=lambda item: -len(item[1]))
    ]
    return _table(["what is wrong", "programs", "for"], lines) if lines else ""


def _reason(failure: str) -> str:
    """Return a failure without the details that differ from program to program."""
    if failure.startswith("S x S"):
        return "scores or a mask of all pairs of positions are stored"
    return failure.replace("|", "/").replace("\n", " ")


def _choices(rows: Sequence[Row]) -> str:
    """Return the table of choices, with programs without fault over all programs."""
    lines = []
    for name in ("model", "mesh", "remat", "place", "part"):
        given, passed = Counter(), Counter()
        for row in rows:
            if "beyond" in row:
                continue
            choice = _choice(name, row[name])
            given[choice] += 1
            passed[choice] += not row["failures"]
        told = [
            f"{choice} {passed[choice]}/{given[choice]}" for choice in sorted(given)
        ]
        lines.append([name, "; ".join(told)])
    return _table(["choice", "without fault"], lines)


def _choice(name: str, value: Any) -> str:
    return f"{value[0]} × {value[1]}" if name == "mesh" else value


def _memory(rows: Sequence[Row]) -> str:
    """Return the table of our total's error against the compiler's, by group."""
    lines = [
        *_errors(rows, lambda row: row["target"]),
        *_errors(rows, lambda row: row["program"]),
    ]
    head = ["", "stages", "least", "median", "greatest", "within -2 % and +10 %"]
    return _table(head, lines) if lines else ""


def _errors(rows: Sequence[Row], of: Callable[[Row], str]) -> Iterator[list[str]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        error = memory_error(row)
        if error is not None:
            groups[of(row)].append(error)
    for group, errors in groups.items():
        within = sum(-0.02 <= error <= 0.10 for error in errors)
        yield [
            group,
            str(len(errors)),
            *(f"{100 * f(errors):+.0f} %" for f in (min, median, max)),
            str(within),
        ]


def memory_error(row: Row) -> float | None:
    """Return our total over the compiler's, less one; None if some figures are missing.

    The total is what lives through a step, one microbatch in flight, and the workspace
    of the stage's passes. The compiler's total has its own workspace and its padding.
    """
    memory = row.get("memory")
    if not memory or row["program"] not in ("backward", "fused", "weight gradient"):
        return None
    held = {
        "backward": memory["predicted_saved_bytes"],
        "fused": memory["predicted_input_bytes"],
        "weight gradient": memory["predicted_saved_bytes"]
        + memory["predicted_half_saved_bytes"],
    }[row["program"]]
    buffers = memory["predicted_static_bytes"] + held + memory["predicted_input_bytes"]
    buffers += 2 * memory["predicted_output_bytes"]
    padding = memory["argument_bytes"] - memory["argument_shape_bytes"]
    ours = buffers + memory["predicted_workspace_bytes"]
    return ours / (buffers + padding + memory["pass_temp_bytes"]) - 1


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
