# SPDX-License-Identifier: Apache-2.0
"""Runs a worker's stages of a served model: they score rows and continue one text.

Owns the part of a text's state that stays on the stages between two of its pieces. All
else is as in training: the evaluation programs, their transport, the state and its
source (`stage_runtime.py`). Does not own windows nor sampling (`hetjax/serving/`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hetjax.checkpoint.format import WEIGHTS, Entry
from hetjax.mesh.axes import replicated
from hetjax.mesh.multihost import leads, to_mesh, value_here
from hetjax.plans.plan import StageKey
from hetjax.runtime.execution.executor import Executor, StepContext
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.state import Read
from hetjax.runtime.execution.text_programs import TextPrograms, of_size
from hetjax.schedule.programs.action import Action

RowLosses = tuple[int, Sequence[float]]  # number of the first row, then losses in order


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """Tokens of a text from position `start` on; `last` is the index of the last one.

    Tokens after `last` are padding. The text has room for `num_positions`.
    """

    tokens: Sequence[int]
    last: int
    start: int
    num_positions: int


class ServingStages(StageRuntime):
    """The stages of a worker; call `restore` first.

    Rows and texts may have any length, whatever the plan's is. The entries from which
    weights are read have names that begin with `weights_in`.
    """

    def __init__(self, *given: Any, weights_in: str = WEIGHTS, **named: Any) -> None:
        super().__init__(*given, **named)
        self._weights_in = weights_in
        self._programs_of_texts: dict[tuple[StageKey, int], TextPrograms] = {}
        self._kept: dict[StageKey, Any] = {}

    def restore(self, read: Read) -> None:
        """Restore like `StageRuntime`, then drop what only training needs."""

        def read_in(entry: Entry) -> np.ndarray:
            if not entry.name.startswith(WEIGHTS):
                return read(entry)
            name = self._weights_in + entry.name.removeprefix(WEIGHTS)
            return read(replace(entry, name=name))

        super().restore(read_in)
        for state in self.stages.values():
            state.params = state.evaluated = state.evaluation_params()
            state.masters = state.opt_state = None

    def row_losses(
        self, number: int, inputs_GL: np.ndarray, targets_GL: np.ndarray
    ) -> list[RowLosses]:
        """Return the summed losses of those rows whose last stage is led from here.

        They are rows of a global batch. `number` distinguishes this from other work.
        Raises PeerLost.
        """
        rows: dict[Action, jax.Array] = {}
        step = replace(self._step(number, (inputs_GL, targets_GL)), rows=rows)
        length = inputs_GL.shape[1]
        runs = []
        for node, program in self._evaluation.items():
            stages = {
                key: self._sized(state, state.programs.tokens_shape[0], length)
                for key, state in self._executors[node].stages.items()
            }
            runs.append(Executor(stages).run(program, step))
        self._run(runs, step)
        return [
            (_first_row(step, action), value_here(losses_B).tolist())
            for action, losses_B in rows.items()
            if leads(self.stages[action.key].programs.mesh)
        ]

    def next_logits(self, number: int, piece: TextPiece) -> np.ndarray | None:
        """Return logits_V (fp32) of what follows the piece.

        None except from the worker that leads the last stage of the first replica. A
        piece that starts at 0 begins another text. Raises PeerLost.
        """
        rows_BL = np.tile(np.array(piece.tokens, np.int32), (self._num_texts, 1))
        sized = {k: self._sized(s, *rows_BL.shape) for k, s in self.stages.items()}
        found: list[np.ndarray] = []

        def call(key: StageKey, x: Any) -> jax.Array | None:
            y, programs = self._passed(key, sized[key], x, piece), sized[key].programs
            if not programs.function.last:
                return y
            if leads(programs.mesh):
                found.append(value_here(y).astype(np.float32, copy=False))
            return None

        step = self._step(number, (rows_BL, rows_BL))
        self._run([self._along(step, rows_BL, sized, call)], step)
        return found[0] if found else None

    def _passed(
        self, key: StageKey, state: StageState, x: Any, piece: TextPiece
    ) -> jax.Array:
        """Return a stage's output for a piece; keep what the next piece needs."""
        programs, run = state.programs, self._text_programs(key, piece.num_positions)
        whole = replicated(programs.mesh)
        last, start = (to_mesh(np.int32(n), whole) for n in (piece.last, piece.start))
        kept = self._kept.pop(key, None)
        if piece.start == 0:
            del kept  # otherwise devices would hold it twice
            y, self._kept[key] = run.begin(programs)(state.params, x, last)
        else:
            given = state.params, x, last, kept, start
            y, self._kept[key] = run.decode(programs)(*given)
        return y

    def _text_programs(self, key: StageKey, num_positions: int) -> TextPrograms:
        """Return the programs for a size of texts; made once, then reused."""
        own = TextPrograms(num_positions)
        return self._programs_of_texts.setdefault((key, num_positions), own)

    @property
    def _num_texts(self) -> int:
        """The number of copies of the text that run, so that every stage can cut them.

        Each stage of the first replica cuts them evenly over its data ranks.
        """
        stages = self.plan.replicas[self.plan.first_replica].stages
        return math.lcm(*(stage.mesh.data for stage in stages))

    def _sized(self, state: StageState, num_rows: int, length: int) -> StageState:
        return replace(state, programs=of_size(state.programs, num_rows, length))


def _first_row(step: StepContext, action: Action) -> int:
    assert action.microbatch is not None
    return step.feed.rows(action.replica, action.microbatch).start
