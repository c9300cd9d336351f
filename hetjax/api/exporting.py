# SPDX-License-Identifier: Apache-2.0
"""Exports a run's weights as a folder that transformers loads.

Owns which weights to write. Does not own the choice of a checkpoint
(`run_checkpoints.py`), the files beside the weights (`written_beside.py`) nor the
format (`models/hugging_face/written.py`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetjax.api.run_checkpoints import AskedStep, open_checkpoint, run_config
from hetjax.api.written_beside import write_beside
from hetjax.checkpoint.format import WEIGHTS
from hetjax.checkpoint.reader import Checkpoint
from hetjax.data.hugging_face import TOKENIZER, check_fits, kept_tokenizer
from hetjax.errors import BadInput
from hetjax.models.configs import FrozenForm
from hetjax.models.hugging_face.adapter_config import has_adapters
from hetjax.models.hugging_face.adapters_written import write_adapters
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import DTYPES, Read, write_model
from hetjax.models.linear.adapters import merged_weight
from hetjax.models.linear.quantised import rounded
from hetjax.models.model import Model, abstract_params, quantised_weights
from hetjax.models.named import is_function, is_path, named_config
from hetjax.optimizers.optimizer import AVERAGES, optimizer
from hetjax.runtime.execution.updates.evaluated_weights import evaluated_weights
from hetjax.training.run_model import run_model
from hetjax.training.settings.config import RunConfig
from hetjax.training.worker import first_weights

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export: the step of the weights, and their precision."""

    folder: Path
    step: int
    dtype: str
    what: Literal["model", "adapters"]


def export_model(
    run_dir: str | Path,
    to: str | Path,
    *,
    dtype: str | None = None,
    step: AskedStep = None,
    merged: bool = False,
    base: str | Path | None = None,
    ema: bool = False,
    written: Callable[[int, int], None] = lambda done, of: None,
) -> Exported:
    """Write a run's newest checkpoint, its best, or that of a step, as safetensors.

    For a run with adapters (LoRA) it writes only the adapters, for PEFT, unless they
    are to be `merged` into the initial weights. `base` is a folder for these initial
    weights, rounded as the run held them; the adapters then name it as their base.
    `ema` writes the averages of the weights instead of the last weights. `dtype` None:
    float32 for adapters, otherwise the precision of the initial model, or float32 if
    its folder names none. Memory use is at most that of two layers. `written` is called
    for each file.

    Raises BadInput if there is no run, if it has no checkpoint here or in its store, if
    its model is a function, or if a folder to write is not empty.

    >>> export_model("runs/never", "exported")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: no run in 'runs/never'
    ...
    """
    config, folder = run_config(Path(run_dir)), Path(to)
    check_averaged(config, ema)
    _check_adapted(config, merged, base)
    sizes, fields = _model(config)
    alone = bool(config.lora.rank) and not merged
    of_model = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    of_base = dtype or of_model
    dtype = dtype or ("float32" if alone else of_model)
    if dtype not in DTYPES:
        raise BadInput(
            got=f"dtype {dtype}",
            allowed=", ".join(DTYPES),
            fix="give --dtype bfloat16, say",
        )
    _check_empty("to", folder)
    if base is not None:
        _check_empty("base", Path(base))
        _check_apart(folder, Path(base))
    if (Path(run_dir) / TOKENIZER).exists():
        ids = kept_tokenizer(Path(run_dir)).ids
        check_fits(ids, sizes.vocab_size, Path(run_dir))
    with open_checkpoint(config, step) as checkpoint:
        folder.mkdir(parents=True, exist_ok=True)
        read = weight_reader(config, checkpoint, ema=ema, dtype=DTYPES[dtype])
        if base is not None:
            Path(base).mkdir(parents=True, exist_ok=True)
            held = weight_reader(
                config, checkpoint, dtype=DTYPES[of_base], adapted=False
            )
            write_beside(Path(base), Path(run_dir), config, fields)
            write_model(Path(base), sizes, fields, held, of_base, written)
        if alone:
            write_adapters(
                folder,
                sizes,
                fields["model_type"],
                run_model(config),
                config.lora,
                read,
                DTYPES[dtype],
                base=config.init if base is None else str(Path(base).absolute()),
            )
        else:
            write_beside(folder, Path(run_dir), config, fields)
            write_model(folder, sizes, fields, read, dtype, written)
        return Exported(
            folder=folder,
            step=checkpoint.step,
            dtype=dtype,
            what="adapters" if alone else "model",
        )


def weight_reader(
    config: RunConfig,
    checkpoint: Checkpoint,
    *,
    ema: bool = False,
    dtype: np.dtype = _FLOAT32,
    adapted: bool = True,
) -> Read:
    """Return a function that reads a parameter by its full path.

    For a saved parameter, it returns the value at which the optimizer evaluates the
    model, usually the saved value, or with `ema` the saved average. For any other, it
    returns the initial value. It rounds weights that the run held quantised, and adds
    adapters if `adapted`. The values of both are fp32; all others have `dtype`.
    """
    model = run_model(config)
    _check_same_model(config, model, checkpoint)
    saved_as = AVERAGES if ema else WEIGHTS
    init = optimizer(config.optimizer, config.steps).init
    evaluated = evaluated_weights(model, init, checkpoint.read)
    first = first_weights(config, model, lets_go=True)
    first_written = first_weights(config, model, dtype, lets_go=True)
    adapters = {
        f"{m.path}.{a.weight}": (m, a) for m in model.modules for a in m.adapters
    }

    quantised: dict[str, tuple[FrozenForm | None, int]] = {
        f"{m.path}.{name}": (m.frozen_as, weight.num_inputs or 0)
        for m in model.modules
        for name, weight in quantised_weights(m).items()
    }

    def saved(path: str, dtype: np.dtype = _FLOAT32) -> np.ndarray:
        if evaluated is not None:
            return evaluated(path).astype(dtype, copy=False)
        return checkpoint.read(checkpoint.entries[f"{saved_as}{path}"], dtype)

    def read(path: str, shape: tuple[int, ...]) -> np.ndarray:
        is_computed = path in adapters or path in quantised
        if f"{WEIGHTS}{path}" in checkpoint.entries:
            value = saved(path, _FLOAT32 if is_computed else dtype)
        else:
            weights = first if is_computed else first_written
            assert weights is not None, path
            value = weights(path, shape)
        assert value.shape == shape, (path, value.shape)
        form, num_inputs = quantised.get(path, (None, 0))
        if form is not None:
            value = rounded(form, value, num_inputs)
        if path not in adapters or not adapted:
            return value
        spec, adapter = adapters[path]
        a, b = (saved(f"{spec.path}.{name}") for name in adapter.names)
        return merged_weight(value, a, b, adapter.scale)

    return read


def _check_same_model(config: RunConfig, model: Model, checkpoint: Checkpoint) -> None:
    """Raise BadInput if the checkpoint lacks a parameter that the run trains.

    Causes: the model's folder has changed, or the run had dropped the folder's own
    head.
    """
    trained = [
        f"{spec.path}.{name}"
        for spec in model.modules
        for name, parameter in abstract_params(spec).items()
        if parameter.trained
    ]
    missing = [p for p in trained if f"{WEIGHTS}{p}" not in checkpoint.entries]
    if missing:
        raise BadInput(
            got=f"a checkpoint without {missing[0]}, which the model in {config.model} "
            "has",
            allowed="the model as it was when the run trained it",
            fix=f"restore {config.model} as it was (for head.table: remove "
            "lm_head.weight from its files), or train again with another --run-dir",
        )


def check_averaged(config: RunConfig, ema: bool) -> None:
    """Raise BadInput if averages are requested and the run has none."""
    if ema and not config.optimizer.ema:
        raise BadInput(
            got="--ema for a run that keeps no weight average",
            allowed="runs with --optimizer.ema",
            fix="leave --ema out, or train with --optimizer.ema 0.999, say",
        )


def _model(config: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Return the sizes of the run's model, and all fields of its `config.json`."""
    if is_function(config.model):
        raise BadInput(
            got=f"a run whose model is the function {config.model}",
            allowed="runs of presets, and of Hugging Face models",
            fix="read its weights from its checkpoint: hetjax.checkpoint.reader",
        )
    if is_path(config.model):
        return read_config(Path(config.model))
    sizes = named_config(config.model)
    return sizes, fields_of(sizes)


def _check_adapted(config: RunConfig, merged: bool, base: str | Path | None) -> None:
    """Raise BadInput for options that need adapters if the run has none, or for both
    options. Warn of adapters for weights that no folder holds."""
    asked = {"--merged": merged, "--base": base is not None}
    options = [option for option, is_asked in asked.items() if is_asked]
    if options and not config.lora.rank:
        raise BadInput(
            got=f"{options[0]} for a run without adapters",
            allowed="runs with --lora.rank",
            fix=f"leave {options[0]} out: the whole model is written",
        )
    if len(options) == 2:
        raise BadInput(
            got="--merged with --base",
            allowed="the whole model, or adapters and the weights under them",
            fix="leave one of the two out",
        )
    if config.lora.rank and not options and (why := _why_not_alone(config)):
        warnings.warn(
            f"exporting only adapters, {why}: export --merged writes the whole model, "
            "--base FOLDER also the weights under the adapters",
            stacklevel=3,
        )


def _why_not_alone(config: RunConfig) -> str | None:
    """Return why the adapters do not fit the weights in `config.init`, or None."""
    if config.init is None:
        return "trained over weights that were drawn from the run's seed"
    if config.lora.frozen is not None:
        return (
            f"trained over weights that were rounded to {config.lora.frozen}; over "
            f"those of {config.init} they give different logits"
        )
    if has_adapters(Path(config.init)):
        return f"trained over adapters, {config.init}, which PEFT cannot use as a base"
    return None


def _check_apart(folder: Path, base: Path) -> None:
    if folder.absolute() == base.absolute():
        raise BadInput(
            got=f"--base {base}, which is also --to",
            allowed="two folders: one of adapters, one of the model under them",
            fix="give another path for one of the two",
        )


def _check_empty(option: str, folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(
            got=f"--{option} {folder}, which is not an empty folder",
            allowed="a folder that is empty, or does not exist yet",
            fix="give another path",
        )
