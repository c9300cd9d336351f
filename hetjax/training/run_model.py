# SPDX-License-Identifier: Apache-2.0
"""The model of a run, with what is trained of it.

Does not own how models are named (`models/named.py`) nor what fine-tuning makes of one
(`models/finetuning.py`).
"""

from hetjax.models.finetuning import fine_tuned
from hetjax.models.model import Model
from hetjax.models.named import load_named
from hetjax.training.config import RunConfig


def run_model(config: RunConfig) -> Model:
    """Give what the run trains; BadInput for a model or a part that there is not."""
    return fine_tuned(load_named(config.model), config.train, config.lora)
