# SPDX-License-Identifier: Apache-2.0
"""The batch of the next step, made while the present one trains.

Owns the thread that looks one step ahead. Does not own what is in a batch
(`hetjax/data/batches.py`).
"""

from concurrent.futures import Future, ThreadPoolExecutor

from hetjax.data.batches import Batch, Samples


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
