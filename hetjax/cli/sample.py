# SPDX-License-Identifier: Apache-2.0
"""The command `sample`: a trained model goes on with a text.

Owns its options and what is printed. Does not own how texts are made
(`hetjax/api/trained_model.py`).
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.errors import BadInput
from hetjax.report.progress import say_aside, working

_PROGRAM = "python -m hetjax.sample"
_USAGE = f"{_PROGRAM} RUN_OR_FOLDER --prompt TEXT"
_COMMON = (
    *("model", "prompt", "chat", "tokens", "temperature", "top_k", "top_p", "stop"),
    *("step", "json"),
)
_HELP = "Let a trained model go on with a text; it is printed as it comes."


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """Which model, and what it is to go on with."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """Directory of a run, folder of Hugging Face, or a name on its hub."""
    prompt: str = ""
    """Text to go on with; empty: the start of a document."""
    chat: bool = False
    """The prompt is what a user says, in the model's chat template."""
    tokens: Annotated[
        int, tyro.conf.arg(aliases=("--max-new-tokens", "--max-tokens"))
    ] = 64
    """Most tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token, below 1 likely ones more often."""
    top_k: int | None = None
    """Only so many of the likeliest tokens can come; None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens can come that together have this probability."""
    stop: str | None = None
    """The text ends before this one."""
    seed: int = 0
    """The same seed gives the same text."""
    step: int | Literal["best"] | None = None
    """Step of a run's checkpoint; None: the newest, best: of the lowest validation
    loss."""
    ema: bool = False
    """Take the averages of weights of a run with --optimizer.ema."""
    on: Literal["auto", "plan", "one-device"] = "auto"
    """plan: the devices of a run's plan, as in training; one-device: those of this
    process; auto: one device of this machine if it has room, else the plan."""
    dtype: Literal["best", "bfloat16", "float16", "float32"] = "best"
    """What is computed in; best: what the device does best."""
    platform: Literal["auto", "cpu"] = "auto"
    """cpu: not on the accelerators of this machine."""
    allow_model_code: str | None = None
    """Call this function, package.module:function, if the run's config.json names it as
    the model; no other is called."""
    json: bool = False
    """Print text, tokens, reason, prompt_tokens, first_s and tokens_per_s as JSON."""


def sample(arguments: Sequence[str]) -> None:
    """Print what the model goes on with."""
    if not arguments:
        fix = f"{_PROGRAM} runs/tiny --prompt 'Return the', say"
        raise BadInput(got="no RUN_OR_FOLDER", allowed=_USAGE, fix=fix)
    default = SampleOptions(model=tyro.MISSING)
    options = parse_options(
        default,
        arguments,
        program=_PROGRAM,
        description=_HELP,
        common=_COMMON,
    )
    with ExitStack() as stack:
        with working("starting", quiet=options.json) as line:  # JAX takes seconds
            from hetjax.api.trained_model import TrainedModel

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
            stack.enter_context(model)
        found = model.sample(
            options.prompt,
            num_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=options.stop,
            seed=options.seed,
            chat=options.chat,
            said=(lambda piece: None) if options.json else _say,
        )
    print(json.dumps(asdict(found)) if options.json else "")


def _say(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


main = main_of(sample)
