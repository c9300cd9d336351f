# SPDX-License-Identifier: Apache-2.0
"""Opens or prepares a run's data, and decides whether its sequences are packed.

Owns the default of `data.pack`, and which models cannot have packed or unpacked rows.
Does not own how documents are packed (`data/packing.py`) nor how stages separate them
(`stage/function.py`).
"""

from dataclasses import replace

from hetjax.data.dataset import Dataset, checked_tokenizer, load, prepare
from hetjax.data.settings import ingredients
from hetjax.data.sources.corpus import holds_rows
from hetjax.errors import BadInput
from hetjax.files.user_cache import expanded
from hetjax.models.model import Model, can_pack
from hetjax.report.progress import Display
from hetjax.training.directory.rundir import Previous, check_same_data
from hetjax.training.settings.config import RunConfig


def run_dataset(
    config: RunConfig, model: Model, previous: Previous | None, shown: Display
) -> Dataset:
    """Open the run's own data, even if its source has changed since, or prepare it."""
    shown.doing("opening the text")
    wanted, cache_dir = ingredients(config.data), expanded(config.data.cache_dir)
    if previous is not None and _is_made(config, previous):
        dataset = load(previous.dataset)
    else:
        vocab_size = model.vocab_size
        dataset = prepare(cache_dir, wanted, vocab_size, shown.note, shown.doing)
    if previous is not None:
        check_same_data(previous, dataset, config.run_dir)
    if dataset.has_rows and not config.data.pack:
        check_balance_loss(model)
    return dataset


def check_tokenizer(config: RunConfig, model: Model, previous: Previous | None) -> None:
    """Raise BadInput if the text is still to be prepared, but the tokenizer is missing,
    broken or too large for the model."""
    if previous is None or not _is_made(config, previous):
        checked_tokenizer(ingredients(config.data), model.vocab_size)


def _is_made(config: RunConfig, previous: Previous) -> bool:
    """Return whether the run's data are there, of the same ingredients."""
    same = ingredients(config.data) == ingredients(previous.config.data)
    return same and previous.dataset.exists()


def with_packing(
    config: RunConfig, model: Model, previous: Previous | None
) -> RunConfig:
    """Return the settings with `data.pack` filled in; a run keeps its former choice.

    Raises BadInput for a model that cannot separate documents, and for a choice that
    differs from the run directory's.
    """
    asked = config.data.pack
    if asked and not can_pack(model):
        raise BadInput(
            got=f"--data.pack True, but no module of {model.name} takes documents_BL",
            allowed="packed sequences for models that separate documents",
            fix="leave --data.pack out, or have attention take documents_BL",
        )
    if previous is not None:
        pack = bool(previous.config.data.pack)
        _check_same(asked, pack, config)
    elif asked is None:
        pack = can_pack(model) and _has_rows(config)
    else:
        pack = asked
    return replace(config, data=replace(config.data, pack=pack))


def check_balance_loss(model: Model) -> None:
    """Raise BadInput for a model whose balance loss would count padding, too."""
    routings = [getattr(module.config, "routing", None) for module in model.modules]
    if any(routing and routing.balance_coefficient for routing in routings):
        raise BadInput(
            got=f"rows that are not packed for {model.name}, whose experts have a "
            "balance loss that cannot tell padding from text",
            allowed="packed rows, or texts",
            fix="leave --data.pack out",
        )


def _has_rows(config: RunConfig) -> bool:
    wanted = ingredients(config.data)
    return any(
        holds_rows(path, wanted.column, wanted.option, wanted.format)
        for path in wanted.sources
    )


def _check_same(asked: bool | None, pack: bool, config: RunConfig) -> None:
    if asked not in (None, pack):
        raise BadInput(
            got=f"--data.pack {asked}, but the run in {str(config.run_dir)!r} was "
            f"started with {pack}",
            allowed="the same sequences throughout a run",
            fix="leave --data.pack out, or give another --run-dir",
        )
