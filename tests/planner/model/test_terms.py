# SPDX-License-Identifier: Apache-2.0
"""Layer costs on one kind of device do not depend on the cluster's other kinds."""

from dataclasses import fields

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.configs import LlamaConfig
from hetjax.models.decoders import model_of
from hetjax.planner.model.request import PlanRequest, node_classes
from hetjax.planner.model.terms.terms import _facts, options_of

# one precision, but different attention kernels, compilers and margins
KINDS = ("A100-SXM4-80GB", "TPU-v5e", "MI300X")
MODEL = model_of(
    LlamaConfig(
        name="small",
        vocab_size=512,
        hidden_size=256,
        inner_size=512,
        num_blocks=2,
        num_heads=2,
        num_kv_heads=2,
        max_seq_len=256,
    )
)


def request_on(*kinds: str) -> PlanRequest:
    nodes = tuple(Node(name=k.lower(), device=k, count=2) for k in kinds)
    return PlanRequest(
        model=MODEL,
        cluster=Cluster(name="kinds", nodes=nodes),
        seq_len=256,
        global_batch=8,
        dtype="bfloat16",
        microbatch_sizes=(1, 2),
        tensor_degrees=(1, 2),
        data_degrees=(1,),
        remats=("none", "full"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_kinds_costs_do_not_depend_on_other_kinds(kind: str):
    among, alone = request_on(*KINDS), request_on(kind)
    options = options_of(among, (1, 2))
    (own,) = {
        c for c, nodes in enumerate(among.classes) if nodes.nodes[0].device == kind
    }
    mine = [o for o, option in enumerate(options) if option.device_class == own]
    of_all, of_one = _facts(among, options), _facts(alone, options_of(alone, (1, 2)))
    for name in (field.name for field in fields(of_all)):
        axes = name.rpartition("_")[2]
        if "O" in axes:
            found = np.take(getattr(of_all, name), mine, axis=axes.index("O"))
            np.testing.assert_array_equal(found, getattr(of_one, name), err_msg=name)


def test_spellings_of_one_device_are_one_class() -> None:
    names = ("A100 80GB SXM", "A100-SXM4-80GB", "A100 SXM4 80GB")
    nodes = tuple(
        Node(name=f"n{n}", device=device, count=8) for n, device in enumerate(names)
    )
    (alike,) = node_classes(Cluster(name="spelled", nodes=nodes))
    assert alike.name == "A100-SXM4-80GB" and alike.nodes == nodes
