# SPDX-License-Identifier: Apache-2.0
"""Damage that was once accepted or ended in a traceback, each case by its name.

The fuzz draws such changes at random; here none depends on luck.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetjax.checkpoint.stores.store import CorruptData
from hetjax.errors import BadInput
from hetjax.report.metrics import KEYS
from hetjax.runtime.rpc.encoding import BadMessage
from tests.files.file_kind import FileKind
from tests.files.file_kinds import KINDS

_ENTRY = ("entries", "params.block_000.mlp.up")
_DEEP = "[" * 200_000 + "]" * 200_000 + "\n"


def damaged(kind: FileKind, folder: Path, change: Callable[[str], str]) -> Any:
    """Return what is read from a valid file after a change, as text."""
    kind.make(folder)
    target = folder / kind.target
    target.write_text(change(target.read_text(errors="replace")))
    return repr(kind.read(folder))


def revalued(keys: tuple[str | int, ...], value: Any) -> Callable[[str], str]:
    """Return a change that sets a value at these keys, and corrects the checksum."""

    def change(text: str) -> str:
        whole = json.loads(text)
        *path, last = keys
        holder = whole
        for key in path:
            holder = holder[key]
        holder[last] = value
        seal = KINDS["manifest, sealed"].seal
        assert seal is not None
        return json.dumps(seal(whole) if "crc32c" in whole else whole)

    return change


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ((*_ENTRY, "shape"), [-1]),
        ((*_ENTRY, "shape"), -1),
        ((*_ENTRY, "shape"), [1e9, 1e9]),
        ((*_ENTRY, "shape"), [10**9, 10**9]),
        ((*_ENTRY, "shape"), "ab"),
        ((*_ENTRY, "slices"), [1, 10**9]),
        ((*_ENTRY, "slices"), 10**9),
        ((*_ENTRY, "dtype"), "object"),
        (("host",), [1]),
        (("host",), "run"),
        (("step",), "20"),
        (("workers",), "a"),
        (("files",), []),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_costs_its_step_alone(
    keys: tuple[str | int, ...], value: Any, tmp_path: Path
):
    with pytest.warns(UserWarning, match="step_00000020 is damaged"):
        found = damaged(KINDS["manifest, sealed"], tmp_path, revalued(keys, value))
    assert found.startswith("(10,")  # the step before


@pytest.mark.parametrize(
    ("kind", "keys", "value"),
    [
        ("config of llama3", ("num_hidden_layers",), 10**9),
        ("config of llama3", ("num_hidden_layers",), 1e9),
        ("config of gpt2", ("n_layer",), 10**9),
        ("generation_config.json", ("eos_token_id",), {"x": 1}),
        ("tokenizer_config.json", ("chat_template",), {"x": 1}),
        ("tokenizer_config.json", ("eos_token",), {"x": 1}),
        ("plan", ("global_batch",), "6"),
        ("plan", ("replicas", 0, "num_microbatches"), 1e9),
        ("dataset", ("tokens", "validation"), "8"),
        ("measured device", ("memory_gib",), "8"),
        ("adapters' config", ("r",), "8"),
    ],
    ids=str,
)
def test_values_of_other_types_and_sizes_are_refused_or_made_anew(
    kind: str, keys: tuple[str | int, ...], value: Any, tmp_path: Path
):
    if kind == "measured device":
        with pytest.warns(UserWarning, match="it is measured again"):
            assert damaged(KINDS[kind], tmp_path, revalued(keys, value)) == "None"
        return
    with pytest.raises(BadInput) as refused:
        damaged(KINDS[kind], tmp_path, revalued(keys, value))
    assert refused.value.got and refused.value.allowed and refused.value.fix


@pytest.mark.parametrize("key", ["step", *KEYS])
def test_strings_in_place_of_a_runs_numbers_are_refused(key: str, tmp_path: Path):
    def change(text: str) -> str:
        first, *others = text.splitlines()
        return "\n".join([json.dumps(json.loads(first) | {key: "2.5"}), *others])

    with pytest.raises(BadInput, match=key):
        damaged(KINDS["run's metrics.jsonl"], tmp_path, change)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_lists_in_lists_without_end_are_refused_or_the_step_before_is_read(
    name: str, tmp_path: Path
):
    try:
        found = damaged(KINDS[name], tmp_path, lambda _: _DEEP)
    except (BadInput, CorruptData, BadMessage) as refused:
        assert not KINDS[name].hashed, refused
    else:
        what_it_says = {"text", "rows as CSV", "holder of a lease", "measured device"}
        assert found.startswith("(10,") or name in {*what_it_says, "request to leave"}
