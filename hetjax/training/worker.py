# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.training.worker`: a worker process of a run.

Owns what a worker builds from the settings that it receives (devices, model, data), the
thread that prefetches the next step's batch, and the watch for notices of the worker's
own machine. A controller starts it and writes one line to its standard input; it is not
meant to be typed. Does not own what is in a batch (`data/batches.py`).
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
from hetjax.files.user_cache import expanded
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
from hetjax.runtime.worker.server import serve
from hetjax.runtime.worker.service import Work
from hetjax.training.fetching.models import ModelSource, use_models
from hetjax.training.fetching.text import text_here
from hetjax.training.recovery.notices import Watch
from hetjax.training.serving_worker import ServingWork, is_serving, model_of, stages_for
from hetjax.training.settings.config import RunConfig, is_virtual
from hetjax.training.settings.values import config_values, read_config


class BatchPrefetcher:
    """Returns global batches by step; it prefetches, so steps in order do not wait."""

    def __init__(self, samples: Samples, global_batch: int) -> None:
        self._samples, self._global_batch = samples, global_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        """Return the batch of the step with this index; start to make the next one."""
        made = self._ahead.pop(step, None) or self._make(step)
        self._ahead = {step + 1: self._make(step + 1)}
        return made.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Future[Batch]:
        return self._thread.submit(self._samples.batch, step, self._global_batch)


def training_feed(config: RunConfig, dataset: Dataset) -> BatchPrefetcher:
    """Return the run's training batches. Raises BadInput if the text is too short."""
    found = samples(
        dataset.trains,
        config.seq_len,
        config.seed,
        shares=shares(config.data),
        is_packed=bool(config.data.pack),
    )
    return BatchPrefetcher(found, config.global_batch)


def held_out(config: RunConfig, dataset: Dataset) -> list[Batch]:
    """Return every evaluation's batches. Raises BadInput if the text is too short."""
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

    `lease` has the arguments of `sees_lease`, by which workers that may be on other
    machines find out whether they see the run's directory. They can get `models` from
    the controller.
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
    """Return a worker's part, built from its `worker_settings` or `serving_settings`.

    With `only_code` no other function is called. The `giver` has the files that this
    machine lacks.
    """
    config = _config(settings, only_code, giver)
    if is_serving(settings):
        return ServingWork(runtime=_runtime(worker, settings, config))
    load_named(config.model)  # refused before anything is fetched
    dataset = text_here(
        Path(settings["dataset"]),
        settings["sha256"],
        expanded(config.data.cache_dir),
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
    """Compile what a worker with these settings would have to compile."""
    _runtime(worker, settings, _config(settings, only_code, giver)).compile()


def _config(
    settings: Mapping[str, Any], only_code: str | None, giver: GiverPlace | None
) -> RunConfig:
    """Return the controller's settings, with a model that may be loaded.

    The controller is authenticated. So the model that it names is trusted, unless this
    machine has said by `only_code` which code may be called. From here on, compiled
    programs are kept in the cache of the settings.
    """
    config = read_config(settings["config"], "settings")
    cache_dir, lease = expanded(config.data.cache_dir), settings.get("lease")
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
    """Return the weights that the run begins with, from which frozen ones are restored.

    None if all are drawn from the seed and none are frozen. Weights that are read have
    the `dtype`; files stay in memory unless the reader `lets_go` of them. Raises
    BadInput if the folder is incomplete or another model's.
    """
    if config.init is None:
        is_frozen = any(spec.frozen for spec in model.modules)
        return drawn_weights(model, config.seed) if is_frozen else None
    weights = FolderWeights(local_folder(config.init), dtype, lets_go=lets_go)
    weights.check_model(model)
    return weights


# cached: programs that were compiled ahead are found by the identity of this object
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
    """Return the kind of device by node; CPU if CPUs stand in for the devices."""
    is_cpu = is_virtual(config)
    return {node.name: CPU if is_cpu else node.device for node in cluster.nodes}


def _devices(worker: str, cluster: Cluster, config: RunConfig) -> Sequence[jax.Device]:
    """Return the devices of the worker's node, including those of its other hosts."""
    (node,) = cluster.nodes
    if is_virtual(config) or node.device == "cpu":
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
    """Serve the controller that writes a bootstrap to standard input."""
    serve_run(read_bootstrap(sys.stdin.readline()))
    sys.stdout.flush()
    sys.stderr.flush()
    # a compilation that still runs would abort when the interpreter ends
    os._exit(0)


if __name__ == "__main__":
    main()
