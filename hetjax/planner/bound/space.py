# SPDX-License-Identifier: Apache-2.0
"""The space of plans that a request's lower bound is about.

Owns who is in it. Does not own the bound (`certificate.py`), nor whether a plan is
valid (`plans/validation.py`) and fits into memory (`model/evaluator.py`).
"""

from hetjax.planner.model.request import Request
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.schedules import SCHEDULES


def in_space(request: Request, plan: Plan) -> bool:
    """Say whether a valid plan is one of those that the bound is about.

    It does the request's batch, under any of the schedules, with what the request
    leaves open: tensor and data degrees, remat choices and microbatch sizes. Stages and
    replicas may differ in all of them, and lie on any devices of a node in any order.
    """
    return (
        not SCHEDULES[plan.schedule].shares
        and not plan.programs
        and plan.seq_len == request.seq_len
        and plan.global_batch == request.global_batch
        and all(_is_open(request, replica) for replica in plan.replicas)
    )


def _is_open(request: Request, replica: Replica) -> bool:
    return replica.microbatch_size in request.microbatch_sizes and all(
        _is_option(request, stage) for stage in replica.stages
    )


def _is_option(request: Request, stage: Stage) -> bool:
    return (
        stage.remat in request.remats
        and stage.mesh.tensor in request.degrees
        and stage.mesh.data in request.data_degrees
    )
