# SPDX-License-Identifier: Apache-2.0
"""Builds the stages that a process holds: their programs and their state.

Owns building the stages of a plan for the nodes whose devices are here, compiling, and
conversion of state to and from plan-independent entries. Does not own steps
(`stage_runtime.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hetjax.checkpoint.format import Entry
from hetjax.mesh.axes import stage_mesh
from hetjax.mesh.multihost import is_member, leads, value_here
from hetjax.models.model import Model, ModuleSpec, abstract_params, apply
from hetjax.plans.plan import Plan
from hetjax.plans.rerouting import with_microbatches
from hetjax.runtime.execution.checking.check_programs import CheckPrograms
from hetjax.runtime.execution.checking.checks import StageNumbers
from hetjax.runtime.execution.checking.digests import whole
from hetjax.runtime.execution.compiled_bytes import made_bytes, temp_bytes
from hetjax.runtime.execution.executor import check_runnable
from hetjax.runtime.execution.programs import StagePrograms
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.state import (
    Read,
    Weights,
    fresh_weights,
    given_weights,
    held_values,
    host_values,
    place,
    stage_entries,
    weights_as_held,
)
from hetjax.runtime.execution.updates.groups import groups_of, rounds_alike
from hetjax.runtime.execution.updates.offload import host_mesh
from hetjax.runtime.execution.updates.update import UpdatePrograms
from hetjax.schedule.programs.action import COMPUTE, Op, Programs, StageKey
from hetjax.schedule.programs.check import check, check_evaluation
from hetjax.schedule.programs.lower import lower, lower_evaluation
from hetjax.stage.function import StageFunction
from hetjax.stage.partition import NamedStack, PlanPartition


class Stages:
    """The plan's stages on the nodes of `devices`; `stages` has them by key.

    Devices may belong to other processes, too: stages without a device here are left
    out. `training` and `evaluation` are the programs of all nodes of the plan. `dtype`
    is the precision of stages that give none. If one stage computes in float16, the
    loss is scaled for all: `is_scaled`. `weights`, if given, are the first weights.
    `kinds` are the device kinds of the plan's nodes, by default `CPU`. If
    `deterministic`, GPUs reproduce the same bits, but take longer.

    After `reroute`, stages of idle replicas leave `stages`, but keep their state.
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        devices: Mapping[str, Sequence[jax.Device]],
        optimizer: optax.GradientTransformation,
        *,
        dtype: str = "float32",
        weights: Weights | None = None,
        kinds: Mapping[str, str] | None = None,
        deterministic: bool = False,
    ) -> None:
        self._weights, self.model = weights, model
        self._lay_out(plan)
        self.is_scaled = needs_scaling(_dtypes(plan, dtype))
        programs = partial(
            _programs,
            self.partition,
            dtypes=_dtypes(plan, dtype),
            is_scaled=self.is_scaled,
            deterministic=deterministic,
        )
        self.stages = _stages(self.partition, devices, optimizer, programs, kinds or {})
        self._built_for, self._built = plan, self.stages
        self._parameters = self.partition.stages
        self._behind = frozenset[StageKey]()  # idle while others were updated

    def _lay_out(self, plan: Plan) -> None:
        self.plan, self.partition = plan, PlanPartition(plan, self.model)
        self.training = lower(plan, self.partition.tied)
        check(self.training, plan, self.partition.tied)
        check_runnable(self.training)
        self.evaluation = lower_evaluation(plan)
        check_evaluation(self.evaluation, plan)

    def reroute(self, num_microbatches: Sequence[int]) -> None:
        """Give each replica another number of microbatches (`plans/rerouting.py`), in
        the plan that the stages were built for."""
        self._lay_out(with_microbatches(self._built_for, num_microbatches))
        left = self.partition.stages
        self.stages = {key: state for key, state in self._built.items() if key in left}

    @property
    def is_behind(self) -> bool:
        """Whether one of the stages was idle while others were updated."""
        return not self._behind.isdisjoint(self.stages)

    def compile(
        self, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> None:
        """Compile the programs of all stages, several at a time."""
        ops = _ops(self.training)
        jobs = [
            job
            for key, state in self.stages.items()
            for job in _compile_jobs(state, ops[key])
        ]
        first = self.plan.first_replica
        samples = self.stages.get((first, len(self.plan.replicas[first].stages) - 1))
        if samples is not None:
            jobs.append(lambda: samples.programs.logits)
        if not jobs:
            progress(0, 0)
        with ThreadPoolExecutor() as pool:
            for done, _ in enumerate(pool.map(lambda job: job(), jobs), start=1):
                progress(done, len(jobs))

    def temp_bytes(self) -> dict[StageKey, dict[str, int]]:
        """Return the temporary bytes of every stage's compiled passes, as XLA reports.

        Also those of its update (UPDATE) and, with the packed rows, of packing
        gradients (PACK). Leaves out programs of which the backend reports nothing, and
        updates that run on the host.
        """
        ops = _ops(self.training)
        return {
            key: {
                name: max(sizes)
                for name, said in _said_bytes(state, ops[key])
                if (sizes := [size for size in said if size is not None])
            }
            for key, state in self.stages.items()
        }

    def initialise(self, seed: int) -> None:
        """Set fresh optimizer state and the first weights, which are given or a
        function of the seed alone."""
        for stage, state in self.stages.items():
            held, abstract = self.partition.stages[stage], state.updates.masters
            if self._weights is None:
                read = fresh_weights(self.model, held, seed)
            else:
                read = given_weights(self.model, self._weights, seed)
            masters, _ = place(held, abstract, ({},) * len(abstract), read)
            opt_state = state.updates.init_opt_state(masters)
            self._install(state, masters, opt_state, self._frozen(stage, read))
        self._behind = self._idle

    def restore(self, read: Read) -> None:
        """Set the state of all stages from plan-independent entries.

        Frozen weights are no state: they are read again from their source.
        """
        for stage, state in self.stages.items():
            abstract = state.updates.masters, state.updates.opt_state
            state.clear()  # otherwise devices would hold it twice
            held = self._parameters[stage]
            masters, opt_state = place(held, *abstract, read)
            read_first = weights_as_held(self.model, self._first_weights)
            frozen = self._frozen(stage, read_first)
            self._install(state, masters, opt_state, frozen)
        self._behind = self._idle

    def _first_weights(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a frozen weight, as the run began with it."""
        assert self._weights is not None, f"no source is known for {path}"
        return self._weights(path, shape)

    def _frozen(self, stage: StageKey, read: Read) -> Any:
        """Return a stage's frozen weights on its devices, as its programs read them."""
        held, abstract = self.partition.stages[stage], self.stages[stage].updates.frozen
        return place(held, abstract, ({},) * len(abstract), read)[0]

    def entries(self) -> Iterator[tuple[Entry, np.ndarray]]:
        """Yield a host copy of the state that this worker saves, every entry once.

        All workers of a plan together yield the whole state: stages that hold the same
        parameters share them out among them (`PlanPartition.savers`).
        """
        for stage, state in self.stages.items():
            held, wanted = self.partition.stages[stage], partial(self._saves, stage)
            yield from host_values(held, state.masters, state.opt_state, wanted)

    def held(self) -> Iterator[tuple[Entry, Callable[[], np.ndarray]]]:
        """Yield all state that is here, also what others save, copied on request.

        Leaves out stages that are behind.
        """
        for stage, state in self._built.items():
            if stage not in self._behind:
                held = self._parameters[stage]
                yield from held_values(held, state.masters, state.opt_state)

    def numbers(self, with_digests: bool) -> Iterator[StageNumbers]:
        """Yield the findings on the weights of each stage that this worker leads.

        Runs a program of all members of a stage: all of them have to call this.
        """
        for stage, state in self.stages.items():
            is_finite = state.checks.is_finite(state.masters)
            groups, digests = (), ()
            if with_digests:
                groups, digests = state.checks.digests(state.masters)
            found = [d for some in digests for d in whole(value_here(some))]
            numbers = StageNumbers(
                stage=stage,
                is_finite=bool(value_here(is_finite)),
                digests=tuple(zip(groups, found, strict=True)),
            )
            if leads(state.programs.mesh):
                yield numbers

    def skip(self) -> None:
        """Continue to the next step with the weights unchanged."""
        for state in self.stages.values():
            state.skip()
        self._leave_idle_behind()

    def _saves(self, stage: StageKey, named: NamedStack, unit: int) -> bool:
        mine = named.stack.only is None
        return mine and self.partition.savers.get(named.name_of(unit)) == stage

    def needed(self) -> Iterator[Entry]:
        """Yield the entries that `restore` reads; needs no state."""
        for stage, state in self.stages.items():
            held, updates = self.partition.stages[stage], state.updates
            for _, found, _ in stage_entries(held, updates.masters, updates.opt_state):
                yield from found

    @property
    def saves(self) -> bool:
        """Whether `entries` yields anything."""
        savers = set(self.partition.savers.values())
        return any(
            stage in savers and leads(state.programs.mesh)
            for stage, state in self.stages.items()
        )

    def _leave_idle_behind(self) -> None:
        """Record that a step was committed without the idle stages."""
        self._behind |= self._idle

    @property
    def _idle(self) -> frozenset[StageKey]:
        return frozenset(self._built.keys() - self.stages.keys())

    def _install(
        self, state: StageState, masters: object, opt_state: object, frozen: object
    ) -> None:
        state.masters, state.opt_state, state.frozen = masters, opt_state, frozen
        copies = state.updates.copied(masters)
        state.params = state.updates.with_copies(masters, copies, frozen)
        state.evaluated = state.is_finite = None


def _stages(
    partition: PlanPartition,
    devices: Mapping[str, Sequence[jax.Device]],
    optimizer: optax.GradientTransformation,
    programs_of: Callable[[StageKey, Mesh], StagePrograms],
    kinds: Mapping[str, str],
) -> dict[StageKey, StageState]:
    states = {}
    for r, s, stage in partition.plan.stages():
        if stage.node not in devices:
            continue
        mesh = stage_mesh(
            [devices[stage.node][i] for i in stage.devices],
            data=stage.mesh.data,
            tensor=stage.mesh.tensor,
        )
        if not is_member(mesh):
            continue
        programs = programs_of((r, s), mesh)
        host = None if stage.offload == "none" else host_mesh()
        groups = groups_of(partition, (r, s), partial(rounds_alike, optimizer, kinds))
        updates = _shared_updates(programs, optimizer, groups, host)
        states[r, s] = StageState(programs, updates, _shared_checks(updates))
    return states


def _programs(
    partition: PlanPartition,
    key: StageKey,
    mesh: Mesh,
    *,
    dtypes: Mapping[StageKey, str],
    is_scaled: bool,
    deterministic: bool,
) -> StagePrograms:
    plan, held = partition.plan, partition.stages[key]
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    function = StageFunction(
        held.kind,
        stage.remat,
        data=stage.mesh.data,
        tensor=stage.mesh.tensor,
        attention=stage.attention,
        packed=plan.packed,
    )
    tokens_shape = (replica.microbatch_size, plan.seq_len)
    activation = _activation_shape(partition.model, tokens_shape)
    r, s = key
    own, before, after = (
        np.dtype(jnp.dtype(dtypes.get((r, at), dtypes[key])))
        for at in (s, s - 1, s + 1)
    )
    dtypes_here = own, before, after
    flags = is_scaled, deterministic
    return _shared(function, mesh, tokens_shape, activation, *dtypes_here, *flags)


def needs_scaling(dtypes: Mapping[StageKey, str]) -> bool:
    """Return whether gradients would underflow: those of float16 do."""
    return "float16" in dtypes.values()


def _dtypes(plan: Plan, otherwise: str) -> dict[StageKey, str]:
    return {(r, s): stage.precision or otherwise for r, s, stage in plan.stages()}


# A new plan reuses the programs of unchanged stages, and a plan that was compiled ahead
# reuses all. The caches are small: a process of Linux may have 65,530 mappings, and an
# update for a CPU can need 500.
_shared = lru_cache(maxsize=32)(StagePrograms)
_shared_updates = lru_cache(maxsize=32)(UpdatePrograms)
_shared_checks = lru_cache(maxsize=32)(CheckPrograms)


@lru_cache(maxsize=64)
def _activation_shape(model: Model, tokens_shape: tuple[int, int]) -> tuple[int, ...]:
    spec: ModuleSpec = model.layers[0].modules[0]
    tokens_BL = jax.ShapeDtypeStruct(tokens_shape, jnp.int32)
    params = {
        name: jax.ShapeDtypeStruct(param.shape, param.held_in(jnp.float32))
        for name, param in abstract_params(spec).items()
    }
    return jax.eval_shape(lambda p, t: apply(spec, p, t)[0], params, tokens_BL).shape


def _ops(programs: Programs) -> dict[StageKey, list[Op]]:
    """Return what each stage computes, in the order of first use."""
    found: dict[StageKey, dict[Op, None]] = {}
    for program in programs.values():
        for action in program:
            found.setdefault(action.key, {})[action.op] = None
    return {key: [op for op in ops if op in COMPUTE] for key, ops in found.items()}


def _said_bytes(
    state: StageState, ops: Sequence[Op]
) -> Iterator[tuple[str, Iterable[int | None]]]:
    """Yield the compiler's figures by name; programs of one name run one at a time."""
    programs, updates = state.programs, state.updates
    for op in ops:
        yield op.name, [temp_bytes(programs.program(op))]
    if updates.host is None:
        yield "UPDATE", map(temp_bytes, updates.stack_updates)
    packs = [programs.pack(g.leaf_ids, g.rows) for g in updates.groups if g.rows]
    yield "PACK", map(made_bytes, packs)


def _compile_jobs(state: StageState, ops: Sequence[Op]) -> list[Callable[[], object]]:
    programs, updates, checks = state.programs, state.updates, state.checks
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
        lambda: updates.stack_updates,
        lambda: updates.evaluates_elsewhere and updates.evaluation_weights,
        lambda: checks.is_finite,
        lambda: checks.weight_digests,
        lambda: checks.gradient_digests,
    ]
    return [lambda: [programs.program(op) for op in ops], *others, *packs]
