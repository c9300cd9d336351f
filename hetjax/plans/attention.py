# SPDX-License-Identifier: Apache-2.0
"""The form that a stage's attention takes: as it says, as was asked for, or the best.

Owns the order in which these are asked, and what a device, a precision and a model let
a form compute. Does not own the forms (`models/attention/`) nor which kernel a kind
of device has (`cluster/devices.toml`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hetjax.cluster.catalogue import Precision, canonical_name, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.plans.plan import AttentionForm, Plan, StageKey

# What a person asks for; "best": on every device its kernel, or what runs everywhere
Attention = Literal["best", "xla", "chunked", "cudnn", "splash"]

EVERYWHERE: AttentionForm = "chunked"  # of the forms that need no kernel
_LANES = 128  # positions: splash has blocks of no others
_PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "cudnn": ("bfloat16", "float16"),
    "splash": ("bfloat16", "float32"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """What attention is computed: positions, the sizes of the model's heads, and
    whether sequences are of several documents."""

    seq_len: int
    head_sizes: Collection[int]
    packed: bool = False


def node_attention(
    node: Node, precision: Precision, heads: Heads, asked: Attention | None = None
) -> AttentionForm:
    """Return the form of a stage on the node that does not say its own.

    BadInput for one that was asked for and cannot run there.
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
    """Return the plan with every stage's form said.

    `precisions` are what stages compute in. BadInput for a form that a stage's device,
    precision or model does not let run.
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
    """Return the plan with these forms of its stages."""
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
    """Return the plan with forms that run everywhere: CPUs stand in for its devices.

    BadInput for a kernel that was asked for.
    """
    if asked in _PRECISIONS:
        raise BadInput(
            got=f"--attention {asked} where CPUs stand in for the cluster's devices",
            allowed="best, xla or chunked",
            fix="leave --attention out, or --simulate and --platform",
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
    """Raise BadInput for the first thing that keeps the form from running there."""
    for lack, allowed in _lacks(form, node, precision, heads):
        raise BadInput(
            got=f"attention {form!r} for {where}: {lack}",
            allowed=allowed,
            fix="give --attention best, and take attention out of the plan's stages",
        )


def _lacks(
    form: AttentionForm, node: Node, precision: Precision, heads: Heads
) -> Iterator[tuple[str, str]]:
    """What keeps the form from running there, and what it runs on.

    Of a device that the catalogue does not know nothing is said.
    """
    known = catalogue().get(canonical_name(node.device))
    if form == "xla" and precision == "bfloat16" and known and known.fp16_native:
        if not known.bf16_native:  # the compiler refuses JAX's own products there
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
        yield f"heads of {odd[0]}", "heads whose size is a multiple of 8, at most 128"
    if form == "cudnn" and heads.packed:  # it would take scores of S x S for a mask
        yield "packed sequences", "chunked, or sequences that are not packed"
    if form == "splash" and heads.seq_len % _LANES:
        yield f"{heads.seq_len} positions", f"a multiple of {_LANES} positions"
