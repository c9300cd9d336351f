# SPDX-License-Identifier: Apache-2.0
"""Builds a model as one stage on one device, as the product would run it there.

Owns the plan with the device's own precision and attention, the runtime that trains by
it, and the product's predictions for it. Does not own what is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.one_jit import even_pipeline, random_batch
from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.costs import Costs
from hetjax.costs.measured.compiled import (
    NOTHING,
    CompiledBytes,
    PlanPrograms,
    by_program,
)
from hetjax.costs.plan_costs import stage_devices
from hetjax.data.batches import Batch
from hetjax.models.attention.attention import head_sizes
from hetjax.models.configs import DecoderConfig
from hetjax.models.decoders import model_of
from hetjax.models.finetuning import WHOLE, WITHOUT_ADAPTERS, LoraConfig, fine_tuned
from hetjax.models.model import Model
from hetjax.planner.model.costing import checked_costs
from hetjax.plans.attention import Attention, with_attentions
from hetjax.plans.plan import AttentionForm, Offload, Plan, Remat, Stage, StageKey
from hetjax.plans.precision import Dtype, stage_precision, with_precisions
from hetjax.profiling.found_here import cluster_here
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.predicted import Predicted, predict
from hetjax.schedule.programs.action import Tied
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.memory import MemoryUse, memory_uses
from hetjax.stage.partition import tied_holders

CLIP_NORM = 1.0
NODE = "node"
KEY: StageKey = (0, 0)  # of the one stage
_LOSS_SCALE = 2.0**8  # the first scale of a run that scales the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class OneStage:
    """A one-stage plan with its model and cluster; the plan sets precision and
    attention."""

    model: Model
    plan: Plan
    cluster: Cluster

    @property
    def stage(self) -> Stage:
        return self.plan.replicas[0].stages[0]

    @property
    def node(self) -> Node:
        return self.cluster.node(NODE)

    @property
    def precision(self) -> Precision:
        return stage_precision(self.stage, self.node)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale for `StageRuntime.step`."""
        return _LOSS_SCALE if self.precision == "float16" else None

    def batch(self) -> Batch:
        """Return random tokens; in a packed plan each sequence has two documents."""
        batch = random_batch(self.plan, self.model.vocab_size)
        if not self.plan.packed:
            return batch
        documents_GL = np.ones_like(batch[0])
        documents_GL[:, self.plan.seq_len // 2 :] = 2
        return *batch, documents_GL

    def runtime(
        self, device: jax.Device, optimizer: optax.GradientTransformation, **more: Any
    ) -> StageRuntime:
        return StageRuntime(self.plan, self.model, {NODE: [device]}, optimizer, **more)

    def compiled(
        self,
        optimizer: optax.GradientTransformation,
        told: Mapping[str, int],
    ) -> CompiledBytes:
        """Return the compiler's figures for the stage (`Stages.temp_bytes`) in the form
        that `train` keeps."""
        devices = stage_devices(self.plan, self.cluster)
        init = optimizer.init
        programs = PlanPrograms.from_plan(self.plan, self.model, devices, init)
        return by_program(programs, {KEY: told})

    def predicted(self, optimizer: optax.GradientTransformation) -> Predicted:
        """Return what `simulate` says; NoFeasiblePlan if device memory is too small."""
        return predict(self.plan, self._costs(optimizer, NOTHING), self._tied)

    def memory(
        self, optimizer: optax.GradientTransformation, compiled: CompiledBytes
    ) -> MemoryUse:
        """Return the device's peak memory by the compiler's workspaces, even if the
        device has less."""
        programs = lower(self.plan, self._tied)
        uses = memory_uses(programs, self.plan, self._costs(optimizer, compiled))
        return uses[f"{NODE}/0"]

    def _costs(
        self, optimizer: optax.GradientTransformation, compiled: CompiledBytes
    ) -> Costs:
        return checked_costs(
            self.plan,
            self.model,
            self.cluster,
            None,
            dtype=None,
            optimizer=optimizer.init,
            compiled=compiled,
        )

    @property
    def _tied(self) -> Tied:
        return tied_holders(self.plan, self.model)


def node_of(device: jax.Device) -> Node:
    """Return the device as the product finds it; an unknown kind is measured."""
    (node,) = cluster_here([device])[0].nodes
    return replace(node, name=NODE)


def one_stage(
    config: DecoderConfig,
    node: Node,
    *,
    microbatches: int,
    size: int,
    remat: Remat = "selective",
    dtype: Dtype = "best",
    attention: Attention = "best",
    lora: LoraConfig = WITHOUT_ADAPTERS,
    offload: Offload = "none",
    packed: bool = False,
) -> OneStage:
    """Return the stage with its plan. BadInput if the attention cannot run there."""
    model, cluster = model_of(config), Cluster(name="here", nodes=(node,))
    model = fine_tuned(model, WHOLE, lora)
    plan = even_pipeline(model, 1, microbatches, size, remat)
    plan = replace(_offloaded(plan, offload), packed=packed)
    plan = with_precisions(plan, cluster, dtype)
    of = OneStage(model=model, plan=plan, cluster=cluster)
    sizes = head_sizes(model)
    precisions: dict[StageKey, Precision] = {KEY: of.precision}
    return replace(
        of, plan=with_attentions(plan, cluster, sizes, precisions, attention)
    )


def _offloaded(plan: Plan, offload: Offload) -> Plan:
    (replica,) = plan.replicas
    (stage,) = replica.stages
    replica = replace(replica, stages=(replace(stage, offload=offload),))
    return replace(plan, replicas=(replica,))


def other_forms(form: AttentionForm | None) -> tuple[AttentionForm, ...]:
    """Return the other forms that run wherever this form does."""
    everywhere: tuple[AttentionForm, ...] = ("chunked", "xla")
    return tuple(other for other in everywhere if other != form)
