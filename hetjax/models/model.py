# SPDX-License-Identifier: Apache-2.0
"""Defines a model: an ordered list of layers, each a list of NNX modules.

Owns the protocol, its pure-function view (`abstract_params`, `init_params`, `apply`)
and counts of parameters. Does not own any architecture (`decoders.py`), sharding
(`mesh/`) nor FLOPs, times and memory (`costs/`).

The protocol of a module class `C` used in a `ModuleSpec`:

* `C(config, rngs=nnx.Rngs)` makes fp32 `nnx.Param`s, each with `logical=(...)`: one
  logical axis name or None per dim (names and rules: `hetjax/mesh/axes.py`);
* the first module is called with tokens_BL (int32) and returns the residual stream;
  inner modules map it to the same shape and dtype; the last is called with
  (x_BLD, targets_BL), returns the summed cross-entropy (fp32 scalar), and also has
  `logits(x_BLD) -> logits_BLV`;
* parameters arrive in the compute dtype: modules compute in the dtype they get;
* paths are `name` or `block.name`, each unique; modules of one block scan together;
* a module may hold one `AuxLoss` variable. Its call sets the variable to an auxiliary
  loss summed over the microbatch's tokens, coefficient included;
* a linear weight may declare the number of its leading dims that are inputs, as in
  `num_inputs=1`. It may then have an adapter and be held quantised, if the module
  multiplies by it with `linear.adapters.linear`. A stack of expert weights
  (`of_experts=True`) has no adapter;
* where sequences are packed, a module whose call also takes `documents_BL` gets the
  document number of each position (int32; 0: padding). A module in which positions see
  each other separates documents by it; losses leave padding out;
* `hetjax/serving/` can continue a text token by token if each module but the last is
  `PositionWise` or `Continuing`.
"""

import inspect
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.configs import FrozenForm
from hetjax.models.linear.adapters import (
    Adapter,
    Factors,
    Held,
    factor_dims,
    first_factors,
)
from hetjax.models.linear.quantised import DTYPES, SCALES, Quantised, quantised_shapes

_ADAPTERS = 2**31 - 1  # folded into the random keys of adapters

Params = dict[str, Any]  # dotted parameter name within its module -> array


class AuxLoss(nnx.Variable):
    """A token-summed auxiliary loss that a module sets when it is called."""


class PositionWise(nnx.Module):
    """A module whose output at a position depends on the input there alone."""


@runtime_checkable
class Continuing(Protocol):
    """A module that can continue a text, as it keeps state of earlier positions."""

    def keeps(self, num_positions: int) -> Any:
        """Return arrays with room for the state of one text of so many positions."""
        ...

    def continued(self, x: jax.Array, kept: Any, start: jax.Array) -> tuple[Any, Any]:
        """Return the output for the positions from `start` on, and the new state."""
        ...


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One NNX module: the path that keys its state, and how to build it.

    `tied` maps an own parameter name to the full path of the parameter that it shares,
    e.g. `(("table", "embedding.table"),)`; the owner must be in layer 0. Own parameters
    that are `frozen` keep their initial values; `adapters` add parameters. If
    `frozen_as` is given, frozen linear weights are held as codes and scales.
    """

    path: str
    cls: type
    config: Hashable
    tied: tuple[tuple[str, str], ...] = ()
    frozen: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    frozen_as: FrozenForm | None = None

    @property
    def unquantised(self) -> "ModuleSpec":
        """The same module with its frozen weights as they are before quantisation."""
        return replace(self, frozen_as=None)

    @property
    def name(self) -> str:
        """The last part of the path: equal for the same module of equal layers."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The first part of the path: modules that scan together share it."""
        return self.path.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Layer:
    """The unit that is planned, synchronised and checkpointed."""

    name: str
    modules: tuple[ModuleSpec, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Layer 0 = embedding, then the blocks, last = head with the final norm."""

    name: str
    layers: tuple[Layer, ...]
    vocab_size: int
    max_seq_len: int

    def __post_init__(self) -> None:
        paths = [module.path for module in self.modules]
        for path in paths:
            if path.count(".") > 1 or not all(path.split(".")):
                raise BadInput(
                    got=f"model {self.name}: module path {path!r}",
                    allowed="one name, or two joined by a dot: block.module",
                    fix="name it like `embedding` or `block_003.attention`",
                )
            if paths.count(path) > 1:
                raise BadInput(
                    got=f"model {self.name}: module path {path!r} twice",
                    allowed="a unique path for every module",
                    fix="number the blocks, like `block_003.attention`",
                )

    def __hash__(self) -> int:
        """Hash few fields, which is fast: models are keys of many caches."""
        return hash((self.name, len(self.layers), self.vocab_size, self.max_seq_len))

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        return tuple(m for layer in self.layers for m in layer.modules)


@dataclass(frozen=True, slots=True)
class AbstractParam:
    """Shape and logical axes of one parameter (fp32 as master weight).

    A linear weight also has the number of its leading dims that are inputs; in a stack
    of expert weights the first of these is the expert. A parameter that is not
    `trained` has neither master weight nor gradient. Only codes and scales have a
    `dtype`.
    """

    shape: tuple[int, ...]
    logical: tuple[str | None, ...]
    num_inputs: int | None = None
    trained: bool = True
    dtype: str | None = None  # None: the compute dtype
    of_experts: bool = False

    @property
    def can_have_adapter(self) -> bool:
        return self.num_inputs is not None and not self.of_experts

    def held_in(self, compute: Any) -> Any:
        """Return the parameter's dtype, given the compute dtype."""
        return jnp.dtype(self.dtype or compute)


@cache
def _skeleton(cls: type, config: Hashable) -> tuple[Any, Any, Any]:
    """Return a module's graph, abstract parameters and abstract other variables."""
    module = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
    graph, params, others = nnx.split(module, nnx.Param, ...)
    return graph, params, others


@cache
def abstract_params(spec: ModuleSpec) -> dict[str, AbstractParam]:
    """Return the parameters that the module owns (not the tied ones), by name."""
    _, params, _ = _skeleton(spec.cls, spec.config)
    tied = dict(spec.tied)
    named = {_dotted(path): leaf for path, leaf in nnx.to_flat_state(params)}
    found = {
        name: AbstractParam(
            tuple(leaf.shape),
            tuple(leaf.get_metadata()["logical"]),
            leaf.get_metadata().get("num_inputs"),
            trained=name not in spec.frozen,
            of_experts=leaf.get_metadata().get("of_experts", False),
        )
        for name, leaf in named.items()
        if name not in tied
    }
    for adapter in spec.adapters:
        found |= _abstract_factors(adapter, found[adapter.weight])
    for name, weight in quantised_weights(spec).items():
        found |= _abstract_codes(spec.frozen_as, name, weight)
    return found


@cache
def quantised_weights(spec: ModuleSpec) -> dict[str, AbstractParam]:
    """Return the own parameters that are held quantised, by name and unquantised."""
    if spec.frozen_as is None:
        return {}
    return {
        name: parameter
        for name, parameter in abstract_params(spec.unquantised).items()
        if parameter.num_inputs is not None and not parameter.trained
    }


def _abstract_codes(
    form: FrozenForm | None, name: str, weight: AbstractParam
) -> dict[str, AbstractParam]:
    assert form is not None and weight.num_inputs is not None, name
    shapes = quantised_shapes(form, weight.shape, weight.num_inputs)
    codes, scales = (
        AbstractParam(shape, weight.logical, trained=False, dtype=dtype)
        for shape, dtype in zip(shapes, (DTYPES[form], "float32"), strict=True)
    )
    return {name: codes, name + SCALES: scales}


def _abstract_factors(
    adapter: Adapter, weight: AbstractParam
) -> dict[str, AbstractParam]:
    assert weight.num_inputs is not None, adapter
    shapes = factor_dims(weight.shape, weight.num_inputs, adapter.rank)
    logical = factor_dims(weight.logical, weight.num_inputs, None)
    of_factors = zip(adapter.names, shapes, logical, strict=True)
    return {name: AbstractParam(shape, axes) for name, shape, axes in of_factors}


def init_params(spec: ModuleSpec, key: jax.Array) -> Params:
    """Return initial own parameters, none quantised, as a pure function of the key."""
    module = spec.cls(spec.config, rngs=nnx.Rngs(key))
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    tied = dict(spec.tied)
    named = {_dotted(path): leaf[...] for path, leaf in params}
    own = {name: value for name, value in named.items() if name not in tied}
    return own | init_adapters(spec, key)


def init_adapters(spec: ModuleSpec, key: jax.Array) -> Params:
    """Return initial adapters of the module, also as a pure function of the key."""
    abstract, found = abstract_params(spec), {}
    for number, adapter in enumerate(spec.adapters):
        shapes = [abstract[name].shape for name in adapter.names]
        # other keys than those that the module draws its own parameters with
        own_key = jax.random.fold_in(jax.random.fold_in(key, _ADAPTERS), number)
        values = first_factors(own_key, *shapes)
        found |= dict(zip(adapter.names, values, strict=True))
    return found


def bind(spec: ModuleSpec, params: Params) -> nnx.Module:
    """Return the module with these parameters (own and tied, by name)."""
    graph, abstract, rest = _skeleton(spec.cls, spec.config)
    adapters = {adapter.weight: adapter for adapter in spec.adapters}
    quantised = quantised_weights(spec)

    def bound(name: str, leaf: Any) -> Any:
        about: dict[str, Any] = {}
        if name in adapters:
            a, b = (params[factor] for factor in adapters[name].names)
            about["factors"] = Factors(a, b, adapters[name].scale)
        if name in quantised:
            about["held"] = Held(Quantised(params[name], params[name + SCALES]))
        return leaf.replace(params[name], **about)

    state = nnx.from_flat_state(
        [
            (path, bound(_dotted(path), leaf))
            for path, leaf in nnx.to_flat_state(abstract)
        ]
    )
    others = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    return nnx.merge(graph, state, others)


def apply(
    spec: ModuleSpec,
    params: Params,
    *inputs: jax.Array,
    documents_BL: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
    """Call the module; return its output and its auxiliary loss (0 if it has none)."""
    module: Any = bind(spec, params)
    if documents_BL is not None and takes_documents(spec.cls):
        output = module(*inputs, documents_BL=documents_BL)
    else:
        output = module(*inputs)
    losses = jax.tree.leaves(nnx.state(module, AuxLoss))
    return output, sum(losses, start=jnp.zeros((), jnp.float32))


@cache
def takes_documents(cls: type) -> bool:
    """Whether modules of the class take the document numbers of packed sequences."""
    return "documents_BL" in inspect.signature(cls.__call__).parameters


def can_pack(model: Model) -> bool:
    """Whether some module of the model takes document numbers; the model's author is
    responsible for the others."""
    return any(takes_documents(spec.cls) for spec in model.modules)


def parameter_count(layer: Layer, *, trained: bool = False) -> int:
    """Count the parameters that the layer owns, or only the trained ones. A tied
    parameter counts for its owner alone."""
    return sum(
        math.prod(param.shape)
        for spec in layer.modules
        for param in abstract_params(spec.unquantised).values()
        if param.trained or not trained
    )


def tensor_sizes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the sizes that a tensor-parallel degree must divide, by logical axis."""
    sizes: dict[str, set[int]] = {}
    for spec in dict.fromkeys(replace(m, path="", tied=()) for m in model.modules):
        for param in abstract_params(spec).values():
            for size, name in zip(param.shape, param.logical, strict=True):
                if name is not None:
                    sizes.setdefault(name, set()).add(size)
    return {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
