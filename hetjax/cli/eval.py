# SPDX-License-Identifier: Apache-2.0
"""The command `eval`: scores a trained model on texts and questions.

Owns its options and its output. Does not own the computation
(`hetjax/api/trained_model.py`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.data.sources.forms import TEXT_COLUMN, Format
from hetjax.data.sources.questions import read_questions
from hetjax.errors import BadInput, counted_noun
from hetjax.report.progress import now_and_then, say_aside, working

_PROGRAM = "python -m hetjax.eval"
_USAGE = f"{_PROGRAM} RUN_OR_FOLDER --data FILE, or --choices FILE, or both"
_COMMON = (
    *("model", "data", "choices", "column", "window", "batch_size", "step", "on"),
    *("platform", "json"),
)
_HELP = "Score a trained model on texts, and on multiple-choice questions."


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Which model to score, and on what."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """Directory of a run, Hugging Face folder, or OWNER/MODEL on the hub."""
    data: Path | None = None
    """Text to predict: a .txt, .jsonl, .json, .csv, .tsv or .parquet file (.gz and .zst
    too, except for .parquet), or a folder of such files."""
    column: str = TEXT_COLUMN
    """Field of rows, or column of Parquet and CSV files, with the text or messages."""
    format: Format | None = None
    """Format of the rows; None: recognised from their fields."""
    choices: Path | None = None
    """A .jsonl file of rows {"context": ..., "choices": [...], "gold": index}."""
    delimiter: str = " "
    """Text between a context and each of its choices."""
    window: int | None = None
    """Tokens per window; None: as many as the model takes, up to 2,048."""
    stride: int | None = None
    """Tokens from one window of a long text to the next; None: the window's length."""
    batch_size: int | None = None
    """Windows to compute at once; None: 8, or on a plan as many as in a training
    step."""
    step: int | Literal["best"] | None = None
    """Step of a run's checkpoint. None: the newest; best: the one with the lowest
    validation loss."""
    ema: bool = False
    """Use the averages of the weights, of a run with --optimizer.ema."""
    on: Literal["auto", "plan", "one-device"] = "auto"
    """Where to compute. plan: on the devices of the run's plan, as in training;
    one-device: on the devices of this process; auto: on one device of this machine if
    the model fits, otherwise on the plan."""
    dtype: Literal["best", "bfloat16", "float16", "float32"] = "best"
    """Precision of computation; best: the best that the device has."""
    platform: Literal["auto", "cpu"] = "auto"
    """What to run on. auto: what JAX finds; cpu: the CPU in any case."""
    allow_model_code: str | None = None
    """Function, package.module:function, that may be called if the run's config.json
    names it as the model; no other function is called."""
    json: bool = False
    """Print all figures as JSON."""


def evaluate(arguments: Sequence[str]) -> None:
    """Print the scores of the model."""
    if not arguments:
        fix = f"{_PROGRAM} runs/tiny --data text.txt, say"
        raise BadInput(got="no RUN_OR_FOLDER", allowed=_USAGE, fix=fix)
    default = EvalOptions(model=tyro.MISSING)
    options = parse_options(
        default,
        arguments,
        program=_PROGRAM,
        description=_HELP,
        common=_COMMON,
    )
    if options.data is None and options.choices is None:
        raise BadInput(
            got="neither --data nor --choices",
            allowed=_USAGE,
            fix="add --data text.txt, say",
        )
    found = _scores(options)
    if options.json:
        print(json.dumps({name: value for _, each in found for name, value in each}))
        return
    for line, _ in found:
        print(line)


def _scores(options: EvalOptions) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return for each file a line to print, and figures by name."""
    # JAX takes seconds to import
    with working("starting", quiet=options.json) as line:
        from hetjax.api.trained_model import TrainedModel

        if options.choices is not None:  # before a text is scored, which may take hours
            read_questions(options.choices)
        model = TrainedModel(
            options.model,
            step=options.step,
            ema=options.ema,
            dtype=options.dtype,
            platform=options.platform,
            on=options.on,
            allow_model_code=options.allow_model_code,
            report_line=say_aside,
            doing=line,
        )
        with model:
            return [*_each_score(model, options, now_and_then(line))]


def _each_score(
    model: Any, options: EvalOptions, tell: Callable[[str], None]
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    if options.data is not None:
        text = model.evaluate(
            options.data,
            column=options.column,
            format=options.format,
            window=options.window,
            stride=options.stride,
            batch_size=options.batch_size,
            scored=lambda number: tell(f"scored {number:,} tokens"),
        )
        derived = (
            ("perplexity", text.perplexity),
            ("bits_per_byte", text.bits_per_byte),
        )
        yield _text_line(text), [*asdict(text).items(), *derived]
    if options.choices is not None:
        score = model.evaluate_choices(
            options.choices,
            delimiter=options.delimiter,
            window=options.window,
            batch_size=options.batch_size,
            scored=lambda done, of: tell(f"answered {done:,} of {of:,} questions"),
        )
        yield _choice_line(score), [*asdict(score).items()]


def _text_line(text: Any) -> str:
    return (
        f"loss {text.loss:.4f} nats per token  perplexity {text.perplexity:,.2f}  "
        f"bits per byte {text.bits_per_byte:.4f}  ({text.num_tokens:,} tokens, "
        f"{text.num_bytes:,} bytes, {text.num_rows:,} rows)"
    )


def _choice_line(score: Any) -> str:
    cut = f", {score.num_cut:,} contexts cut" if score.num_cut else ""
    return (
        f"accuracy {score.accuracy:.2%}  by bytes {score.accuracy_by_bytes:.2%}  "
        f"({counted_noun(score.num_questions, 'question')}{cut})"
    )


main = main_of(evaluate)
