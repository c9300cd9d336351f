# SPDX-License-Identifier: Apache-2.0
"""Loads the model of a run with its trained part, and warns of unsuitable weights.

Does not own how models are named (`models/named.py`) nor how fine-tuning changes a
model (`models/finetuning.py`).
"""

import warnings

from hetjax.models.configs import numbers
from hetjax.models.finetuning import WITHOUT_ADAPTERS, fine_tuned
from hetjax.models.hugging_face.adapter_config import base_folder
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.model import Model
from hetjax.models.named import is_function, load_named, named_config
from hetjax.training.settings.config import RunConfig


def run_model(config: RunConfig) -> Model:
    """Return the model that the run trains.

    Raises BadInput if the model, or a part that is to be trained, does not exist.
    """
    return fine_tuned(load_named(config.model), config.train, config.lora)


def warn_of_other_model(config: RunConfig) -> None:
    """Warn if the initial weights are of a model that only has the same shapes."""
    if config.init is None or is_function(config.model):
        return
    ours = numbers(named_config(config.model))
    theirs = numbers(read_config(base_folder(local_folder(config.init)))[0])
    differ = [
        f"{name} {theirs.get(name)} (here {ours.get(name)})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if differ:
        warnings.warn(
            f"the weights of {config.init} are from a model that differs from "
            f"{config.model}: {', '.join(differ)}; to start with that model's outputs, "
            "give the folder in place of the model",
            stacklevel=2,
        )


def warn_of_random_base(config: RunConfig) -> None:
    """Warn if adapters are trained over weights that were never trained."""
    if config.lora.rank and config.init is None:
        warnings.warn(
            f"--lora.rank {config.lora.rank} without --init: the weights under the "
            "adapters are random and stay so; give --init FOLDER with weights to adapt",
            stacklevel=2,
        )


def warn_of_missing_rank(config: RunConfig) -> None:
    """Warn if settings of adapters have no effect, as there are none."""
    asked = {"alpha": config.lora.alpha, "targets": config.lora.targets}
    given = [
        f"--lora.{name} {value}"
        for name, value in asked.items()
        if value != getattr(WITHOUT_ADAPTERS, name)
    ]
    if given and not config.lora.rank:
        warnings.warn(
            f"{' and '.join(given)} without --lora.rank: there are no adapters, and "
            "the model itself is trained; give --lora.rank 16, say, to train adapters",
            stacklevel=2,
        )
