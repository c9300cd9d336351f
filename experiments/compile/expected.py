# SPDX-License-Identifier: Apache-2.0
"""Derives the collectives that a stage's program needs, from the stage alone.

Over the tensor axis (Megatron-LM's cut): a product over a cut dim leaves each device
with a part of a sum. So attention and MLP end in one all-reduce, and their input's
gradient in another. Routed experts' input gradient takes one more, for the weights that
combine the tokens. A lookup in a cut table takes one, and its gradient none. The loss
over a cut vocabulary takes a maximum, a sum and the target's logit, and its input's
gradient one. With remat "full" the backward recomputes a unit except for its last
product. Gradients of weights need none, except those of a norm of queries or keys,
because all heads share its scale. A split backward may sum them in either half.

Over the data axis passes are independent, except for the loss, which is one number.
PACK sums every leaf over it (an all-reduce or a reduce-scatter). Each master that data
cuts is gathered into its copy. A sum's rows are laid out like a master that both axes
cut. For a master that data does not cut, the update gathers them. For one that tensor
does not cut, it permutes and gathers them, because rows are numbered tensor rank by
tensor rank. Only one data rank has the position whose logits are wanted: all-reduces
add the zeros of the others to its logits, and to at most two means of its last norm.
Logits of a cut vocabulary are gathered. Checks take one all-reduce.

A device keeps only its rows of a sum over the data axis. A TPU's compiler sums them in
whole chunks, of as many rows as fit in its memory. Where a device's rows are no
multiple of a chunk, its neighbour sums some of them and sends them on: a permute for a
leaf, of a small part of it (`most_permuted`). The alternative is that all devices get
the whole sum, which is twice the bytes. GPUs cut a sum anywhere.

These are upper bounds: a compiler may join several collectives. Owns this reasoning.
Does not own the counting (`hlo.py`).
"""

import math
from collections import Counter
from typing import Any

from experiments.compile.cells import Cell
from experiments.compile.targets import TARGETS
from hetjax.mesh.axes import tensor_dim
from hetjax.models.attention.attention import AttentionConfig
from hetjax.models.model import ModuleSpec
from hetjax.runtime.execution.stage_state import StageState

REDUCES = frozenset({"all-reduce", "reduce-scatter"})  # either is acceptable

_FORWARD = {
    "Embedding": 1,
    "Attention": 1,
    "GeluMlp": 1,
    "GatedMlp": 1,
    "Moe": 1,
    "Head": 3,
}
_BACKWARD = _FORWARD | {"Embedding": 0, "Moe": 2, "Head": 1}


def most_collectives(cell: Cell, state: StageState) -> Counter[str]:
    """Return how many collectives of each name the cell's program may have.

    Reductions of either kind are counted as `all-reduce`.
    """
    return +{
        "pack": _pack,
        "update": _update,
        "square sum": _square_sum,
        "copies": _copies,
        "logits": _logits,
        "zeros": _none,
        "first moments": _none,
        "finite check": _one,
        "weight digests": _one,
        "gradient digests": _one,
    }.get(cell.program, _passes)(cell, state)


def beyond(found: Counter[str], most: Counter[str]) -> Counter[str]:
    """Return the collectives in excess of those allowed."""
    joined: Counter[str] = Counter()
    for name, times in found.items():
        joined["all-reduce" if name in REDUCES else name] += times
    return joined - most


def _passes(cell: Cell, state: StageState) -> Counter[str]:
    last = state.programs.function.last
    stacks = [s for s in state.programs.function.stacks if s.only is None]
    forward = sum(_FORWARD[m.cls.__name__] for s in stacks for m in s.unit)
    backward = sum(_BACKWARD[m.cls.__name__] for s in stacks for m in s.unit)
    if cell.remat == "full":
        body = stacks[:-1] if last else stacks
        backward += sum(_FORWARD[m.cls.__name__] for s in body for m in s.unit[:-1])
    scales = 2 * sum(_norms_heads(m) for s in stacks for m in s.unit)
    times = {
        "forward": forward,
        "evaluate": forward,
        "backward": backward + scales,
        "input gradient": backward + scales,
        "weight gradient": scales,
        "fused": forward + backward + scales,
    }[cell.program]
    of_loss = last and cell.program in ("forward", "evaluate", "fused")
    return Counter(
        {"all-reduce": times * (cell.tensor > 1) + of_loss * (cell.data > 1)}
    )


def _norms_heads(module: ModuleSpec) -> bool:
    config = module.config
    return isinstance(config, AttentionConfig) and config.qk_norm is not None


def most_permuted(cell: Cell, state: StageState) -> float:
    """Return how many numbers a device's permutes may send in PACK: a tenth of its
    rows. For other programs only the number of permutes is limited."""
    if cell.program != "pack":
        return math.inf
    groups = zip(state.updates.groups, state.updates.gradients, strict=True)
    return 0.1 * sum(a.shape[1] for group, rows in groups if group.rows for a in rows)


def _logits(cell: Cell, state: StageState) -> Counter[str]:
    stacks = [s for s in state.programs.function.stacks if s.only is None]
    times = sum(_FORWARD[m.cls.__name__] for s in stacks[:-1] for m in s.unit)
    return Counter(
        {
            "all-reduce": times * (cell.tensor > 1) + 3 * (cell.data > 1),
            "all-gather": int(cell.tensor > 1),
        }
    )


def _none(_: Cell, __: StageState) -> Counter[str]:
    return Counter()


def _one(_: Cell, __: StageState) -> Counter[str]:
    return Counter({"all-reduce": 1})


def _pack(cell: Cell, state: StageState) -> Counter[str]:
    leaves = sum(len(g.leaf_ids) for g in state.updates.groups if g.rows)
    in_chunks = TARGETS[cell.target].backend == "tpu"
    summed = leaves * (cell.data > 1)
    return Counter({"all-reduce": summed, "collective-permute": summed * in_chunks})


def _square_sum(cell: Cell, state: StageState) -> Counter[str]:
    groups = zip(state.updates.groups, state.updates.gradients, strict=True)
    arrays = sum(len(gradient) for group, gradient in groups if group.owned)
    return Counter({"all-reduce": arrays * (cell.tensor * cell.data > 1)})


def _copies(cell: Cell, state: StageState) -> Counter[str]:
    leaves = sum(
        _cut_over_data(m) for own in state.updates.masters for m in own.values()
    )
    return Counter({"all-gather": leaves})


def _update(cell: Cell, state: StageState) -> Counter[str]:
    found = _copies(cell, state)
    if cell.data == 1:
        return found
    stacks = state.programs.function.stacks
    for stack, own in zip(stacks, state.updates.masters, strict=True):
        for leaf, master in own.items():
            whole = tensor_dim(stack.leaves()[leaf].logical) is None
            if not _cut_over_data(master):
                found["all-gather"] += 1
            elif whole and cell.tensor > 1:
                found += Counter({"collective-permute": 1, "all-gather": 1})
    return found


def _cut_over_data(master: Any) -> bool:
    if master.sharding.mesh.shape["data"] == 1:
        return False
    axes = [cut if isinstance(cut, tuple) else (cut,) for cut in master.sharding.spec]
    return any("data" in of_dim for of_dim in axes)
