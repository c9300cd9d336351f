# SPDX-License-Identifier: Apache-2.0
"""Sends requests to workers whose model is used, not trained.

Owns combining the answers of several workers. Does not own how workers get their stages
(`controller.py`), nor what is requested (`hetjax/api/model_on_plan.py`).
"""

import numpy as np

from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.serving import TextPiece
from hetjax.runtime.rpc.serving_schema import (
    ContinueText,
    Score,
    array_text,
    text_array,
)


def row_losses(
    controller: Controller, inputs_GL: np.ndarray, targets_GL: np.ndarray
) -> np.ndarray:
    """Return the summed losses (nats) of the rows of a global batch, in order."""
    request = Score(
        num_rows=len(inputs_GL),
        inputs=array_text(inputs_GL),
        targets=array_text(targets_GL),
        turn=controller.next_turn(),
    )
    answers = controller.connections.ask(dict.fromkeys(controller.workers, request))
    losses_G = np.full(len(inputs_GL), np.nan)
    for first, losses in (rows for m in answers.values() for rows in m.losses):
        losses_G[first : first + len(losses)] = losses
    return losses_G


def logits_after(controller: Controller, piece: TextPiece) -> np.ndarray:
    """Return logits_V (fp32) of what follows a piece of a text."""
    request = ContinueText(piece=piece, turn=controller.next_turn())
    answers = controller.connections.ask(dict.fromkeys(controller.workers, request))
    (logits_V,) = [m.logits for m in answers.values() if m.logits is not None]
    return text_array(logits_V, np.float32)[0]
