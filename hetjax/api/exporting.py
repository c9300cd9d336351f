# SPDX-License-Identifier: Apache-2.0
"""A run's weights as a folder that transformers loads.

Owns where a run's checkpoint is found and what goes beside the weights: sizes,
tokenizer, generation settings. Does not own the format
(`models/hugging_face/written.py`).
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from hetjax.checkpoint.format import WEIGHTS
from hetjax.checkpoint.reader import Checkpoint, steps
from hetjax.checkpoint.storage import LEASES, CheckpointStorage
from hetjax.checkpoint.stored_steps import committed_steps, fetch, fetch_newest
from hetjax.checkpoint.stores.store import Store
from hetjax.data.hugging_face import CONFIG as TOKENIZER_CONFIG
from hetjax.data.hugging_face import FILES, TOKENIZER, check_fits, kept_tokenizer
from hetjax.data.tokenizer import END_OF_DOCUMENT, load
from hetjax.errors import BadInput
from hetjax.models.adapters import merged_weight
from hetjax.models.configs import FrozenForm
from hetjax.models.hugging_face.adapters_written import write_adapters
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.written import DTYPES, Read, fields_of, write_model
from hetjax.models.model import quantised_weights
from hetjax.models.named import is_function, is_path, named_config
from hetjax.models.quantised import rounded
from hetjax.training import rundir
from hetjax.training.best import best_of, losses_of
from hetjax.training.config import RunConfig
from hetjax.training.optimizer import AVERAGES
from hetjax.training.run_model import run_model
from hetjax.training.starting import checkpoint_storage
from hetjax.training.worker import first_weights

GENERATION = "generation_config.json"
AskedStep = int | Literal["best"] | None  # None: the newest
_FLOAT32 = np.dtype(np.float32)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written: the step whose weights they are, and their precision."""

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
    ema: bool = False,
    written: Callable[[int, int], None] = lambda done, of: None,
) -> Exported:
    """Write a run's newest checkpoint, its best, or that of a step, as safetensors.

    Of a run with adapters (LoRA) these alone are written, for PEFT, unless they are to
    be `merged` into the weights that the run began with. `ema`: the averages of weights
    in place of the last ones. `dtype` None: as the model had
    that the run began with, else float32, as adapters are. It takes no more memory than
    two layers do. `written` is told of each file. BadInput for what is no run, a run
    without a checkpoint here or in its store, a model that is a function, and a folder
    that has something in it.

    >>> export_model("runs/never", "exported")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: 'runs/never', in which there is no run
    ...
    """
    config, folder = run_config(Path(run_dir)), Path(to)
    check_averaged(config, ema)
    sizes, fields = _model(config)
    alone = bool(config.lora.rank) and not merged
    if merged and not config.lora.rank:
        raise BadInput(
            got="--merged, of a run without adapters",
            allowed="runs with --lora.rank",
            fix="leave --merged out: the whole model is written",
        )
    of_model = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = dtype or ("float32" if alone else of_model)
    if dtype not in DTYPES:
        raise BadInput(
            got=f"dtype {dtype}",
            allowed=", ".join(DTYPES),
            fix="give --dtype bfloat16, say",
        )
    _check_empty(folder)
    if (Path(run_dir) / TOKENIZER).exists():
        ids = kept_tokenizer(Path(run_dir)).ids
        check_fits(ids, sizes.vocab_size, Path(run_dir))
    with open_checkpoint(config, step) as checkpoint:
        folder.mkdir(parents=True, exist_ok=True)
        read = weight_reader(config, checkpoint, ema=ema, dtype=DTYPES[dtype])
        if alone:
            write_adapters(
                folder,
                sizes,
                fields["model_type"],
                run_model(config),
                config.lora,
                read,
                DTYPES[dtype],
                base=config.init,
            )
        else:
            _write_beside(folder, Path(run_dir), fields)
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
) -> Read:
    """Return what gives each parameter by its full path: as saved, or its saved
    average, or as it has been from the beginning, rounded as it was held, with its
    adapter added. What is computed is in fp32, all else in the dtype."""
    model = run_model(config)
    saved_as = AVERAGES if ema else WEIGHTS
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
        if path not in adapters:
            return value
        spec, adapter = adapters[path]
        a, b = (saved(f"{spec.path}.{name}") for name in adapter.names)
        return merged_weight(value, a, b, adapter.scale)

    return read


def check_averaged(config: RunConfig, ema: bool) -> None:
    """Raise BadInput where averages are asked for, and the run has none."""
    if ema and not config.optimizer.ema:
        raise BadInput(
            got="--ema, of a run without averages of its weights",
            allowed="runs with --optimizer.ema",
            fix="leave --ema out, or train with --optimizer.ema 0.999, say",
        )


def run_config(run_dir: Path) -> RunConfig:
    """Return the settings of the run in that directory; BadInput if there is none."""
    previous = rundir.read_previous(run_dir)
    if previous is None:
        raise BadInput(
            got=f"{str(run_dir)!r}, in which there is no run",
            allowed="the --run-dir of a run",
            fix="give the folder that train was given; presets train in runs/PRESET",
        )
    return replace(previous.config, run_dir=run_dir)  # it may have been moved


def _model(config: RunConfig) -> tuple[Any, dict[str, Any]]:
    """The run's sizes, and all fields of a `config.json` of it."""
    if is_function(config.model):
        raise BadInput(
            got=f"a run of model {config.model}, which is a function's",
            allowed="runs of presets, and of models of Hugging Face",
            fix="take its weights from its checkpoint: hetjax.checkpoint.reader",
        )
    if is_path(config.model):
        return read_config(Path(config.model))
    sizes = named_config(config.model)
    return sizes, fields_of(sizes)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(
            got=f"--to {folder}, which has something in it",
            allowed="a folder that is empty or not there yet",
            fix="give another path",
        )


@contextmanager
def open_checkpoint(config: RunConfig, step: AskedStep) -> Iterator[Checkpoint]:
    """Open what is on the disks here, else what the run's store has.

    BadInput where there is no complete checkpoint, or none of that step, or for the
    best one none that was evaluated.
    """
    run = rundir.read_identity(config.run_dir)
    storage = checkpoint_storage(config, run)
    store = None if isinstance(step, int) else storage.store()
    if store is None and "{worker}" not in storage.directory:
        directory = Path(storage.directory)
        here = steps(directory, storage.key(), run)
        found = _best(config, here) if step == "best" else step
        yield Checkpoint.open(directory, found, storage.key(), run)
        return
    with TemporaryDirectory() as scratch:
        no_leases = shutil.ignore_patterns(LEASES)  # which come and go
        for root in glob(storage.directory.replace("{worker}", "*")):
            shutil.copytree(
                root,
                scratch,
                ignore=no_leases,
                copy_function=_linked,
                dirs_exist_ok=True,
            )
        if step == "best":
            step = _fetch_best(config, store, Path(scratch), storage)
        elif store is not None:
            fetch_newest(store, Path(scratch), -1, storage.key(), run)
        yield Checkpoint.open(Path(scratch), step, storage.key(), run)


def _fetch_best(
    config: RunConfig,
    store: Store | None,
    directory: Path,
    storage: CheckpointStorage,
) -> int:
    """The best step of those here and in the store; it is here afterwards."""
    key, run = storage.key(), storage.run
    here = steps(directory, key, run)
    stored = [] if store is None else committed_steps(store, run)
    best = _best(config, {*here, *stored})
    if store is not None and best not in here:
        fetch(store, directory, best, key)
    return best


def _best(config: RunConfig, saved: Collection[int]) -> int:
    metrics = rundir.read_journal(config.run_dir / rundir.METRICS)
    found = best_of(losses_of(metrics), saved)
    if found is None:
        raise BadInput(
            got=f"--step best, of a run in {str(config.run_dir)!r} none of whose "
            "checkpoints was evaluated",
            allowed="runs that have evaluated at a step that they saved, as all do at "
            "their end",
            fix="leave --step out: the newest checkpoint is taken",
        )
    return found


def _linked(source: str, target: str) -> None:
    """Another name for the file where its disk allows that, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_beside(folder: Path, run_dir: Path, fields: dict[str, Any]) -> None:
    """The tokenizer as the run has it, and where a text begins and ends."""
    for name in FILES:
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, folder / name)
    ids = {name: fields[name] for name in _IDS if fields.get(name) is not None}
    if not (folder / TOKENIZER_CONFIG).exists() and (folder / TOKENIZER).exists():
        words = {"tokenizer_class": "PreTrainedTokenizerFast"}
        words["eos_token"] = END_OF_DOCUMENT
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(words, indent=2) + "\n")
        ids["eos_token_id"] = load(folder / TOKENIZER).end_of_document
    (folder / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
