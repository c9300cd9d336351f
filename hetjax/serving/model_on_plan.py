# SPDX-License-Identifier: Apache-2.0
"""Scores windows and continues texts with a trained model on the workers of a plan.

Owns the requests to these workers. Does not own their start and the loading of weights
(`hetjax/api/model_on_plan.py`) nor their computation
(`hetjax/runtime/execution/serving.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hetjax.data.windows import UNCOUNTED
from hetjax.errors import RunFailed
from hetjax.models.decoding import check_continuing
from hetjax.models.model import Model
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.serving import logits_after, row_losses
from hetjax.runtime.execution.serving import TextPiece
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.serving.decoding import ChunkedText, filled, room_for
from hetjax.serving.scoring import Window, filled_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOnPlan:
    """The workers of a plan, which hold the weights of a step."""

    model: Model
    plan: Plan
    step: int
    controller: Controller

    def score(
        self, given: Iterable[Window], *, length: int
    ) -> Iterator[tuple[Window, float]]:
        """Yield windows with their log-likelihoods, as a `Scorer` does.

        A batch has the plan's global batch size.
        """
        given, num_rows = iter(given), self.plan.global_batch
        while batch := list(islice(given, num_rows)):
            tokens_GL = filled_batch(batch, length, num_rows)
            targets_GL = _counted(batch, tokens_GL[:, 1:])
            with workers_stay():
                losses_G = row_losses(self.controller, tokens_GL[:, :-1], targets_GL)
            yield from zip(batch, (-losses_G).tolist(), strict=False)

    def new_text(self, num_positions: int) -> "TextOnPlan":
        """Return a text of at most `num_positions` tokens.

        Raises BadInput if the model cannot continue texts.
        """
        check_continuing(self.model.modules[:-1])
        return TextOnPlan(self.controller, self.model.vocab_size, num_positions)

    def __str__(self) -> str:
        stages = self.plan.stages()
        nodes = dict.fromkeys(stage.node for _, _, stage in stages)
        return f"the run's plan, {len(stages)} stages on {', '.join(nodes)}"


class TextOnPlan(ChunkedText):
    """A text that passes the stages of the first replica, which keep its caches."""

    def __init__(
        self, controller: Controller, vocab_size: int, num_positions: int
    ) -> None:
        super().__init__()
        self._controller, self._vocab_size = controller, vocab_size
        self._room = room_for(num_positions)

    def forward(self, tokens: Sequence[int], start: int) -> np.ndarray:
        piece = TextPiece(
            tokens=filled(tokens)[0].tolist(),
            last=len(tokens) - 1,
            start=start,
            num_positions=self._room,
        )
        with workers_stay():
            logits_V = logits_after(self._controller, piece)
        return logits_V[: self._vocab_size]


def _counted(batch: Sequence[Window], targets_GL: np.ndarray) -> np.ndarray:
    """Return the targets with `UNCOUNTED` in place of those that do not count."""
    found_GL = np.full_like(targets_GL, UNCOUNTED)
    for row_L, own_L, window in zip(found_GL, targets_GL, batch, strict=False):
        counts_L = np.zeros(len(row_L), bool)
        counts_L[: len(window.counted) - 1] = window.counted[1:]
        row_L[counts_L] = own_L[counts_L]
    return found_GL


@contextmanager
def workers_stay() -> Iterator[None]:
    """Raise RunFailed, with a remedy, if a worker is lost; no data is lost with it."""
    try:
        yield
    except WorkerLost as lost:
        raise RunFailed(
            got=str(lost),
            allowed="workers that stay until the end",
            fix="run the same command again once all machines answer, or with --on "
            "one-device; the run's checkpoints are unchanged",
        ) from lost
