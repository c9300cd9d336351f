# SPDX-License-Identifier: Apache-2.0
"""Maps the persistent state of a stage to names by layer, which any plan can find.

Owns the map between a stage's (stacked, sharded) leaves and plan-independent entries:
one per parameter or optimizer leaf of one module. Does not own files
(`hetjax/checkpoint/`) nor the programs that change state (`update.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from hetjax.checkpoint.format import WEIGHTS, Entry
from hetjax.mesh.axes import slices
from hetjax.mesh.host_copies import host_copies, start_copy
from hetjax.mesh.multihost import to_mesh, whole_value
from hetjax.models.linear.quantised import SCALES, quantised_on_host
from hetjax.models.model import (
    Model,
    ModuleSpec,
    init_adapters,
    init_params,
    quantised_weights,
)
from hetjax.stage.partition import NamedStack, StageParameters

Read = Callable[["Entry"], np.ndarray]  # whole value of an entry
# fp32 value of the parameter with this full path and shape, not quantised
Weights = Callable[[str, tuple[int, ...]], np.ndarray]
# the parameters of a module that are drawn with a key
Init = Callable[[ModuleSpec, jax.Array], dict[str, Any]]


def entries(named: NamedStack, leaf_path: tuple[Any, ...], leaf: Any) -> list[Entry]:
    """Return the entries of one leaf of a stack's (masters, opt_state), one per unit.

    `leaf_path` is the key path within that pair: masters are `(0, leaf name)`,
    optimizer leaves `(1, module name, ...)`.
    """
    shape = tuple(leaf.shape[1:]) if named.stack.stacked else tuple(leaf.shape)
    parameter = named.stack.leaves().get(leaf_path[-1])
    like = parameter is not None and parameter.shape == shape
    cut = slices(shape, parameter.logical) if parameter and like else (0, 1)
    return [
        Entry(_name(named, leaf_path, unit, like), shape, np.dtype(leaf.dtype), cut)
        for unit in range(named.stack.num_units)
    ]


def stage_entries(
    held: StageParameters, masters: Any, opt_state: Any
) -> Iterator[tuple[NamedStack, list[Entry], Any]]:
    """Yield every leaf of a stage's state with its stack and entries, in tree order."""
    for named, master, state in zip(held.stacks, masters, opt_state, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path((master, state)):
            yield named, entries(named, tuple(map(_key, path)), leaf), leaf


def host_values(
    held: StageParameters,
    masters: Any,
    opt_state: Any,
    wanted: Callable[[NamedStack, int], bool],
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Yield copies of the entries of those units that are wanted.

    If a stage spans processes, only the leading one gets them, but all have to call
    this.
    """
    kept = [
        (named, found, leaf)
        for named, found, leaf in stage_entries(held, masters, opt_state)
        if any(wanted(named, unit) for unit in range(len(found)))
    ]
    copies = host_copies(leaf for *_, leaf in kept if leaf.is_fully_addressable)
    for named, found, leaf in kept:
        value = next(copies) if leaf.is_fully_addressable else whole_value(leaf)
        if value is None:
            continue
        for unit, entry in enumerate(found):
            if wanted(named, unit):
                yield entry, value[unit] if named.stack.stacked else value


def held_values(
    held: StageParameters, masters: Any, opt_state: Any
) -> Iterator[tuple[Entry, Callable[[], np.ndarray]]]:
    """Yield every entry with a function that copies it to the host.

    The units of a leaf are copied together. A leaf that spans processes is copied now,
    by all of them, and only the leading one yields it.
    """
    for named, found, leaf in stage_entries(held, masters, opt_state):
        whole = _copied_later(leaf)
        if whole is None:
            continue
        for unit, entry in enumerate(found):
            yield entry, partial(_unit, whole, unit) if named.stack.stacked else whole


def _copied_later(leaf: jax.Array) -> Callable[[], np.ndarray] | None:
    if leaf.is_fully_addressable:
        return cache(lambda: np.asarray(start_copy(leaf)))
    value = whole_value(leaf)
    return None if value is None else lambda: value


def _unit(whole: Callable[[], np.ndarray], unit: int) -> np.ndarray:
    return whole()[unit]


def fresh_weights(model: Model, held: StageParameters, seed: int) -> Read:
    """Return the initial weights of the modules that the stage holds.

    They are drawn on the host's CPU, whatever the stage runs on, from the seed and the
    module's index in the model. So replicas on unlike devices start bit-equal.
    """
    values = _all_drawn(model, held, seed)
    return weights_as_held(model, lambda path, shape: values[path])


def _all_drawn(model: Model, held: StageParameters, seed: int) -> dict[str, np.ndarray]:
    """Return the drawn parameters by path."""
    number = {module.path: i for i, module in enumerate(model.modules)}
    modules = {m.path: m for named in held.stacks for m in named.modules()}
    of_kind: dict[Any, list[str]] = {}
    for path, spec in modules.items():
        of_kind.setdefault(replace(spec, path=""), []).append(path)

    def drawn(kind: ModuleSpec, paths: Sequence[str]) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for path in paths:
            params = _drawn(init_params, kind, seed, number[path])
            values |= {f"{path}.{k}": v for k, v in params.items()}
        return values

    with ThreadPoolExecutor() as pool:  # each kind is a program to compile
        of_kinds = pool.map(drawn, of_kind.keys(), of_kind.values())
        return {name: value for part in of_kinds for name, value in part.items()}


def given_weights(model: Model, weights: Weights, seed: int) -> Read:
    """Return initial weights that come from elsewhere.

    Adapters have none there; they are drawn as `fresh_weights` draws them.
    """
    adapters = _Drawn(model, seed, init_adapters)
    names = {
        f"{spec.path}.{name}"
        for spec in model.modules
        for adapter in spec.adapters
        for name in adapter.names
    }

    def read(path: str, shape: tuple[int, ...]) -> np.ndarray:
        return (adapters if path in names else weights)(path, shape)

    return weights_as_held(model, read)


def weights_as_held(model: Model, weights: Weights) -> Read:
    """Return weights as a stage holds them: frozen ones quantised if the spec says so.

    Each holder reads and quantises a weight once. Only the scales of one leaf are kept
    until they are read.
    """
    specs = {spec.path: spec for spec in model.modules}
    kept: dict[str, np.ndarray] = {}

    def read(entry: Entry) -> np.ndarray:
        path = entry.name.removeprefix(WEIGHTS)
        if path in kept:
            return kept.pop(path)
        module = next(m for m in _prefixes(path) if m in specs)
        form, own = specs[module].frozen_as, quantised_weights(specs[module])
        name = path.removeprefix(f"{module}.").removesuffix(SCALES)
        if form is None or name not in own:
            return weights(path, entry.shape)
        whole, num_inputs = own[name], own[name].num_inputs
        assert num_inputs is not None, path
        codes, scales = quantised_on_host(
            form, weights(f"{module}.{name}", whole.shape), num_inputs
        )
        kept[f"{module}.{name}"], kept[f"{module}.{name}{SCALES}"] = codes, scales
        return kept.pop(path)

    return read


def drawn_weights(model: Model, seed: int) -> Weights:
    """Return the weights of `fresh_weights`, for any module at any time."""
    return _Drawn(model, seed, init_params)


class _Drawn:
    """Parameters by path, drawn by a function of module and key.

    Keeps those of the module that was requested last.
    """

    def __init__(self, model: Model, seed: int, init: Init) -> None:
        self._seed, self._init = seed, init
        self._specs = {spec.path: (at, spec) for at, spec in enumerate(model.modules)}
        self._last: tuple[str, dict[str, np.ndarray]] = "", {}

    def __call__(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        module = next(m for m in _prefixes(path) if m in self._specs)
        if self._last[0] != module:
            number, spec = self._specs[module]
            kind = replace(spec, path="")
            self._last = module, _drawn(self._init, kind, self._seed, number)
        return self._last[1][path.removeprefix(f"{module}.")]


def _prefixes(path: str) -> list[str]:
    """Return the possible module paths in a parameter's full path."""
    words = path.split(".")
    return [".".join(words[:2]), words[0]]


def _drawn(
    init: Init, kind: ModuleSpec, seed: int, number: int
) -> dict[str, np.ndarray]:
    """Return a module's initial parameters, drawn on the host's CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        key = jax.random.fold_in(jax.random.key(seed), number)
        params = _initialiser(init, kind)(key)
    return {name: np.asarray(value) for name, value in params.items()}


@cache
def _initialiser(
    init: Init, kind: ModuleSpec
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    return jax.jit(partial(init, kind))


def place(held: StageParameters, masters: Any, opt_state: Any, read: Read) -> Any:
    """Return (masters, opt_state) on devices, from entries; arguments are abstract."""
    leaves = [
        to_mesh(_assembled(named, found, read), leaf.sharding)
        for named, found, leaf in stage_entries(held, masters, opt_state)
    ]
    pairs = list(zip(masters, opt_state, strict=True))
    placed = jax.tree.unflatten(jax.tree.structure(pairs), leaves)
    return tuple(m for m, _ in placed), tuple(s for _, s in placed)


def _assembled(named: NamedStack, found: list[Entry], read: Read) -> np.ndarray:
    values = [read(entry).astype(entry.dtype, copy=False) for entry in found]
    return np.stack(values) if named.stack.stacked else values[0]


def _name(named: NamedStack, path: tuple[Any, ...], unit: int, like: bool) -> str:
    if path[0] == 0:
        return f"params.{named.path(path[1], unit)}"
    _, module, *middle = path
    if like:
        return ".".join(["opt", *map(str, middle[:-1]), named.path(middle[-1], unit)])
    whole = named.path(f"{module}.", unit).removesuffix(".")
    return ".".join(["opt", *map(str, middle), whole])


def _key(entry: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)
