# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.training.worker`: a worker process of a run.

Owns what a worker makes of the settings that it is sent (devices, model, data), the
thread that makes the next step's batch meanwhile, and that a worker hears the notices
of its own machine. Started by a controller, which writes one line to its standard
input; not meant to be typed. Does not own what is in a batch (`data/batches.py`).
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hetjax.checkpoint.storage import sees_lease
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.cluster.cluster_files import parse_cluster
from hetjax.cluster.discovery import assign_devices
from hetjax.comm.files.taker import GiverPlace
from hetjax.data.batches import Batch, Samples, samples, validation_batches
from hetjax.data.dataset import Dataset
from hetjax.data.settings import shares
from hetjax.mesh.accelerators import check_accelerator_used
from hetjax.mesh.multihost import world_devices
from hetjax.mesh.process_setup import keep_compiled, simulate_devices
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.model import Model
from hetjax.models.named import TypedName, allowed_name, load_named
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.plans.worker_map import WorkerMap, node_of
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.state import Weights, drawn_weights
from hetjax.runtime.execution.updates.groups import CPU
from hetjax.runtime.rpc.schema import Noticed
from hetjax.runtime.worker.bootstrap import WorkerBootstrap, read_bootstrap
from hetjax.runtime.worker.service import Work
from hetjax.runtime.worker.serving import serve
from hetjax.training.fetching.models import ModelSource, use_models
from hetjax.training.fetching.text import text_here
from hetjax.training.recovery.notices import Watch
from hetjax.training.serving_worker import ServingWork, is_serving, model_of, stages_for
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values, read_config


class BatchPrefetcher:
    """Gives global batches by step; steps asked for in order do not wait."""

    def __init__(self, samples: Samples, global_batch: int) -> None:
        self._samples, self._global_batch = samples, global_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        """Give the batch of the step with this index and start on the next one."""
        made = self._ahead.pop(step, None) or self._make(step)
        self._ahead = {step + 1: self._make(step + 1)}
        return made.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Future[Batch]:
        return self._thread.submit(self._samples.batch, step, self._global_batch)


def training_feed(config: RunConfig, dataset: Dataset) -> BatchPrefetcher:
    """Give the run's training batches; BadInput for a text that is too short."""
    found = samples(
        dataset.trains,
        config.seq_len,
        config.seed,
        shares=shares(config.data),
        is_packed=bool(config.data.pack),
    )
    return BatchPrefetcher(found, config.global_batch)


def held_out(config: RunConfig, dataset: Dataset) -> list[Batch]:
    """Give the batches of every evaluation; BadInput for a text that is too short."""
    return validation_batches(
        dataset.validations,
        config.seq_len,
        config.global_batch,
        config.evaluation.num_batches,
        is_packed=bool(config.data.pack),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWork:
    """One worker's part of a run."""

    runtime: StageRuntime
    feed: BatchPrefetcher
    held_out: Sequence[Batch]

    def close(self) -> None:
        self.runtime.close()
        self.feed.close()

    def batch(self, step: int) -> Batch:
        return self.feed.batch(step)

    def validation(self, number: int) -> Batch:
        return self.held_out[number]


def worker_settings(
    config: RunConfig,
    cluster: str,
    plan: Plan,
    dataset: Dataset,
    lease: Sequence[Any] = (),
    models: Sequence[ModelSource] = (),
) -> dict[str, Any]:
    """Return what workers need to know, as JSON values; `cluster` is TOML.

    The `lease` of the run, as of `sees_lease`, tells those who may be elsewhere whether
    they see its directory, and `models` what they get of the controller's.
    """
    return {
        "config": config_values(config),
        "cluster": cluster,
        "plan": plan_json(plan),
        "dataset": str(dataset.directory.absolute()),
        "sha256": dict(dataset.hashes),
        "lease": list(lease),
        "models": [asdict(source) for source in models],
    }


def work_of(
    worker: str,
    settings: Mapping[str, Any],
    only_code: str | None = None,
    giver: GiverPlace | None = None,
) -> Work:
    """Make a worker's part from what its controller was given by `worker_settings`, or
    by `serving_settings`; with `only_code` no other function is called. The `giver` has
    what this machine lacks."""
    config = _config(settings, only_code, giver)
    if is_serving(settings):
        return ServingWork(runtime=_runtime(worker, settings, config))
    load_named(config.model)  # refused before anything is fetched
    dataset = text_here(
        Path(settings["dataset"]),
        settings["sha256"],
        config.data.cache_dir.expanduser(),
        giver,
    )
    return TrainingWork(
        runtime=_runtime(worker, settings, config),
        feed=training_feed(config, dataset),
        held_out=held_out(config, dataset),
    )


def warm_up(
    worker: str,
    settings: Mapping[str, Any],
    only_code: str | None = None,
    giver: GiverPlace | None = None,
) -> None:
    """Compile what a worker would have to for these settings."""
    _runtime(worker, settings, _config(settings, only_code, giver)).compile()


def _config(
    settings: Mapping[str, Any], only_code: str | None, giver: GiverPlace | None
) -> RunConfig:
    """The settings of the controller, which is authenticated, and answers for the model
    that it names, unless this machine itself has said which code may be called; from
    here on what is compiled is kept where they say."""
    config = read_config(settings["config"], "settings")
    cache_dir, lease = config.data.cache_dir.expanduser(), settings.get("lease")
    keep_compiled(cache_dir)
    sees_run = not lease or sees_lease(*lease)
    use_models(settings.get("models", ()), cache_dir, giver, sees_run)
    if only_code is not None:
        return replace(config, model=allowed_name(config.model, only_code))
    return replace(config, model=TypedName(config.model))


def first_weights(
    config: RunConfig,
    model: Model,
    dtype: Any = np.float32,
    *,
    lets_go: bool = False,
) -> Weights | None:
    """Give what the run begins with, if that is not drawn from its seed, and what it
    comes back to if some of it is frozen. What is read has the dtype; files stay in
    memory unless it `lets_go` of them.

    BadInput where the folder is not whole, or is another model's.
    """
    if config.init is None:
        is_frozen = any(spec.frozen for spec in model.modules)
        return drawn_weights(model, config.seed) if is_frozen else None
    weights = FolderWeights(local_folder(config.init), dtype, lets_go=lets_go)
    weights.check_model(model)
    return weights


# the same object each time, by which programs that were compiled ahead are found
_rule = lru_cache(maxsize=4)(optimizer)


def _runtime(
    worker: str, settings: Mapping[str, Any], config: RunConfig
) -> StageRuntime:
    whole = parse_cluster(settings["cluster"])
    cluster = part_of(whole, [node_of(worker)])
    plan, model = parse_plan(settings["plan"]), model_of(settings, config)
    return stages_for(settings)(
        plan,
        model,
        {node_of(worker): _devices(worker, cluster, config)},
        _rule(config.optimizer, config.steps),
        clip_norm=config.optimizer.clip_norm,
        gradient_wire=config.gradient_wire,
        weights=first_weights(config, model),
        kinds=device_kinds(config, whole),
        deterministic=config.deterministic,
        worker=worker,
        members=WorkerMap(plan, whole.nodes),
    )


def device_kinds(config: RunConfig, cluster: Cluster) -> dict[str, str]:
    """Give what the nodes compute on, of which some are CPUs that stand in."""
    is_cpu = config.simulate or config.platform == "cpu"
    return {node.name: CPU if is_cpu else node.device for node in cluster.nodes}


def _devices(worker: str, cluster: Cluster, config: RunConfig) -> Sequence[jax.Device]:
    """The devices of the worker's node, also those of its other hosts."""
    (node,) = cluster.nodes
    if config.simulate or config.platform == "cpu" or node.device == "cpu":
        simulate_devices(node.devices_per_host)
    else:
        check_accelerator_used()
    if node.hosts == 1:
        found = jax.local_devices()
    else:
        index = node.workers.index(worker)
        found = world_devices(index, node.hosts, node.devices_per_host)
    return assign_devices(cluster, found, config.simulate)[node.name]


def serve_run(bootstrap: WorkerBootstrap) -> None:
    """Work for the run whose controller wrote this bootstrap, until it ends."""

    def watching(tell: Callable[[Noticed], None]) -> AbstractContextManager[object]:
        if not bootstrap.watches:
            return nullcontext()
        return Watch(
            lambda notice: tell(Noticed(source=notice.source, grace_s=notice.grace_s)),
            None,
        )

    worker, only_code = bootstrap.worker, bootstrap.only_code
    serve(
        bootstrap,
        partial(work_of, worker, only_code=only_code, giver=bootstrap.giver),
        partial(warm_up, worker, only_code=only_code, giver=bootstrap.giver),
        watching,
    )


def main() -> None:
    """Serve the controller that has written where it is."""
    serve_run(read_bootstrap(sys.stdin.readline()))
    sys.stdout.flush()
    sys.stderr.flush()
    # what still compiles ahead would abort where the interpreter ends under it
    os._exit(0)


if __name__ == "__main__":
    main()
