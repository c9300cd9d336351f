# SPDX-License-Identifier: Apache-2.0
"""Tests whether hetjax runs on the card, identifies it, and trains as on the CPU.

Asks the card for its kind, and the driver and JAX for its memory. Then trains preset
`tiny` as one stage through the product, on the card and on the CPU at the same time,
while `hetjax devices` and `hetjax doctor` run as a user runs them. Owns these tests and
the bounds within which losses count as equal.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.gpu.models.tiny_run import RunSize, furthest, losses, tiny_arguments
from experiments.gpu.processes.background import Background, ending, python_module
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import device_name
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.launchers.device_probe import accelerators_here
from hetjax.launchers.isolation import gpu_share
from hetjax.mesh.driver import Card, driver_cards
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.profiling.found_here import cluster_here

_GIB = 2**30
_NODE = "device"
_LAYERS = 6  # of preset tiny: the embedding, four blocks, the head
_USUAL = RunSize(steps=24, seq_len=64, microbatches=2, microbatch_size=8)
_QUICK = RunSize(steps=6, seq_len=16, microbatches=2, microbatch_size=4)
_KEPT_S = 1.0  # left for the rows after a run that does not end
_CPU_ALONE = {"JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How a run on the card computes, and how far its losses may be from the CPU's.

    `rounding` gives the reason for `bound`.
    """

    name: str
    dtype: str
    bound: float
    rounding: str
    environment: Mapping[str, str]


# A run's losses are means over tokens, so roundings partly cancel. Each step starts
# from weights that earlier steps' roundings have moved. Against float32 on a CPU the
# usual run was off by 2.4e-4 in float16, which has the mantissa of TF32, and by 1.2e-3
# in bfloat16.
PRECISIONS = (
    Precision(
        name="float32",
        dtype="float32",
        bound=2**-9,
        rounding="JAX's default; from Ampere on products are of TF32, which rounds "
        "operands by up to 2^-11 each, both 2^-10, twice that over the steps",
        environment={},
    ),
    Precision(
        name="exact float32",
        dtype="float32",
        bound=1e-4,
        rounding="JAX_DEFAULT_MATMUL_PRECISION=highest: sums in another order, 2^-24 "
        "each, which AdamW enlarges where gradients nearly vanish",
        environment={"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
    ),
    Precision(
        name="the card's own precision",
        dtype="best",
        bound=2**-7,
        rounding="bfloat16 rounds operands and activations by up to 2^-9 each, both "
        "operands 2^-8, twice that over the steps; float16 rounds less",
        environment={},
    ),
)


def measure(setting: Setting) -> Iterator[Row]:
    yield from _card(setting.device)
    with setting.scratch() as folder, ExitStack() as commands:
        on_cpu, *on_card = _trainings(setting, folder, commands)
        devices, doctor = (
            commands.enter_context(
                python_module(
                    setting.logs_of("runs", folder) / f"{name}.txt", f"hetjax.{name}"
                )
            )
            for name in ("devices", "doctor")
        )
        yield from _devices(devices, setting)  # `devices` and `doctor` end first
        yield _exit_code("hetjax doctor", doctor, setting)
        yield from _trained(setting, folder, on_cpu, on_card)


def _card(device: jax.Device) -> Iterator[Row]:
    """Yield what the card reports, beside what catalogue and driver report."""
    yield Row(what="card", measured=device.device_kind)
    shown = [card for card in driver_cards() if card.name == device.device_kind]
    card = shown[0] if shown and device.platform != "cpu" else None
    yield Row(
        what="compute capability",
        measured=_capability(device),
        note=f"the driver says {card.compute_capability}" if card else "no driver",
    )
    yield from _memory(device, card)
    by_driver = sorted(device_name(found) for found in accelerators_here(os.environ))
    by_jax = sorted(
        device_name(found)
        for found in jax.local_devices(backend=device.platform)
        if found.platform != "cpu"
    )
    yield Row(
        what="discovery finds the devices that JAX has",
        measured=by_driver == by_jax,
        note=f"discovery: {', '.join(by_driver) or 'none'}; "
        f"JAX: {', '.join(by_jax) or 'none'}",
    )


def _capability(device: jax.Device) -> str | None:
    found = getattr(device, "compute_capability", None)
    return None if found is None else str(found)


def _memory(device: jax.Device, card: Card | None) -> Iterator[Row]:
    """Yield memory by catalogue, driver and JAX's allocator, and a plan's budget."""
    known = catalogue().get(canonical_name(device_name(device)))
    by_driver = card.memory_gib if card and card.memory_gib else None
    yield Row(
        what="memory of the card",
        measured=by_driver,
        unit="GiB",
        predicted=known.memory_gib if known else None,
        note=f"the driver's total; the catalogue's {known.name}"
        if known
        else f"the catalogue does not have {device_name(device)}",
    )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    share = gpu_share(os.environ)
    yield Row(
        what="memory limit of JAX",
        measured=limit / _GIB if limit else None,
        unit="GiB",
        predicted=share * by_driver if by_driver else None,
        note=f"bytes_limit; hetjax sets {share:.0%} of the driver's total",
    )
    (node,) = cluster_here([device])[0].nodes
    budget = node_plan_bytes(node)
    yield Row(
        what="memory of a plan is within JAX's limit",
        measured=budget <= limit if limit else None,
        note=f"a plan may fill {budget / _GIB:.2f} GiB",
    )


def _trainings(
    setting: Setting, folder: Path, commands: ExitStack
) -> Iterator[Background]:
    """Start the same run on the CPU and, in each precision, on the card."""
    size, card = setting.choose(_USUAL, _QUICK), device_name(setting.device)
    plan = folder / "plan.json"
    write_plan(plan, one_stage_plan(size))

    def start(
        run_dir: Path, device: str, dtype: str, environment: Mapping[str, str]
    ) -> Background:
        node = Node(name=_NODE, device=device, count=1)
        more = ["--plan", str(plan), "--dtype", dtype]
        more += ["--platform", "cpu"] if device == "cpu" else []
        cluster, cache = Cluster(name="here", nodes=(node,)), run_dir / "cache"
        run_dir.mkdir()
        words = tiny_arguments(run_dir / "run", cluster, size, cache, *more)
        log = setting.logs_of("runs", folder) / f"{run_dir.name}.txt"
        return commands.enter_context(
            python_module(log, "hetjax.train", words, os.environ | environment)
        )

    yield start(folder / "cpu", "cpu", "float32", _CPU_ALONE)
    for n, each in enumerate(PRECISIONS):
        yield start(folder / f"card-{n}", card, each.dtype, each.environment)


def _trained(
    setting: Setting, folder: Path, on_cpu: Background, on_card: Sequence[Background]
) -> Iterator[Row]:
    """Compare the runs on the card with the run on the CPU."""
    size = setting.choose(_USUAL, _QUICK)
    on_cpu.exit_code(setting.left_s() - _KEPT_S)
    expected = losses(folder / "cpu" / "run")
    for n, (precision, run) in enumerate(zip(PRECISIONS, on_card, strict=True)):
        code = run.exit_code(setting.left_s() - _KEPT_S)
        found = losses(folder / f"card-{n}" / "run")
        if n == 0:
            yield _falls(found, size, code, run)
        yield from _beside_cpu(precision, found, expected, size, run)


def one_stage_plan(size: RunSize) -> Plan:
    """Return the plan for all of `tiny` on one device, as any planner would make it."""
    stage = Stage(node=_NODE, devices=(0,), layers=(0, _LAYERS), launch_ahead=1)
    replica = Replica(
        num_microbatches=size.microbatches,
        microbatch_size=size.microbatch_size,
        stages=(stage,),
    )
    return Plan(
        model="tiny",
        seq_len=size.seq_len,
        global_batch=size.global_batch,
        replicas=(replica,),
    )


def _falls(
    found: Sequence[float], size: RunSize, code: int | None, run: Background
) -> Row:
    """Judge the run on the card; one that had no time to end says nothing."""
    is_whole = len(found) == size.steps and code == 0
    course = f"{found[0]:.4f} to {found[-1]:.4f} in {len(found)} steps" if found else ""
    return Row(
        what="hetjax train runs, and its loss falls",
        measured=None if code is None else is_whole and found[-1] < found[0],
        note=f"tiny, one stage; {course}"
        if is_whole
        else f"{ending(code)}, {len(found)} steps; {run.tail}",
    )


def _beside_cpu(
    precision: Precision,
    found: Sequence[float],
    expected: Sequence[float],
    size: RunSize,
    run: Background,
) -> Iterator[Row]:
    """Compare the losses with the CPU's; None if some steps are missing."""
    is_whole = len(found) == len(expected) == size.steps
    distance = furthest(found, expected)
    yield Row(
        what=f"losses in {precision.name}, furthest from the CPU's",
        measured=distance if is_whole else None,
        unit="of the loss",
        note=""
        if is_whole
        else f"{len(found)} steps, {len(expected)} on the CPU; {run.tail}",
    )
    yield Row(
        what=f"losses in {precision.name} are the CPU's within rounding",
        measured=distance <= precision.bound if is_whole else None,
        note=f"bound {precision.bound:.2g}: {precision.rounding}",
    )


def _devices(command: Background, setting: Setting) -> Iterator[Row]:
    """Test whether the last line of `hetjax devices` names this machine's device."""
    ended = _exit_code("hetjax devices", command, setting)
    yield ended
    device = setting.device
    is_cpu = device.platform == "cpu"
    name = "only the CPU" if is_cpu else device_name(device)
    last = (command.output.strip().splitlines() or [""])[-1]
    named = None if ended.measured is None else name in last
    yield Row(what="hetjax devices names the card", measured=named, note=last)


def _exit_code(name: str, command: Background, setting: Setting) -> Row:
    code = command.exit_code(setting.left_s() - _KEPT_S)
    return Row(
        what=f"exit code of {name}",
        measured=None if code is None else float(code),
        note="" if code == 0 else command.tail,
    )
