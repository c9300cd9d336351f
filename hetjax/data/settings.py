# SPDX-License-Identifier: Apache-2.0
"""The settings of the text that a run learns from, with their help texts.

Does not own their place among the settings of a run (`training/config.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from hetjax.data.rows import TEXT_COLUMN


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to learn from."""

    path: Path | None = None
    """A .txt, .jsonl or .parquet file or a folder of such files; None: documentation
    that is installed here."""
    column: str = TEXT_COLUMN
    """Field of JSONL lines, or column of Parquet files, with the text or messages."""
    validation: Path | None = None
    """Such a file or folder to validate with; None: about 1 % of the text."""
    tokenizer: Path | None = None
    """Hugging Face folder with the tokenizer; None: one is trained on the text."""
    pack: bool | None = None
    """Whether documents share sequences without seeing each other; None: rows with a
    prompt or messages do, texts are cut into sequences as they follow each other."""
    cache_dir: Path = Path("~/.cache/hetjax")
    """Where tokenised text and compiled programs are kept; all runs share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """What a dataset is made of, besides the size of the model's vocabulary.

    No `path` means the offline corpus, no `validation` a part of the path's rows, no
    `tokenizer` (a Hugging Face folder) one that is trained on the text.
    """

    path: Path | None = None
    column: str = TEXT_COLUMN
    validation: Path | None = None
    tokenizer: Path | None = None


def ingredients(config: DataConfig) -> Ingredients:
    """Say what the dataset of these settings is made of."""
    return Ingredients(
        path=config.path,
        column=config.column,
        validation=config.validation,
        tokenizer=config.tokenizer,
    )
