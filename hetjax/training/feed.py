# SPDX-License-Identifier: Apache-2.0
"""The batches of a run; that of the next step is made while the present one trains.

Owns which settings they follow from, and the thread that looks one step ahead. Does not
own what is in a batch (`hetjax/data/batches.py`).
"""

from concurrent.futures import Future, ThreadPoolExecutor

from hetjax.data.batches import Batch, Samples, samples, validation_batches
from hetjax.data.dataset import Dataset
from hetjax.training.config import RunConfig


class Feed:
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


def training_feed(config: RunConfig, dataset: Dataset) -> Feed:
    """Give the run's training batches; BadInput for a text that is too short."""
    found = samples(dataset.train_T, config.seq_len, config.seed)
    return Feed(found, config.global_batch)


def held_out(config: RunConfig, dataset: Dataset) -> list[Batch]:
    """Give the batches of every evaluation; BadInput for a text that is too short."""
    return validation_batches(
        dataset.validation_T,
        config.seq_len,
        config.global_batch,
        config.evaluation.num_batches,
    )
