# SPDX-License-Identifier: Apache-2.0
"""Defines the stages whose memory is compared with compilers, and what to compile.

Owns the choices, a pairwise covering and random draws of them for each kind of
compiler, and the plan that has a cell's stage. Does not own devices
(`experiments/compile/targets.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Any

import jax

from experiments.compile.cells import MESHES, REMATS, Place, covered
from experiments.compile.stages import OPTIMIZER
from experiments.compile.targets import TARGETS, Gpu
from hetjax.cluster.catalogue import Backend, Precision
from hetjax.models.attention.attention import AttentionForm
from hetjax.models.decoders import model_of
from hetjax.models.model import Model
from hetjax.models.presets import model_config
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageKey, StageMesh
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.stages import Stages

HOST = "cpu"
MODELS = ("llama-1b", "llama3-8b", "gpt3-2.6b", "mixtral-8x7b")
NUM_STAGES = 3
PLACES: tuple[Place, ...] = ("first", "inner", "last")
NUM_BLOCKS = (2, 5)
SEQ_LENS = (1024, 2048, 4096)
_SHORT = 2048  # the most positions for which all scores may be stored


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCell:
    """One stage on one kind of device; `split`: its backward is cut in I and W.

    `num_blocks` counts the stage's own blocks, `num_sequences` the sequences of a data
    rank's share of a microbatch.
    """

    target: str
    model: str
    mesh: tuple[int, int]
    remat: Remat
    place: Place
    num_blocks: int
    seq_len: int
    num_sequences: int
    split: bool
    attention: AttentionForm

    @property
    def dtype(self) -> Precision:
        """The stage's precision: CPUs would compute 16-bit formats in 32-bit copies."""
        return "float32" if self.target == HOST else TARGETS[self.target].dtype

    @property
    def num_devices(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def in_flight(self) -> int:
        """Microbatches that 1F1B has in flight on the stage."""
        return NUM_STAGES - PLACES.index(self.place)


def backend_of(target: str) -> Backend:
    """Return JAX's word for the platform of a target."""
    return "cpu" if target == HOST else TARGETS[target].backend


def cells_of(backend: Backend) -> list[MemoryCell]:
    """Return cells of the backend's targets that have every pair of choices.

    The first cells cover most pairs. The cells are shuffled before the selection, so
    that no choice is preferred on a tie.
    """
    return covered(drawn(backend, 0))


def drawn(backend: Backend, seed: int) -> list[MemoryCell]:
    """Return all cells of the backend's targets in an order that the seed gives.

    The first cells are a random sample; with a new seed, one that the memory model was
    not fitted to.
    """
    targets = [t for t in (HOST, *TARGETS) if backend_of(t) == backend]
    cells = list(_all_cells(targets))
    Random(seed).shuffle(cells)
    return cells


def _all_cells(targets: list[str]) -> Iterator[MemoryCell]:
    names = [field.name for field in fields(MemoryCell)]
    choices = product(
        targets, MODELS, MESHES, REMATS, PLACES, NUM_BLOCKS, SEQ_LENS, (1, 2), (0, 1)
    )
    for target, *others, split in choices:
        for attention in forms_of(target):
            values: Any = (target, *others, bool(split), attention)
            chosen: dict[str, Any] = dict(zip(names, values, strict=True))
            cell = MemoryCell(**chosen)
            if attention != "xla" or cell.seq_len <= _SHORT:
                yield cell


def forms_of(target: str) -> tuple[AttentionForm, ...]:
    """Return the forms that a run may use: a kernel if there is one, or plain forms."""
    if backend_of(target) == "tpu":
        return "splash", "chunked"
    device = TARGETS.get(target)
    has_kernel = isinstance(device, Gpu) and device.capability >= (8, 0)
    return ("cudnn", "chunked") if has_kernel else ("chunked", "xla")


def model_and_plan(cell: MemoryCell) -> tuple[Model, Plan, StageKey]:
    """Return a model of three equal stages, a plan of it, and the cell's stage key."""
    blocks, (tensor, data) = cell.num_blocks, cell.mesh
    config = replace(
        model_config(cell.model),
        num_blocks=NUM_STAGES * blocks,
        max_seq_len=cell.seq_len,
    )
    cuts = (0, blocks + 1, 2 * blocks + 1, 3 * blocks + 2)
    stages = tuple(
        Stage(
            node="devices",
            devices=tuple(range(cell.num_devices)),
            mesh=StageMesh(data=data, tensor=tensor),
            layers=(cuts[number], cuts[number + 1]),
            remat=cell.remat,
            attention=cell.attention,
            launch_ahead=NUM_STAGES - number,
        )
        for number in range(NUM_STAGES)
    )
    size = cell.num_sequences * data
    replica = Replica(num_microbatches=NUM_STAGES, microbatch_size=size, stages=stages)
    plan = Plan(
        model=cell.model,
        seq_len=cell.seq_len,
        global_batch=NUM_STAGES * size,
        schedule="zero-bubble" if cell.split else "1f1b",
        replicas=(replica,),
    )
    return model_of(config), plan, (0, PLACES.index(cell.place))


def stage_state(cell: MemoryCell, devices: list[jax.Device]) -> StageState:
    """Return the cell's stage on these devices, with no program compiled."""
    model, plan, key = model_and_plan(cell)
    here = {"devices": devices[: cell.num_devices]}
    return Stages(plan, model, here, OPTIMIZER, dtype=cell.dtype).stages[key]


def passes_of(cell: MemoryCell, state: StageState) -> dict[str, Any]:
    """Compile the passes that decide the stage's workspace."""
    programs = state.programs
    if cell.split:
        return {
            "forward": programs.forward,
            "input gradient": programs.input_gradient,
            "weight gradient": programs.weight_gradient,
        }
    if programs.function.last:
        return {"fused": programs.fused}
    return {"forward": programs.forward, "backward": programs.backward}
