# SPDX-License-Identifier: Apache-2.0
"""The study of compiled programs: what it covers, reads, expects and tells."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.compile import attention, loss
from experiments.compile.__main__ import rows_of
from experiments.compile.cells import MODELS, PROGRAMS, Cell, all_cells, covering
from experiments.compile.compiling import refused, seen
from experiments.compile.expected import beyond, most_collectives
from experiments.compile.hlo import (
    aliased_parameters,
    collectives,
    hidden_collectives,
    permuted_numbers,
    square_arrays,
)
from experiments.compile.stages import SEQ_LEN, compiled_programs, stage_state
from experiments.compile.table import markdown
from experiments.compile.targets import TARGETS
from hetjax.cluster.local_devices import LocalDevice
from hetjax.models.decoders import model_of
from hetjax.models.model import abstract_params
from hetjax.models.presets import model_config

ROOT = Path(__file__).parents[2]
TINY = Cell(
    target="v5e",
    program="forward",
    model="tiny",
    mesh=(2, 2),
    remat="selective",
    place="inner",
    part="blocks",
)


def pairs(cell: Cell) -> set[tuple[tuple[str, object], ...]]:
    return set(combinations(asdict(cell).items(), 2))


def test_every_two_choices_that_can_stand_together_are_compiled_together():
    chosen = covering()
    assert len(chosen) <= 300
    assert all(cell.runs for cell in chosen)
    covered = {pair for cell in chosen for pair in pairs(cell)}
    assert covered == {pair for cell in all_cells() for pair in pairs(cell)}
    assert {(c.target, c.program) for c in chosen} == {
        (target, program) for target in TARGETS for program in PROGRAMS
    }


def test_no_size_of_a_model_can_be_taken_for_a_number_of_positions():
    sizes = {
        size
        for name in MODELS
        for module in model_of(model_config(name)).modules
        for param in abstract_params(module).values()
        for size in param.shape
    }
    assert not any(size % 11 == 0 for size in sizes)
    assert SEQ_LEN % 11 == 0


def text_of(function, *inputs, **options) -> str:
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in inputs]
    text = jax.jit(function, **options).lower(*abstract).compile().as_text()
    assert text is not None
    return text


def test_memory_that_is_given_away_and_taken_is_told_by_its_parameter():
    add = lambda x, y: (x + y, jnp.sum(y))  # noqa: E731
    assert aliased_parameters(text_of(add, (8, 8), (8, 8))) == set()
    donated = text_of(add, (8, 8), (8, 8), donate_argnums=1)
    assert aliased_parameters(donated) == {1}


def test_arrays_of_all_pairs_of_positions_are_found_unless_a_fusion_holds_them():
    def scores(x):
        return jax.nn.softmax(x @ x.T) @ x

    assert square_arrays(text_of(scores, (22, 4)), 22) == {"f32[22,22]"}
    assert square_arrays(text_of(scores, (22, 4)), 33) == set()
    fused = lambda x: jnp.sum(x[:, None] * x[None], axis=1)  # noqa: E731
    assert "[22,22]" in text_of(fused, (22,))
    assert square_arrays(text_of(fused, (22,)), 22) == set()


def test_collectives_are_counted_by_name():
    mesh = Mesh(jax.devices()[:2], ("data",))
    cut = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    summed = text_of(jnp.sum, (8, 8), in_shardings=cut, out_shardings=whole)
    assert collectives(summed) == {"all-reduce": 1}
    gathered = text_of(jnp.sin, (8, 8), in_shardings=cut, out_shardings=whole)
    assert collectives(gathered) == {"all-gather": 1}
    assert beyond(Counter(collectives(summed)), Counter()) == {"all-reduce": 1}
    assert not beyond(Counter({"reduce-scatter": 1}), Counter({"all-reduce": 1}))


SCHEDULE = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %start.1 = f32[8] all-reduce-start(%a), channel_id=1
  %other = f32[8] fusion(%a), kind=kLoop, calls=%f
  %done.1 = f32[8] all-reduce-done(%start.1)
  %start.2 = f32[8] all-reduce-start(%done.1), channel_id=2
  %done.2 = f32[8] all-reduce-done(%start.2)
  ROOT %last = f32[8] all-reduce(%done.2), channel_id=3
}
"""


def test_a_collective_is_hidden_if_something_runs_between_its_start_and_its_end():
    assert collectives(SCHEDULE) == {"all-reduce": 3}
    assert hidden_collectives(SCHEDULE) == 1


def test_a_collective_that_is_done_in_steps_counts_once_and_is_hidden():
    step = """
%async_collective_fusion.1 (a: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8] all-reduce(%a), channel_id=7
}
"""
    assert collectives(2 * step) == {"all-reduce": 1}
    assert hidden_collectives(2 * step) == 1


@pytest.mark.usefixtures("quick_compiling")
@pytest.mark.parametrize(
    ("cell", "reduced"),
    [
        (TINY, 2),
        (replace(TINY, program="backward"), 2),
        (replace(TINY, program="backward", remat="full"), 3),
        (replace(TINY, program="weight gradient", remat="full"), 0),
        (replace(TINY, program="forward", place="first", mesh=(2, 1)), 3),
        (replace(TINY, program="forward", part="attention", mesh=(1, 2)), 0),
    ],
    ids=str,
)
def test_passes_have_the_all_reduces_that_a_stage_needs(cell: Cell, reduced: int):
    state = stage_state(cell, jax.devices()[: cell.tensor * cell.data], "float32")
    (program,) = compiled_programs(cell, state)
    assert collectives(program.as_text()) == +Counter({"all-reduce": reduced})
    assert most_collectives(cell, state) == +Counter({"all-reduce": reduced})


@pytest.mark.usefixtures("quick_compiling")
@pytest.mark.parametrize("program", ["pack", "update", "square sum", "copies"])
def test_programs_over_the_state_pass_on_simulated_devices(program):
    cell = replace(TINY, program=program)
    state = stage_state(cell, jax.devices()[:4], "bfloat16")
    found = seen(cell, state, compiled_programs(cell, state))
    assert found["failures"] == []
    # nine masters, two moments of each, and a count of steps for either module
    donated = 29 if program == "update" else 0
    assert found["donated"] == found["aliased"] == donated


def test_what_permutes_send_is_counted():
    text = """
  %p.1 = (f32[32,2048]{1,0:T(8)}, f32[32,2048]{1,0}) collective-permute-start(%a)
  %p.2 = f32[32,2048]{1,0} collective-permute-done(%p.1)
  %p.3 = f32[8]{0} collective-permute(%p.2), channel_id=3
"""
    assert permuted_numbers(text) == 32 * 2048 + 8


def test_a_permute_is_expected_of_a_tpu_that_sums_rows_and_of_no_gpu():
    pack = replace(TINY, program="pack")
    state = stage_state(pack, jax.devices()[:4], "float32")
    gpu = most_collectives(replace(pack, target="H100"), state)
    tpu = most_collectives(pack, state)
    assert tpu - gpu == {"collective-permute": gpu["all-reduce"]}
    assert not gpu["collective-permute"]


@pytest.mark.usefixtures("quick_compiling")
def test_a_permute_of_more_than_a_small_part_is_told(monkeypatch: pytest.MonkeyPatch):
    cell = replace(TINY, program="pack")
    state = stage_state(cell, jax.devices()[:4], "float32")
    programs, rows = compiled_programs(cell, state), state.updates.gradients
    numbers = sum(array.shape[1] for group in rows for array in group)
    for sent, failures in ((numbers // 11, 0), (numbers // 9, 1)):
        monkeypatch.setattr(
            "experiments.compile.compiling.permuted_numbers", lambda _, sent=sent: sent
        )
        assert len(seen(cell, state, programs)["failures"]) == failures


@pytest.mark.parametrize(
    ("kind", "said", "is_fault"),
    [
        ("TPU v4", "Ran out of memory on HBM", False),  # 51 GiB on 32
        ("TPU v5p", "Ran out of memory on HBM", True),  # on 95: something is wrong
        ("TPU v4", "Unsupported algorithm", True),
    ],
)
def test_only_what_is_beyond_a_device_by_our_own_model_need_not_compile(
    kind: str, said: str, is_fault: bool
):
    cell = replace(
        TINY, program="update", model="mixtral-8x7b", mesh=(1, 1), place="first"
    )
    state = stage_state(cell, jax.devices()[:1], "bfloat16", "splash")
    device = LocalDevice(platform="tpu", device_kind=kind, handle="0", memory_bytes=0)
    found = refused(cell, state, device, said)
    assert bool(found["failures"]) == is_fault
    assert ("beyond" in found) != is_fault


@pytest.mark.usefixtures("quick_compiling")
def test_what_is_wrong_with_a_program_is_told(monkeypatch: pytest.MonkeyPatch):
    cell = replace(TINY, part="attention")
    state = stage_state(cell, jax.devices()[:4], "float32")
    nothing = partial(Counter)
    monkeypatch.setattr(
        "experiments.compile.compiling.most_collectives", lambda *_: nothing()
    )
    told = seen(cell, state, compiled_programs(cell, state))["failures"]
    assert "collectives beyond those expected: 1 all-reduce" in told


def test_the_page_has_the_table_of_attention_which_stores_no_square():
    rows = attention.rows_of(ROOT / "experiments/results/compile_attention.jsonl")
    page = (ROOT / "docs/how/compiled.md").read_text(encoding="utf-8")
    begin, end = "<!-- attention of .*? -->", "<!-- end of attention -->"
    (drawn,) = re.findall(rf"{begin}\n\n(.*?)\n{end}", page, re.DOTALL)
    assert drawn.strip() == attention.markdown(rows).strip()
    assert {row["target"] for row in rows} == set(attention.DEVICES)
    for row in rows:
        assert not row["has_square"], row
        assert row["kernels"] == {"cudnn": 2, "splash": 3, "chunked": 0}[row["form"]]
        assert row["length"] > 8_192 or row["temp_bytes"] <= 2**30, row


@pytest.mark.parametrize(
    ("result", "drawn"),
    [
        ("compile.jsonl", lambda file: markdown(rows_of(file))),
        ("compile_loss.jsonl", lambda file: loss.markdown(loss.rows_of(file))),
    ],
)
def test_the_page_has_the_tables_of_the_result(
    result: str, drawn: Callable[[Path], str]
):
    file = f"experiments/results/{result}"
    page = (ROOT / "docs/how/compiled.md").read_text(encoding="utf-8")
    between = rf"<!-- from {re.escape(file)} -->\n\n(.*?)\n<!-- end -->"
    (found,) = re.findall(between, page, re.DOTALL)
    assert found.strip() == drawn(ROOT / file).strip()


def test_the_losss_table_says_what_is_in_the_rows():
    def row(form: str, tensor: int, gib: float) -> dict[str, object]:
        return {
            "target": "H100",
            "form": form,
            "tensor": tensor,
            "dtype": "bfloat16",
            "temp_bytes": gib * 2**30,
            "collectives": {"all-reduce": 3},
        }

    rows = [row(*of) for of in (("in blocks", 1, 0.5), ("in blocks", 2, 0.25))]
    assert "H100" not in loss.markdown(rows)  # not all of it is compiled
    rows += [row("all logits", 1, 4), row("all logits", 2, 2)]
    line = "| H100 | bfloat16 | 0.50 | 0.25 | 3 per block | 4.00 |\n"
    assert loss.markdown(rows).endswith(line)
