# SPDX-License-Identifier: Apache-2.0
"""The settings of the text that a run learns from, with their help texts.

Does not own their place among the settings of a run (`training/settings/config.py`).
"""

import math
from dataclasses import dataclass
from pathlib import Path

from hetjax.data.sources.forms import TEXT_COLUMN, Format
from hetjax.data.sources.readers import PATH
from hetjax.errors import BadInput

VALIDATION = "--data.validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to learn from."""

    path: Path | None = None
    """A .txt, .jsonl, .json, .csv or .parquet file (.gz and .zst, too, except for
    .parquet) or a folder of such files; None: documentation that is installed here."""
    mixture: str | None = None
    """Several files or folders instead of --data.path, each with its weight in the
    sequences: FILE=0.7,FILE=0.3."""
    column: str = TEXT_COLUMN
    """Field of rows, or column of Parquet and CSV files, with the text or messages."""
    format: Format | None = None
    """Format of the rows; None: recognised from their fields, and logged."""
    validation: Path | None = None
    """File or folder to validate with; None: hold out about 1 % of the text, or 100 kB
    of a small text, but at most 10 %."""
    tokenizer: Path | None = None
    """Hugging Face folder with the tokenizer; None: train one on the text."""
    pack: bool | None = None
    """Whether documents share sequences without attending to each other. None: yes for
    rows with a prompt or messages; other text is cut into sequences as it comes."""
    cache_dir: Path = Path("~/.cache/hetjax")
    """Where all runs keep tokenised text and compiled programs. ~/.cache means
    $XDG_CACHE_HOME if that is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """What a dataset is made of, besides the size of the model's vocabulary.

    Without a `path` it is the offline corpus, unless there is a `mixture` of several
    paths. Without `validation`, a part of the rows is held out. Without a `tokenizer`
    (a Hugging Face folder), one is trained on the text.
    """

    path: Path | None = None
    mixture: tuple[Path, ...] = ()
    column: str = TEXT_COLUMN
    format: Format | None = None
    validation: Path | None = None
    tokenizer: Path | None = None

    @property
    def sources(self) -> tuple[Path, ...]:
        """The paths to train on, in order; none means the offline corpus."""
        return self.mixture or (() if self.path is None else (self.path,))

    @property
    def option(self) -> str:
        """The option by which people gave the sources."""
        return "--data.mixture" if self.mixture else PATH

    @property
    def given(self) -> tuple[tuple[Path, str], ...]:
        """All paths that must exist, each with the option that gave it."""
        sources = tuple((path, self.option) for path in self.sources)
        aside = self.validation
        return sources + (() if aside is None else ((aside, VALIDATION),))


def ingredients(config: DataConfig) -> Ingredients:
    """Return what the dataset of these settings is made of."""
    if config.mixture is not None and config.path is not None:
        raise BadInput(
            got=f"--data.path {config.path} with --data.mixture {config.mixture}",
            allowed="one of them",
            fix=f"add {config.path}=1 to the mixture, and leave --data.path out",
        )
    return Ingredients(
        path=config.path,
        mixture=tuple(path for path, _ in _shares(config)),
        column=config.column,
        format=config.format,
        validation=config.validation,
        tokenizer=config.tokenizer,
    )


def shares(config: DataConfig) -> tuple[float, ...]:
    """Return the share of each source in the sequences; of a single one (1.0,)."""
    weights = [weight for _, weight in _shares(config)] or [1.0]
    return tuple(weight / sum(weights) for weight in weights)


def _shares(config: DataConfig) -> list[tuple[Path, float]]:
    """Return the mixture's paths with their weights; BadInput for an invalid one."""
    if config.mixture is None:
        return []
    found = []
    for entry in config.mixture.split(","):
        path, equals, weight = entry.strip().rpartition("=")
        try:
            value = float(weight) if path else math.nan
        except ValueError:
            value = math.nan
        if not (equals and 0 < value < math.inf):
            raise BadInput(
                got=f"{entry.strip()!r} in --data.mixture",
                allowed="FILE=WEIGHT with a weight above 0, separated by commas",
                fix="write, for example, --data.mixture a.jsonl=0.7,b.parquet=0.3",
            )
        found.append((Path(path), value))
    paths = [path for path, _ in found]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise BadInput(
            got=f"{twice[0]} twice in --data.mixture",
            allowed="each file or folder once",
            fix=f"give {twice[0]} the sum of its weights",
        )
    return found
