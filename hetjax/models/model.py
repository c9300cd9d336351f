# SPDX-License-Identifier: Apache-2.0
"""What a model is to hetjax: an ordered list of layers, each a list of NNX modules.

Owns the protocol, its pure-function view (`abstract_params`, `init_params`, `apply`)
and counts of parameters. Does not own any architecture (`decoders.py`), sharding
(`mesh/`) nor FLOPs, times and memory (`costs/`).

The protocol of a module class `C` used in a `ModuleSpec`:

* `C(config, rngs=nnx.Rngs)` makes fp32 `nnx.Param`s, each with `logical=(...)`: one
  logical axis name or None per dim (names and rules: `hetjax/mesh/axes.py`);
* the first module is called with tokens_BL (int32) and gives the residual stream;
  inner ones map it to the same shape and dtype; the last is called with
  (x_BLD, targets_BL), gives the summed cross-entropy (fp32 scalar), and also has
  `logits(x_BLD) -> logits_BLV`;
* parameters arrive in the compute dtype: modules compute in the dtype they get;
* paths are `name` or `block.name`, each once: neighbours of one block scan together;
* a module may hold one `AuxLoss` variable and set it in the call to an auxiliary loss
  summed over the microbatch's tokens, coefficient included;
* a text goes on token by token (`hetjax/inference/`) where each module but the last is
  `PositionWise` or `Continuing`.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput

Params = dict[str, Any]  # dotted parameter name within its module -> array


class AuxLoss(nnx.Variable):
    """A token-summed auxiliary loss that a module sets when it is called."""


class PositionWise(nnx.Module):
    """A module that makes of each position what it would make of that one alone."""


@runtime_checkable
class Continuing(Protocol):
    """A module that can go on after positions of which it has kept something."""

    def keeps(self, num_positions: int) -> Any:
        """Give room (arrays) for what is kept of one text of so many positions."""
        ...

    def continued(self, x: jax.Array, kept: Any, start: jax.Array) -> tuple[Any, Any]:
        """Give the output for the positions from `start` on, and what is kept then."""
        ...


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One NNX module: where its state is keyed and how it is built.

    `tied` maps an own parameter name to the full path of the parameter that it is,
    e.g. `(("table", "embedding.table"),)`; the owner must be in layer 0.
    """

    path: str
    cls: type
    config: Hashable
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Last part of the path: equal for the same module of equal layers."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """First part of the path: modules that scan together share it."""
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
                    allowed="a path of its own for every module",
                    fix="number the blocks, like `block_003.attention`",
                )

    def __hash__(self) -> int:
        """Of little, in a fraction of the time: models are keys of many caches."""
        return hash((self.name, len(self.layers), self.vocab_size, self.max_seq_len))

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        return tuple(m for layer in self.layers for m in layer.modules)


@dataclass(frozen=True, slots=True)
class AbstractParam:
    """Shape and logical axes of one parameter (fp32 as master weight)."""

    shape: tuple[int, ...]
    logical: tuple[str | None, ...]


@cache
def _skeleton(cls: type, config: Hashable) -> tuple[Any, Any, Any]:
    """Graph, abstract parameters and abstract other variables of a module."""
    module = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
    graph, params, others = nnx.split(module, nnx.Param, ...)
    return graph, params, others


@cache
def abstract_params(spec: ModuleSpec) -> dict[str, AbstractParam]:
    """The parameters that the module owns itself (tied ones left out), by name."""
    _, params, _ = _skeleton(spec.cls, spec.config)
    tied = dict(spec.tied)
    named = {_dotted(path): leaf for path, leaf in nnx.to_flat_state(params)}
    return {
        name: AbstractParam(tuple(leaf.shape), tuple(leaf.get_metadata()["logical"]))
        for name, leaf in named.items()
        if name not in tied
    }


def init_params(spec: ModuleSpec, key: jax.Array) -> Params:
    """Fresh own parameters of the module, a pure function of the key."""
    module = spec.cls(spec.config, rngs=nnx.Rngs(key))
    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    tied = dict(spec.tied)
    named = {_dotted(path): leaf[...] for path, leaf in params}
    return {name: value for name, value in named.items() if name not in tied}


def bind(spec: ModuleSpec, params: Params) -> nnx.Module:
    """The module with these parameters (own and tied, by name) put in."""
    graph, abstract, rest = _skeleton(spec.cls, spec.config)
    state = nnx.from_flat_state(
        [
            (path, leaf.replace(params[_dotted(path)]))
            for path, leaf in nnx.to_flat_state(abstract)
        ]
    )
    others = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    return nnx.merge(graph, state, others)


def apply(
    spec: ModuleSpec, params: Params, *inputs: jax.Array
) -> tuple[Any, jax.Array]:
    """Call the module; return its output and its auxiliary loss (0 if it has none)."""
    module = bind(spec, params)
    output = module(*inputs)  # pyright: ignore[reportCallIssue]
    losses = jax.tree.leaves(nnx.state(module, AuxLoss))
    return output, sum(losses, start=jnp.zeros((), jnp.float32))


def parameter_count(layer: Layer) -> int:
    """Count the parameters that the layer owns; a tied one is its owner's alone."""
    return sum(
        math.prod(param.shape)
        for spec in layer.modules
        for param in abstract_params(spec).values()
    )


def tensor_sizes(model: Model) -> dict[str, tuple[int, ...]]:
    """Give the sizes that a tensor-parallel degree must divide, by logical axis."""
    sizes: dict[str, set[int]] = {}
    for spec in dict.fromkeys(replace(m, path="", tied=()) for m in model.modules):
        for param in abstract_params(spec).values():
            for size, name in zip(param.shape, param.logical, strict=True):
                if name is not None:
                    sizes.setdefault(name, set()).add(size)
    return {name: tuple(sorted(found)) for name, found in sorted(sizes.items())}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
