# SPDX-License-Identifier: Apache-2.0
"""Measures when every action really ran, without slowing the driver.

One watching thread per stage waits, in order, for the arrays that its actions make. A
stage's programs run one after the other on its devices. So an action starts when it is
enqueued, when its predecessor ends or when its input arrives, whichever is last.
Waiting in a collective (REDUCE, NORM) counts as part of the action. Owns these threads
and this rule. Does not own the use of the times: spans (`tracer.py`) or sums
(`step_clock.py`).
"""

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax

from hetjax.schedule.programs.action import Action, StageKey

Seen = Callable[[Action, float, float], None]  # action, start, end
_Watched = tuple[Action, float, Any, Seen] | threading.Event | None


class ActionWatch:
    """Watches actions; times are this process's `time.perf_counter`.

    One thread calls `watch`; a stage has a watching thread from its first action on.
    """

    def __init__(self) -> None:
        self._queues: dict[StageKey, SimpleQueue[_Watched]] = {}

    def watch(self, action: Action, enqueued_s: float, made: Any, seen: Seen) -> None:
        """Call `seen`, on another thread, once the arrays that were made are ready."""
        queue = self._queues.get(action.key) or self._begin(action.key)
        queue.put((action, enqueued_s, made, seen))

    def _begin(self, key: StageKey) -> SimpleQueue[_Watched]:
        queue = self._queues[key] = SimpleQueue()
        name = f"watching r{key[0]}.s{key[1]}"
        threading.Thread(target=_watch, args=(queue,), name=name, daemon=True).start()
        weakref.finalize(self, queue.put, None)
        return queue

    def wait(self) -> None:
        """Return once all watched arrays are ready."""
        reached = [threading.Event() for _ in self._queues]
        for queue, event in zip(self._queues.values(), reached, strict=True):
            queue.put(event)
        for event in reached:
            event.wait()


def _watch(queue: SimpleQueue[_Watched]) -> None:
    """Watch one stage until the item is None; keep no reference to watched arrays."""
    free_s = 0.0
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        action, enqueued_s, made, seen = item
        _wait(made)
        end_s = time.perf_counter()
        start_s, free_s = max(enqueued_s, free_s), end_s
        seen(action, start_s, end_s)
        del item, made


def _wait(made: Any) -> None:
    arrays = [made] if isinstance(made, jax.Array) else jax.tree.leaves(made)
    for array in arrays:
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except RuntimeError:
            pass  # donated meanwhile, and only a finished step donates
