# SPDX-License-Identifier: Apache-2.0
"""Determines each stage's attention form: the plan's, the user's, or the best.

Owns the order of precedence between these, and which forms a device, a precision and a
model can run. Does not own the forms (`models/attention/`) nor which kernel a device
kind has (`cluster/devices.toml`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hetjax.cluster.catalogue import Precision, canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.plans.plan import AttentionForm, Plan, StageKey

# What a user asks for; "best": each device's kernel, or else `EVERYWHERE`
Attention = Literal["best", "xla", "chunked", "cudnn", "splash"]

EVERYWHERE: AttentionForm = "chunked"  # the default of the forms without a kernel
_LANES = 128  # positions: splash works in blocks of multiples of it
_PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "cudnn": ("bfloat16", "float16"),
    "splash": ("bfloat16", "float32"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The shapes of attention: number of positions, sizes of the model's heads, and
    whether sequences hold several documents."""

    seq_len: int
    head_sizes: Collection[int]
    packed: bool = False


def node_attention(
    node: Node, precision: Precision, heads: Heads, asked: Attention | None = None
) -> AttentionForm:
    """Return the attention form of stages on the node that give none themselves.

    Raises BadInput if the form that the user asked for cannot run there.
    """
    if asked is not None and asked != "best":
        _check(asked, f"node {node.name!r}", node, precision, heads)
        return asked
    known = catalogue().get(canonical_name(node.device))
    kernel = known.attention if known else None
    if kernel is None or any(_lacks(kernel, node, precision, heads)):
        return EVERYWHERE
    return kernel


def with_attentions(
    plan: Plan,
    cluster: Cluster,
    head_sizes: Collection[int],
    precisions: Mapping[StageKey, Precision],
    asked: Attention | None = None,
) -> Plan:
    """Return the plan with every stage's attention form filled in.

    `precisions` are those of the stages. Raises BadInput for a form that cannot run
    with the stage's device, precision or model.
    """
    heads = Heads(seq_len=plan.seq_len, head_sizes=head_sizes, packed=plan.packed)
    forms: dict[StageKey, AttentionForm] = {}
    for r, s, stage in plan.stages():
        node, precision = cluster.node(stage.node), precisions[r, s]
        if stage.attention is None:
            forms[r, s] = node_attention(node, precision, heads, asked)
        else:
            where = f"replicas[{r}].stages[{s}]"
            _check(stage.attention, where, node, precision, heads)
            forms[r, s] = stage.attention
    return with_forms(plan, forms)


def with_forms(plan: Plan, forms: Mapping[StageKey, AttentionForm]) -> Plan:
    """Return the plan with these attention forms for its stages."""
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, attention=forms[r, s])
                for s, stage in enumerate(replica.stages)
            ),
        )
        for r, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=replicas)


def without_kernels(plan: Plan, asked: Attention = "best") -> Plan:
    """Return the plan with forms that also run on CPUs that stand in for its devices.

    Raises BadInput if the user asked for a kernel.
    """
    if asked in _PRECISIONS:
        raise BadInput(
            got=f"--attention {asked}, but CPUs stand in for the cluster's devices",
            allowed="best, xla or chunked",
            fix="leave out --attention, or both --simulate and --platform",
        )
    otherwise = "xla" if asked == "xla" else EVERYWHERE
    forms: dict[StageKey, AttentionForm] = {
        (r, s): otherwise
        if stage.attention is None or stage.attention in _PRECISIONS
        else stage.attention
        for r, s, stage in plan.stages()
    }
    return with_forms(plan, forms)


def _check(
    form: AttentionForm, where: str, node: Node, precision: Precision, heads: Heads
) -> None:
    """Raise BadInput for the first reason that the form cannot run there."""
    for lack, allowed in _lacks(form, node, precision, heads):
        raise BadInput(
            got=f"attention {form!r} for {where}: {lack}",
            allowed=allowed,
            fix="give --attention best, and remove attention from the plan's stages",
        )


def _lacks(
    form: AttentionForm, node: Node, precision: Precision, heads: Heads
) -> Iterator[tuple[str, str]]:
    """Yield each reason that the form cannot run there, with what would be allowed.

    Nothing is assumed about the kernels of a device that is not in the catalogue.
    """
    known = catalogue().get(canonical_name(node.device))
    if form == "xla" and precision == "bfloat16" and known and known.fp16_native:
        if not known.bf16_native:  # the compiler refuses JAX's own matmuls there
            yield f"{node.device} has no bfloat16", "chunked, or another --dtype"
    if form in ("xla", "chunked"):
        return
    if known and known.attention != form:
        kinds = "NVIDIA's GPUs of compute capability 8.0 and above"
        allowed = kinds if form == "cudnn" else "TPUs from v4 on"
        yield f"{node.device} has no such kernel", f"{form} on {allowed}"
    if precision not in _PRECISIONS[form]:
        yield f"it computes in {precision}", " or ".join(_PRECISIONS[form])
    if form == "cudnn" and (odd := [h for h in heads.head_sizes if h % 8 or h > 128]):
        allowed = "heads whose size is a multiple of 8, at most 128"
        yield f"the model has heads of size {odd[0]}", allowed
    if form == "cudnn" and heads.packed:  # its mask would need S x S scores
        yield "the sequences are packed", "chunked, or sequences that are not packed"
    if form == "splash" and heads.seq_len % _LANES:
        allowed = f"a multiple of {_LANES} positions"
        yield f"sequences of {heads.seq_len} positions", allowed
