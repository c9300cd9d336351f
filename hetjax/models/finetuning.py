# SPDX-License-Identifier: Apache-2.0
"""Marks in a model what is trained, by which loss, and which weights have adapters.

Owns the settings, and their application to a model. The model then says what is frozen
and what its head adds to the loss; plans, costs, stages and checkpoints read that from
the model. Does not own the definition of adapters (`linear/adapters.py`) and of the
loss (`head.py`).
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from hetjax.errors import BadInput
from hetjax.models.configs import FrozenForm

if TYPE_CHECKING:
    from hetjax.models.model import Model, ModuleSpec

_MOST_RANK = 4096
_MOST_Z_LOSS = 1.0
_NAMED = 6  # of many paths, an error names so many


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Which parameters to train, and terms of the loss besides cross-entropy."""

    only: str | None = None
    """Regular expression that selects the parameters to train by their full paths,
    'block_00[23]|head' for instance; all others stay frozen. None: all parameters."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary, 0.1 for
    instance."""
    z_loss: float = 0.0
    """Coefficient of the squared log of the softmax's denominator, 1e-4 for instance,
    which keeps logits from drifting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the model's own parameters."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, train the model itself."""
    alpha: float = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: str | None = None
    """Regular expression that selects the linear weights with adapters by their full
    paths, 'attention.(q|v)' for instance. None: all of attention and MLP."""
    frozen: FrozenForm | None = None
    """Storage format of the frozen linear weights of attention and MLP, with adapters
    or without: int8, or nf4 (QLoRA). None: the compute precision."""


WHOLE, WITHOUT_ADAPTERS = TrainConfig(), LoraConfig()


def check_finetuning(train: TrainConfig, lora: LoraConfig) -> None:
    """Raise BadInput for settings that no model allows."""
    if not 0 <= train.label_smoothing < 1:
        raise BadInput(
            got=f"train.label_smoothing = {train.label_smoothing}",
            allowed="0 (none) or more, and below 1",
            fix="give --train.label-smoothing 0.1, say",
        )
    if not 0 <= train.z_loss <= _MOST_Z_LOSS:
        raise BadInput(
            got=f"train.z_loss = {train.z_loss}",
            allowed=f"0 (none) to {_MOST_Z_LOSS:g}",
            fix="give --train.z-loss 1e-4, say",
        )
    if not 0 <= lora.rank <= _MOST_RANK:
        raise BadInput(
            got=f"lora.rank = {lora.rank}",
            allowed=f"0 (no adapters) to {_MOST_RANK}",
            fix="give --lora.rank 16, say",
        )
    if not 0 < lora.alpha < math.inf:
        raise BadInput(
            got=f"lora.alpha = {lora.alpha}",
            allowed="a number above 0",
            fix="give --lora.alpha 32, say",
        )
    if lora.rank and train.only is not None:
        raise BadInput(
            got=f"--train.only {train.only!r} with --lora.rank {lora.rank}",
            allowed="either of them: with adapters, only the adapters are trained",
            fix="leave out --train.only or --lora.rank",
        )
    for name in ("targets", "frozen"):
        given = getattr(lora, name)
        if given is not None and not lora.rank:
            raise BadInput(
                got=f"--lora.{name} {given} without --lora.rank",
                allowed=f"--lora.{name} together with --lora.rank",
                fix="add --lora.rank 16, say",
            )
    if lora.frozen not in (None, *get_args(FrozenForm)):
        raise BadInput(
            got=f"lora.frozen = {lora.frozen!r}",
            allowed=", ".join(get_args(FrozenForm)),
            fix="give --lora.frozen nf4, say",
        )
    for name, regex in (("train.only", train.only), ("lora.targets", lora.targets)):
        if regex is not None:
            _compiled(name, regex)


def fine_tuned(model: "Model", train: TrainConfig, lora: LoraConfig) -> "Model":
    """Return the model with its trained parameters and loss terms set. Raises BadInput
    if no parameter would be trained."""
    check_finetuning(train, lora)
    if train.label_smoothing or train.z_loss:
        model = _with_loss(model, train)
    if lora.rank:
        return with_adapters(model, lora)
    return model if train.only is None else trained_in_part(model, train.only)


def _with_loss(model: "Model", train: TrainConfig) -> "Model":
    from hetjax.models.head import with_loss  # importing JAX takes a second

    return with_loss(model, label_smoothing=train.label_smoothing, z_loss=train.z_loss)


def warn_of_profile(model: "Model") -> None:
    """Warn, if a part of the model is trained, that the profile is of the whole."""
    if any(spec.frozen for spec in model.modules):
        warnings.warn(
            "the profile is of training the whole model, but this run trains a part of "
            "it: steps take less time than planned",
            stacklevel=2,
        )


def trained_in_part(model: "Model", regex: str) -> "Model":
    """Return the model with only parameters trained whose path matches the regex."""
    from hetjax.models.model import abstract_params  # importing JAX takes a second

    pattern = _compiled("train.only", regex)

    def frozen(spec: "ModuleSpec") -> tuple[str, ...]:
        names = abstract_params(spec)
        return tuple(n for n in names if not pattern.search(f"{spec.path}.{n}"))

    found = _mapped(model, lambda spec: replace(spec, frozen=frozen(spec)))
    if not any(p.trained for m in found.modules for p in abstract_params(m).values()):
        paths = [
            f"{m.path}.{name}" for m in model.modules for name in abstract_params(m)
        ]
        raise _no_match("train.only", regex, "parameters", paths)
    return found


def with_adapters(model: "Model", lora: LoraConfig) -> "Model":
    """Return the model with frozen parameters, and with adapters, which are trained."""
    from hetjax.models.linear.adapters import Adapter
    from hetjax.models.model import abstract_params

    pattern = _compiled("lora.targets", lora.targets or "")

    def adapted(spec: "ModuleSpec") -> "ModuleSpec":
        own = abstract_params(spec)
        adapters = tuple(
            Adapter(name, lora.rank, lora.alpha / lora.rank)
            for name, parameter in own.items()
            if parameter.can_have_adapter and pattern.search(f"{spec.path}.{name}")
        )
        frozen = replace(spec, frozen=tuple(own), adapters=adapters)
        return frozen if lora.frozen is None else _quantised(frozen, lora.frozen)

    found = _mapped(model, adapted)
    if not any(spec.adapters for spec in found.modules):
        paths = [
            f"{spec.path}.{name}"
            for spec in model.modules
            for name, parameter in abstract_params(spec).items()
            if parameter.can_have_adapter
        ]
        raise _no_match("lora.targets", lora.targets or "", "linear weights", paths)
    return found


def _quantised(spec: "ModuleSpec", form: FrozenForm) -> "ModuleSpec":
    from hetjax.models.linear.quantised import can_quantise
    from hetjax.models.model import quantised_weights

    found = replace(spec, frozen_as=form)
    for name, weight in quantised_weights(found).items():
        assert weight.num_inputs is not None
        if not can_quantise(form, weight.shape, weight.num_inputs):
            raise BadInput(
                got=f"--lora.frozen {form} for {spec.path}.{name} of shape "
                f"{list(weight.shape)} (input dims: the first {weight.num_inputs})",
                allowed="an even size of the last input dim",
                fix="give --lora.frozen int8",
            )
    return found


def _mapped(model: "Model", change: Callable[["ModuleSpec"], "ModuleSpec"]) -> "Model":
    layers = tuple(
        replace(layer, modules=tuple(map(change, layer.modules)))
        for layer in model.layers
    )
    return replace(model, layers=layers)


def _compiled(name: str, regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise BadInput(
            got=f"--{name} {regex!r}: {error}",
            allowed="a regular expression of Python's re",
            fix=f"correct it: --{name} 'attention.(q|v)', say",
        ) from None


def _no_match(name: str, regex: str, what: str, paths: list[str]) -> BadInput:
    some = paths[:: max(1, len(paths) // _NAMED)][:_NAMED]
    return BadInput(
        got=f"--{name} {regex!r}, which matches no path of the model's {what}",
        allowed=f"paths such as {', '.join(some)}" if some else f"a model with {what}",
        fix=f"correct --{name}, or leave it out",
    )
