# SPDX-License-Identifier: Apache-2.0
"""The study of compiled programs: what it covers, compiles, expects and reports."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.compile import attention, kernels, loss
from experiments.compile.__main__ import rows_of
from experiments.compile.cells import (
    MODELS,
    PROGRAMS,
    Cell,
    Part,
    Place,
    all_cells,
    covering,
)
from experiments.compile.compiling import refused, seen, wrong_types
from experiments.compile.expected import most_collectives
from experiments.compile.hlo import (
    collectives,
    products,
)
from experiments.compile.stages import (
    KINDS,
    OPTIMIZER,
    SEQ_LEN,
    attention_of,
    compiled_programs,
    model_and_plan,
    stage_state,
)
from experiments.compile.table import markdown
from experiments.compile.targets import TARGETS
from hetjax.cluster.local_devices import LocalDevice
from hetjax.models.decoders import model_of
from hetjax.models.model import abstract_params
from hetjax.models.presets import model_config
from hetjax.runtime.execution.stages import Stages

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


@pytest.mark.usefixtures("quick_compiling")
def test_stages_compile_nothing_that_the_gate_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    cell = replace(TINY, program="weight digests", place="last")
    model, plan, _ = model_and_plan(cell)
    here = {"devices": jax.devices()[:4]}
    stages = Stages(plan, model, here, OPTIMIZER, kinds=KINDS)
    places: tuple[Place, ...] = ("first", "last")
    for place, state in zip(places, stages.stages.values(), strict=True):
        for program in PROGRAMS:
            own = replace(cell, program=program, place=place)
            if own.runs:
                compiled_programs(own, state)

    def refuse(lowered: jax.stages.Lowered, **_: object) -> None:
        raise AssertionError(lowered.as_text()[:300])

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    stages.compile()


def test_digests_are_of_weights_where_devices_are_alike_and_else_of_gradients():
    for program in ("weight digests", "gradient digests"):
        cell = replace(TINY, program=program)
        state = stage_state(cell, jax.devices()[:4], "float32")
        assert all(group.shared for group in state.updates.groups)
        exact = {group.is_exact for group in state.updates.groups}
        assert exact == {program == "weight digests"}


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
@pytest.mark.parametrize("program", PROGRAMS[PROGRAMS.index("pack") :])
def test_programs_over_the_state_pass_on_simulated_devices(program):
    place = "last" if program == "logits" else "inner"
    cell = replace(TINY, program=program, place=place)
    state = stage_state(cell, jax.devices()[:4], "bfloat16")
    found = seen(cell, state, compiled_programs(cell, state))
    assert found["failures"] == []
    # nine masters, two moments of each, and a step count for each of two modules
    donated = 29 if program == "update" else 0
    assert found["donated"] == found["aliased"] == donated


TILES = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.48 = bf16[]"


@pytest.mark.parametrize("own", [None, {"xla_gpu_enable_latency_hiding": True}])
@pytest.mark.parametrize(
    "others",
    [(), (kernels.SMALL_PARTS,), (kernels.SMALL_PARTS, kernels.CUBLAS)],
    ids=len,
)
def test_kernels_that_do_not_compile_give_way_to_others(own, others):
    wanted = own
    for options in others:
        wanted = (wanted or {}) | options

    def compile_with(options: dict[str, object] | None) -> object:
        given.append(options)
        if options != wanted:
            raise jax.errors.JaxRuntimeError(TILES)
        return program

    given, program = list[dict[str, object] | None](), object()
    assert kernels.compiled(compile_with, own) is program
    assert kernels.is_other_choice(program) == bool(others)
    assert given[0] == own
    assert len(given) == 1 + len(others)


@pytest.mark.parametrize(
    ("said", "times"), [(TILES, 3), ("UNIMPLEMENTED: Unsupported algorithm", 1)]
)
def test_what_no_kernel_helps_against_is_told(said: str, times: int):
    def refuse(options: dict[str, object] | None) -> None:
        given.append(options)
        raise jax.errors.JaxRuntimeError(said)

    given: list[dict[str, object] | None] = []
    with pytest.raises(jax.errors.JaxRuntimeError, match=said[:20]):
        kernels.compiled(refuse, None)
    assert len(given) == times


PRODUCT = """
ENTRY %main (p: f16[8,8]) -> f16[8,8] {
  %p = f16[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}
"""


def test_a_stage_of_float16_multiplies_it_and_has_no_bfloat16():
    cell = replace(TINY, target="V100")
    state = stage_state(cell, jax.devices()[:4], "float16")

    def faults(text: str) -> list[str]:
        return list(wrong_types(cell, state, [text], products(text)))

    assert faults(PRODUCT) == []
    bf16 = PRODUCT.replace("f16", "bf16")
    assert faults(bf16) == ["numbers in bf16", "no product of f16"]
    assert faults(PRODUCT + "  %b = bf16[8]{0} parameter(2)") == ["numbers in bf16"]


@pytest.mark.parametrize(
    ("target", "model", "part", "form"),
    [
        ("H100", "gpt3-2.6b", "blocks", "cudnn"),
        ("H100", "gemma3-12b", "blocks", "chunked"),  # heads of 256
        ("H100", "gpt3-2.6b", "packed blocks", "chunked"),
        ("V100", "gpt3-2.6b", "blocks", "chunked"),
        ("v5e", "gemma3-12b", "packed blocks", "splash"),
    ],
)
def test_attention_is_in_the_form_that_the_product_takes(
    target: str, model: str, part: Part, form: str
):
    kind = {"H100": "NVIDIA H100 80GB HBM3", "V100": "Tesla V100-SXM2-32GB"}
    device: Any = LocalDevice(
        platform="tpu" if target == "v5e" else "gpu",
        device_kind=kind.get(target, "TPU v5 lite"),
        handle="0",
        memory_bytes=0,
    )
    cell = replace(TINY, target=target, model=model, part=part)
    assert attention_of(cell, [device]) == form


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


def test_the_page_says_what_was_compiled_with_the_current_jax():
    rows = rows_of(ROOT / "experiments/results/compile_jax_0_12.jsonl")
    with_first_jax = rows_of(ROOT / "experiments/results/compile.jsonl")
    gpus = {name for name, target in TARGETS.items() if target.compiler != "libtpu"}
    page = " ".join((ROOT / "docs/how/compiled.md").read_text(encoding="utf-8").split())
    assert f"we also compiled all {len(rows)} programs for GPUs" in page
    assert Counter(row["target"] for row in rows) == Counter(
        row["target"] for row in with_first_jax if row["target"] in gpus
    )
    assert {row["jax"] for row in rows} == {"0.12.0.1"}
    assert not any(row["failures"] for row in rows)


def test_tables_tell_what_is_wrong_with_any_of_the_rows_and_of_which_commits_they_are():
    def row(model: str, **found: object) -> dict[str, object]:
        cell = replace(TINY, target="V100", program="forward", model=model)
        said = {"day": "2026-11-25", "jax": "0.10.2", "compiler": "1", "failures": []}
        return asdict(cell) | said | found

    refused = row("tiny", failures=["does not compile: no"], commit="abc")
    multiplied = row("llama-1b", commit="abc", products={"f16": 3, "f32": 1})
    drawn = markdown([refused, multiplied, row("gpt3-2.6b")])
    assert "| V100 | no compile |" in drawn
    assert "Commits of the package, and programs: abc 2, not said 1." in drawn
    assert "| V100 | float16 | 3 of f16, 1 of f32 |" in drawn
    drawn = markdown([multiplied, row("gpt3-2.6b", beyond={})])
    assert "| V100 | ok, beyond the card |" in drawn


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
    assert "H100" not in loss.markdown(rows)  # not fully compiled yet
    rows += [row("all logits", 1, 4), row("all logits", 2, 2)]
    line = "| H100 | bfloat16 | 0.50 | 0.25 | 3 per block | 4.00 |\n"
    assert loss.markdown(rows).endswith(line)
