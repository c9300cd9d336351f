# SPDX-License-Identifier: Apache-2.0
"""Times the distinct layers of a model, and links, on the local devices.

Owns what is timed and how: the runtime's own programs on stages of one layer kind.
An inner kind is timed in a run of equal layers, as stages hold it: scanned, which takes
longer than a lone layer (a third, measured on CPU, where a scan reads its weights and
writes its residuals slice by slice). The cost of a program itself is timed separately,
with a program that has nothing to do: as the intercept of two runs it drowns in noise.

B sequences, L positions. Does not own the profile (`costs/measured/layer_profile.py`)
nor which cases are measured (`measuring.py`).
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from hetjax.costs.measured.layer_profile import LinkMeasurement, Measurement
from hetjax.mesh.axes import replicated, stage_mesh
from hetjax.mesh.reshard import reshard
from hetjax.models.model import Layer, Model, ModuleSpec
from hetjax.plans.plan import AttentionForm, Plan, Remat, Replica, Stage, StageMesh
from hetjax.runtime.execution.programs import lowered
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.state import fresh_weights, place
from hetjax.runtime.execution.updates.groups import GradientGroup

NUM_REPETITIONS = 7
_NUM_UNITS = 2  # the shortest run that is scanned
_LEAST_S = 1e-9  # replaces differences that noise makes zero or negative
_SHORT_S = 2e-3  # several calls of a shorter program are timed together,
_MOST_CALLS = 16  # at most this many
_STEADY_S = 0.1  # longer programs are called one by one for this long, without a pause
_LINK_BYTES = (1 << 16, 1 << 24)

Pass = Callable[[], Any]
Times = dict[str, float]  # seconds by pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layer kind in one configuration on one device kind; see `Measurement`."""

    device: str
    kind: str
    tensor: int = 1
    microbatch_size: int
    remat: Remat = "none"


def layer_kinds(model: Model) -> tuple[str, ...]:
    """Return the kind of each layer, such as embedding, block, block, head."""
    names: dict[tuple[ModuleSpec, ...], str] = {}
    for layer in model.layers:
        modules = _modules(layer)
        if modules not in names:
            names[modules] = _new_name(layer.name, set(names.values()))
    return tuple(names[_modules(layer)] for layer in model.layers)


class LayerBench:
    """A stage of one layer kind on some devices, which can be timed repeatedly."""

    def __init__(
        self,
        case: Case,
        model: Model,
        devices: Sequence[jax.Device],
        optimizer: optax.GradientTransformation,
        *,
        seq_len: int,
        dtype: str,
        attention: AttentionForm | None = None,
        halves: bool = False,
        num_replicas: int = 1,
    ) -> None:
        """Compile the stage's programs, fill its arrays and call each pass.

        `halves` adds the halves of the backward pass. With several replicas only the
        update of a layer that all of them hold is timed: all else is as with one.
        """
        sample = _sample(case, model, seq_len, num_replicas, attention)
        runtime = StageRuntime(
            sample.plan, sample.model, {_NODE: devices}, optimizer, dtype=dtype
        )
        self._case, self._num_units = case, sample.num_units
        self._passes = (
            _passes(runtime, sample, halves)
            if num_replicas == 1
            else _shared_update(runtime, sample)
        )
        for call in self._passes.values():
            _time(call)  # the first call may take longer
        self._num_calls = {
            name: min(_MOST_CALLS, 1 + int(_SHORT_S / _time(call)))
            for name, call in self._passes.items()
        }

    def time_once(self) -> Times:
        """Return the seconds by pass of one repetition of all passes."""
        return {
            name: _time(call, self._num_calls[name])
            if self._num_calls[name] > 1
            else _steady_s(call)
            for name, call in self._passes.items()
        }

    def measurement(
        self, repetitions: Sequence[Times], program_s: float
    ) -> Measurement:
        """Return one layer's median times, without the cost of a program."""
        layer_s = self._layer_s(repetitions, program_s)
        forward_s = layer_s["forward"]
        if "fused" in layer_s:
            backward_s = max(layer_s["fused"] - forward_s, _LEAST_S)
        else:
            backward_s = layer_s["backward"]
        return Measurement(
            **asdict(self._case),
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=layer_s["update"],
            input_gradient_s=layer_s.get("input_gradient"),
            weight_gradient_s=layer_s.get("weight_gradient"),
        )

    def update_s(self, repetitions: Sequence[Times], program_s: float) -> float:
        """Return the median of one layer's update, without the cost of a program."""
        return self._layer_s(repetitions, program_s)["update"]

    def _layer_s(self, repetitions: Sequence[Times], program_s: float) -> Times:
        return {
            name: max(median(r[name] for r in repetitions) - program_s, _LEAST_S)
            / self._num_units
            for name in self._passes
        }


def program_seconds(device: jax.Device) -> float:
    """Return the seconds of a program with a layer's arrays and almost no work."""
    sharding = replicated(stage_mesh([device], data=1, tensor=1))
    abstract = [jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)] * 12
    arrays = [jax.device_put(np.zeros(8, np.float32), sharding) for _ in abstract]
    program = lowered(lambda given: sum(given), (abstract,), out=sharding).compile()
    _time(lambda: program(arrays))
    repetitions = range(NUM_REPETITIONS)
    return median(_time(lambda: program(arrays), _MOST_CALLS) for _ in repetitions)


def measure_link(
    source: jax.Device, target: jax.Device, between: tuple[str, str]
) -> LinkMeasurement:
    """Time messages of two sizes; derive bandwidth and latency from them."""
    small, large = (_message_s(source, target, size) for size in _LINK_BYTES)
    more = _LINK_BYTES[1] - _LINK_BYTES[0]
    per_byte_s = max(large - small, _LEAST_S) / more
    latency_s = max(small - per_byte_s * _LINK_BYTES[0], 0.0)
    return LinkMeasurement(
        between=between,
        bandwidth_gbit_per_s=8e-9 / per_byte_s,
        latency_ms=1e3 * latency_s,
    )


_NODE = "here"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A model and a plan in which stage `stage` holds just one layer kind."""

    model: Model
    plan: Plan
    stage: int
    num_units: int


def _sample(
    case: Case,
    model: Model,
    seq_len: int,
    num_replicas: int,
    attention: AttentionForm | None,
) -> _Sample:
    at = layer_kinds(model).index(case.kind)
    last = len(model.layers) - 1
    is_inner = 0 < at < last
    copies = [_copy(model.layers[at], i) for i in range(_NUM_UNITS * is_inner)]
    layers = (model.layers[0], *copies, model.layers[last])
    cuts = sorted({0, 1, len(layers) - 1, len(layers)})
    stages = tuple(
        Stage(
            node=_NODE,
            devices=tuple(range(case.tensor)),
            mesh=StageMesh(tensor=case.tensor),
            layers=layers_held,
            remat=case.remat,
            launch_ahead=1,
            attention=attention,
        )
        for layers_held in pairwise(cuts)
    )
    size = case.microbatch_size
    replica = Replica(num_microbatches=1, microbatch_size=size, stages=stages)
    return _Sample(
        model=replace(model, layers=layers),
        plan=Plan(
            model=model.name,
            seq_len=seq_len,
            global_batch=size * num_replicas,
            replicas=(replica,) * num_replicas,
        ),
        stage=1 if at > 0 else 0,
        num_units=len(copies) or 1,
    )


def _copy(layer: Layer, number: int) -> Layer:
    """Return a copy of the layer whose blocks have names that contain `number`."""
    modules = tuple(
        replace(module, path=f"{module.block}-{number}.{module.name}")
        for module in layer.modules
    )
    return Layer(f"{layer.name}-{number}", modules)


def _modules(layer: Layer) -> tuple[ModuleSpec, ...]:
    return tuple(replace(module, path=module.name) for module in layer.modules)


def _new_name(layer: str, taken: set[str]) -> str:
    """Return the layer's name without numbers, such as `block` for `block_003`.

    If that name is taken, return it with a number appended.
    """
    name = re.sub(r"[_-]?\d+", "", layer) or "layer"
    number = 2
    new = name
    while new in taken:
        new, number = f"{name}-{number}", number + 1
    return new


def _passes(runtime: StageRuntime, sample: _Sample, halves: bool) -> Mapping[str, Pass]:
    """Return the passes of such a stage by name.

    A last stage has `fused` in place of `backward`.
    """
    key = (0, sample.stage)
    state = runtime.stages[key]
    programs = state.programs
    _install(runtime, sample.model, key)
    rng = np.random.default_rng(0)
    tokens_BL = rng.integers(0, sample.model.vocab_size, programs.tokens_shape)
    targets = _put(tokens_BL, programs.tokens)
    first, last = programs.function.first, programs.function.last
    stream = rng.standard_normal(programs.activation_shape, np.float32)
    x = targets if first else _put(stream, programs.outputs)
    dy = None if last else _put(stream, programs.outputs)
    scale = _put(np.float32(1), programs.scalar) if programs.is_scaled else None

    def forward() -> Any:
        if not last:
            return programs.forward(state.params, x)
        made = programs.forward(state.params, x, targets, state.loss)
        state.loss = made[0]
        return made

    def backward() -> Any:
        given = state.params, x, saved, dy, scale, state.acc
        state.acc, dx = programs.backward(*given)
        return state.acc, dx

    def fused() -> Any:
        given = state.params, x, targets, scale, state.acc, state.loss
        state.acc, state.loss, dx = programs.fused(*given)
        return state.acc, state.loss, dx

    def input_gradient() -> Any:
        return programs.input_gradient(state.params, x, saved, dy, scale)

    def weight_gradient() -> Any:
        given = state.params, half, state.acc
        state.acc, done = programs.weight_gradient(*given)
        return state.acc, done

    saved = forward()[1] if halves or not last else None
    passes: dict[str, Pass] = {"forward": forward}
    passes |= {"fused": fused} if last else {"backward": backward}
    if halves:
        half = programs.kept((x, saved, dy, scale), input_gradient()[1])
        passes |= {"input_gradient": input_gradient, "weight_gradient": weight_gradient}
    return passes | {"update": lambda: _update(state)}


def _shared_update(runtime: StageRuntime, sample: _Sample) -> Mapping[str, Pass]:
    key = (0, sample.stage)
    _install(runtime, sample.model, key)
    return {"update": lambda: _update(runtime.stages[key])}


def _install(runtime: StageRuntime, model: Model, key: tuple[int, int]) -> None:
    """Give this stage alone fresh weights, optimizer state and zero sums."""
    state, held = runtime.stages[key], runtime.partition.stages[key]
    read = fresh_weights(model, held, 0)
    state.masters, state.frozen = (
        place(held, abstract, ({},) * len(abstract), read)[0]
        for abstract in (state.updates.masters, state.updates.frozen)
    )
    state.opt_state = state.updates.init_opt_state(state.masters)
    copies = state.updates.copied(state.masters)
    state.params = state.updates.with_copies(state.masters, copies, state.frozen)
    state.acc, state.loss = state.programs.zeros()


def _update(state: StageState) -> Any:
    """Do what a stage does once per step: norm, update, zero sums for the next step."""
    updates = state.updates
    gradients = tuple(_gradient(state, group) for group in updates.groups)
    state.acc = None
    squares = updates.square_sum(gradients)
    scale = _put(np.float32(1e-6), state.programs.scalar)
    given = state.masters, state.opt_state, gradients, scale
    state.masters, state.opt_state, copies = updates.update(*given)
    state.params = updates.with_copies(state.masters, copies, state.frozen)
    del gradients, given  # before new sums are allocated
    state.acc, state.loss = state.programs.zeros()
    return squares, state.params, state.opt_state, state.acc


def _gradient(state: StageState, group: GradientGroup) -> Any:
    leaves = [state.acc[run][leaf] for run, leaf in group.leaf_ids]
    if not group.rows:
        return leaves
    return state.programs.pack(group.leaf_ids, group.rows)(leaves)


def _put(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.asarray(value).astype(like.dtype), like.sharding)


def _message_s(source: jax.Device, target: jax.Device, num_bytes: int) -> float:
    """Return the fastest of several tries: noise can be most of so short a time."""
    message = jax.device_put(np.zeros(num_bytes, np.uint8), source)
    sharding = SingleDeviceSharding(target)
    _time(lambda: reshard(message, sharding))
    repetitions = range(NUM_REPETITIONS)
    return min(_time(lambda: reshard(message, sharding)) for _ in repetitions)


def _time(call: Pass, num_calls: int = 1) -> float:
    """Return seconds per call, after all calls have completed."""
    start_s = time.perf_counter()
    made = None
    for _ in range(num_calls):
        made = call()
    jax.block_until_ready(made)
    return (time.perf_counter() - start_s) / num_calls


def _steady_s(call: Pass) -> float:
    """Return seconds per call on a device that is kept busy, as it is in training.

    An idle device may be faster for a while: by its clocks, or by a CPU quota.
    """
    last_s = _time(call)
    if last_s > _STEADY_S:
        return last_s
    times_s: list[float] = []
    while sum(times_s) < _STEADY_S:
        times_s.append(_time(call))
    return sum(times_s) / len(times_s)
