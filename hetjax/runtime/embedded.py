# SPDX-License-Identifier: Apache-2.0
"""The embedded controller: every worker in this process, over the local devices.

Owns building the stages of a plan and running steps by letting each worker enqueue
until it has to wait for another. Does not own the training loop (`hetjax/training/`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.checkpoint.entry import Entry
from hetjax.mesh.axes import batch_sharding, replicated, stage_mesh
from hetjax.mesh.reduction import num_rows
from hetjax.mesh.reshard import reshard
from hetjax.mesh.transport import InProcess
from hetjax.models.model import Model, ModuleSpec, apply, init_params
from hetjax.plans.plan import Plan, first_sample
from hetjax.runtime.collectives import InProcessCollectives
from hetjax.runtime.layout import Layout
from hetjax.runtime.programs import StagePrograms
from hetjax.runtime.stage import StageGraph
from hetjax.runtime.state import (
    Read,
    fresh_weights,
    host_values,
    place,
    stage_entries,
)
from hetjax.runtime.update import GradientGroup, UpdatePrograms
from hetjax.runtime.worker import (
    Observer,
    StageState,
    Step,
    Worker,
    check_runnable,
    gradient_norm,
)
from hetjax.schedule.action import COMPUTE, Op, Programs, StageKey
from hetjax.schedule.check import check, check_evaluation
from hetjax.schedule.lower import lower, lower_evaluation

Batch = tuple[np.ndarray, np.ndarray]  # inputs_GL, targets_GL (int32)


@dataclass(frozen=True, slots=True)
class BatchFeed:
    """Hands each microbatch its consecutive samples of a global batch."""

    plan: Plan
    batch: Batch

    def inputs(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[0][self._rows(replica, microbatch)]

    def targets(self, replica: int, microbatch: int) -> np.ndarray:
        return self.batch[1][self._rows(replica, microbatch)]

    def _rows(self, replica: int, microbatch: int) -> slice:
        size = self.plan.replicas[replica].microbatch_size
        start = first_sample(self.plan, replica) + microbatch * size
        return slice(start, start + size)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one committed step; `loss` waits for the devices when it is asked."""

    step: int
    grad_norm: float
    loss_sums: tuple[jax.Array, ...]
    num_tokens: int

    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return _total(self.loss_sums) / self.num_tokens


class Embedded:
    """A plan on the devices of this process: one worker per node."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        devices: Mapping[str, Sequence[jax.Device]],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        clip_norm: float = float("inf"),
    ) -> None:
        self.plan, self.model, self.clip_norm = plan, model, clip_norm
        self.layout = Layout(plan, model)
        self.training = lower(plan, self.layout.tied)
        check(self.training, plan, self.layout.tied)
        check_runnable(self.training)
        self.evaluation = lower_evaluation(plan)
        check_evaluation(self.evaluation, plan)
        self.stages = _stages(self.layout, devices, optimizer, dtype)
        self.workers = _workers(plan, self.stages)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the programs of all stages, several at a time."""
        ops = _ops(self.training)
        jobs = [
            job
            for key, state in self.stages.items()
            for job in _compile_jobs(state, ops[key])
        ]
        samples = self.stages[0, len(self.plan.replicas[0].stages) - 1]
        jobs.append(lambda: samples.programs.logits)
        with ThreadPoolExecutor() as pool:
            for done, _ in enumerate(pool.map(lambda job: job(), jobs), start=1):
                if progress is not None:
                    progress(done, len(jobs))

    def initialise(self, seed: int) -> None:
        """Fresh weights and optimizer state, a function of the seed alone."""
        for stage, state in self.stages.items():
            held, abstract = self.layout.stages[stage], state.updates.masters
            read = fresh_weights(self.model, held, seed)
            masters, _ = place(held, abstract, ({},) * len(abstract), read)
            self._install(state, masters, state.updates.init_opt_state(masters))

    def restore(self, read: Read) -> None:
        """State of all stages from plan-independent entries."""
        for stage, state in self.stages.items():
            abstract = state.updates.masters, state.updates.opt_state
            self._install(state, *place(self.layout.stages[stage], *abstract, read))

    def abstract_entries(self) -> Iterator[Entry]:
        """What `entries` and `restore` deal in, known before there is any state."""
        for stage, state in self.stages.items():
            abstract = state.updates.masters, state.updates.opt_state
            for run, found, _ in stage_entries(self.layout.stages[stage], *abstract):
                yield from found if run.only is None else ()

    def entries(self) -> Iterator[tuple[Entry, np.ndarray]]:
        """A host copy of the whole state, every entry once."""
        seen: set[str] = set()
        for stage, state in self.stages.items():
            if all(not group.owned for group in state.updates.groups):
                continue
            held = self.layout.stages[stage]
            for entry, value in host_values(held, state.masters, state.opt_state):
                if entry.name not in seen:
                    seen.add(entry.name)
                    yield entry, value

    def step(
        self, number: int, batch: Batch, observer: Observer | None = None
    ) -> StepResult:
        """Train on one global batch; returns once NORM is known and UPDATE enqueued."""
        step = self._step(number, batch, observer)
        self._run(self.training, step)
        return StepResult(
            step=number,
            grad_norm=gradient_norm(step.collectives, step.num_tokens),
            loss_sums=self._loss_sums(),
            num_tokens=step.num_tokens,
        )

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean cross-entropy in nats per token over global batches, no update."""
        sums, num_tokens = 0.0, 0
        for batch in batches:
            self._run(self.evaluation, self._step(0, batch, None))
            sums += _total(self._loss_sums())
            num_tokens += batch[1].size
        return sums / num_tokens

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """logits_V that follow the (last seq_len) tokens, by the first replica."""
        replica, length = self.plan.replicas[0], self.plan.seq_len
        window = list(tokens)[-length:]
        inputs_BL = np.zeros((replica.microbatch_size, length), np.int32)
        inputs_BL[0, : len(window)] = window
        states = [self.stages[0, s] for s in range(len(replica.stages))]
        x = jax.device_put(inputs_BL, states[0].programs.tokens.sharding)
        for state, after in pairwise(states):
            y = state.programs.evaluate(state.params, x)
            x = reshard(y, after.programs.inputs.sharding)
        mesh, last = states[-1].programs.mesh, states[-1]
        position = jax.device_put(np.int32(len(window) - 1), replicated(mesh))
        return np.asarray(last.programs.logits(last.params, x, position), np.float32)

    def _install(self, state: StageState, masters: object, opt_state: object) -> None:
        state.masters, state.opt_state = masters, opt_state
        copies = state.updates.copies(masters)
        state.params = state.updates.with_copies(masters, copies)

    def _step(self, number: int, batch: Batch, observer: Observer | None) -> Step:
        return Step(
            number=number,
            feed=BatchFeed(self.plan, batch),
            num_tokens=batch[1].size,
            transport=InProcess(),
            collectives=InProcessCollectives(self.layout.holders, len(self.stages)),
            clip_norm=self.clip_norm,
            observer=observer,
        )

    def _run(self, programs: Programs, step: Step) -> None:
        """Round robin: each worker enqueues until it waits for another one."""
        active = [self.workers[n].run(program, step) for n, program in programs.items()]
        while active:
            active = [run for run in active if next(run, _DONE) is not _DONE]

    def _loss_sums(self) -> tuple[jax.Array, ...]:
        return tuple(
            state.loss for state in self.stages.values() if state.programs.graph.last
        )


_DONE = object()


def _stages(
    layout: Layout,
    devices: Mapping[str, Sequence[jax.Device]],
    optimizer: optax.GradientTransformation,
    dtype: str,
) -> dict[StageKey, StageState]:
    meshes = {
        (r, s): stage_mesh(
            [devices[stage.node][i] for i in stage.devices],
            data=stage.mesh.data,
            tensor=stage.mesh.tensor,
        )
        for r, s, stage in layout.plan.stages()
    }
    states = {}
    for r, s, _ in layout.plan.stages():
        programs = _programs(layout, (r, s), meshes[r, s], dtype)
        groups = _groups(layout, (r, s), meshes)
        states[r, s] = StageState(programs, UpdatePrograms(programs, optimizer, groups))
    return states


def _programs(
    layout: Layout, key: StageKey, mesh: jax.sharding.Mesh, dtype: str
) -> StagePrograms:
    plan, held = layout.plan, layout.stages[key]
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    tied = {path: held.leaf_of(path) for path, ids in layout.tied.items() if key in ids}
    graph = StageGraph(
        runs=tuple(run.kind() for run in held.runs),
        tied=tuple(tied.items()),
        first=key[1] == 0,
        last=key[1] == len(replica.stages) - 1,
        remat=stage.remat,
        data=stage.mesh.data,
    )
    tokens_shape = (replica.microbatch_size, plan.seq_len)
    activation = _activation_shape(layout.model, tokens_shape)
    return _shared(graph, mesh, tokens_shape, activation, np.dtype(jnp.dtype(dtype)))


# a new plan finds the programs of stages that stay as they are; bounded, not for ever
_shared = lru_cache(maxsize=64)(StagePrograms)


@lru_cache(maxsize=64)
def _activation_shape(model: Model, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
    spec: ModuleSpec = model.layers[0].modules[0]
    tokens_BL = jax.ShapeDtypeStruct(tokens_shape, jnp.int32)
    params = jax.eval_shape(lambda: init_params(spec, jax.random.key(0)))
    return jax.eval_shape(lambda p, t: apply(spec, p, t)[0], params, tokens_BL).shape


def _groups(
    layout: Layout, key: StageKey, meshes: Mapping[StageKey, jax.sharding.Mesh]
) -> tuple[GradientGroup, ...]:
    """Groups of the stage; data ranks or several holders make packing necessary."""
    found = []
    for name, leaf_ids in layout.stages[key].groups.items():
        holders = layout.holders[name]
        packed = len(holders) > 1 or meshes[key].shape["data"] > 1
        rows = num_rows([meshes[holder] for holder in holders]) if packed else 0
        found.append(
            GradientGroup(
                name,
                leaf_ids,
                rows,
                owned=key == next(iter(holders)),
                shared=len(holders) > 1,
            )
        )
    return tuple(found)


def _workers(plan: Plan, stages: Mapping[StageKey, StageState]) -> dict[str, Worker]:
    neighbours = {
        key: batch_sharding(state.programs.mesh) for key, state in stages.items()
    }
    nodes = {(r, s): stage.node for r, s, stage in plan.stages()}
    return {
        node: Worker({k: stages[k] for k in stages if nodes[k] == node}, neighbours)
        for node in dict.fromkeys(nodes.values())
    }


def _ops(programs: Programs) -> dict[StageKey, list[Op]]:
    """What each stage computes, in the order of first use."""
    found: dict[StageKey, dict[Op, None]] = {}
    for program in programs.values():
        for action in program:
            found.setdefault(action.key, {})[action.op] = None
    return {key: [op for op in ops if op in COMPUTE] for key, ops in found.items()}


def _compile_jobs(state: StageState, ops: Sequence[Op]) -> list[Callable[[], object]]:
    programs, updates = state.programs, state.updates
    packs = [
        lambda group=group: programs.pack(group.leaf_ids, group.rows)
        for group in updates.groups
        if group.rows
    ]
    others = [
        lambda: programs.zeros,
        lambda: programs.evaluate,
        lambda: updates.init_opt_state,
        lambda: updates.copies,
        lambda: updates.square_sum,
        lambda: updates.run_updates,
    ]
    return [lambda: [programs.of(op) for op in ops], *others, *packs]


def _total(sums: tuple[jax.Array, ...]) -> float:
    return float(np.sum(jax.device_get(sums), dtype=np.float64))
