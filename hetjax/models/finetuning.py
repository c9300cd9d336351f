# SPDX-License-Identifier: Apache-2.0
"""What is trained of a model, and by which loss; which weights have adapters.

Owns the settings, and how they make of a model one that says what of it is frozen, and
what its head adds to the loss: all else (plans, costs, stages, checkpoints) reads that
from the model. Does not own what an adapter (`linear/adapters.py`) or the loss
(`head.py`) is.
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
_NAMED = 6  # of many paths, so many are named


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Which parameters are trained, and what their loss is besides cross-entropy."""

    only: str | None = None
    """Regular expression, found in the full paths of what is trained, as in
    'block_00[23]|head'. None: all parameters, else the others stay as they begin."""
    label_smoothing: float = 0.0
    """What part of each target is spread evenly over all words, as in 0.1."""
    z_loss: float = 0.0
    """Coefficient of the squared logarithm of what the softmax divides by, as in
    1e-4: it keeps logits from drifting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the model's own parameters."""

    rank: int = 0
    """Width of the adapters; 0: none, the model itself is trained."""
    alpha: float = 32.0
    """What an adapter gives is multiplied by alpha / rank."""
    targets: str | None = None
    """Regular expression, found in the full paths of linear weights that have one, as
    in 'attention.(q|v)'. None: all linear weights of attention and MLP."""
    frozen: FrozenForm | None = None
    """What frozen linear weights of attention and MLP are held in, with adapters or
    not: int8, or nf4 (QLoRA). None: the precision of compute."""


WHOLE, WITHOUT_ADAPTERS = TrainConfig(), LoraConfig()


def check_finetuning(train: TrainConfig, lora: LoraConfig) -> None:
    """Raise BadInput for settings that cannot be, whatever the model."""
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
            allowed="either: of a model with adapters these alone are trained",
            fix="leave --train.only out, or --lora.rank",
        )
    if lora.targets is not None and not lora.rank:
        raise BadInput(
            got=f"--lora.targets {lora.targets!r} without --lora.rank",
            allowed="targets of adapters that have a rank",
            fix="add --lora.rank 16, say",
        )
    if lora.frozen is not None and not lora.rank:
        raise BadInput(
            got=f"--lora.frozen {lora.frozen} without --lora.rank",
            allowed="quantised weights under adapters that have a rank",
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
    """Give the model with what is trained of it, and by which loss; BadInput if that
    is nothing."""
    check_finetuning(train, lora)
    if train.label_smoothing or train.z_loss:
        model = _with_loss(model, train)
    if lora.rank:
        return with_adapters(model, lora)
    return model if train.only is None else trained_in_part(model, train.only)


def _with_loss(model: "Model", train: TrainConfig) -> "Model":
    from hetjax.models.head import with_loss  # JAX takes a second

    return with_loss(model, label_smoothing=train.label_smoothing, z_loss=train.z_loss)


def warn_of_profile(model: "Model") -> None:
    """Warn that measured times are of the whole model, where a part is trained."""
    if any(spec.frozen for spec in model.modules):
        warnings.warn(
            "the profile is of a model that is trained as a whole: where a part of it "
            "is trained, as here, steps take less time than is planned with",
            stacklevel=2,
        )


def trained_in_part(model: "Model", regex: str) -> "Model":
    """Give the model of which only parameters of such paths are trained."""
    from hetjax.models.model import abstract_params  # JAX takes a second

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
    """Give the model frozen, and with adapters, which alone are trained."""
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
                got=f"--lora.frozen {form}, of {spec.path}.{name} of shape "
                f"{list(weight.shape)}, {weight.num_inputs} of them inputs",
                allowed="an even number in the last dim of the inputs",
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
            allowed="a regular expression, as Python's re reads it",
            fix=f"correct it: --{name} 'attention.(q|v)', say",
        ) from None


def _no_match(name: str, regex: str, what: str, paths: list[str]) -> BadInput:
    some = paths[:: max(1, len(paths) // _NAMED)][:_NAMED]
    return BadInput(
        got=f"--{name} {regex!r}, which is found in no path of the model's {what}",
        allowed=f"paths such as {', '.join(some)}" if some else "a model that has some",
        fix=f"correct --{name}, or leave it out",
    )
