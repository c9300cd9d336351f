# SPDX-License-Identifier: Apache-2.0
"""The command `sample`: generates text with a trained model.

Owns its options and its output. Does not own the generation
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
_HELP = "Continue a text with a trained model; print the text as it is generated."


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """Which model to use, and which text to continue."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    """Directory of a run, Hugging Face folder, or OWNER/MODEL on the hub."""
    prompt: str = ""
    """Text to continue; if empty, the start of a document."""
    chat: bool = False
    """Treat the prompt as a user's message, in the model's chat template."""
    tokens: Annotated[
        int, tyro.conf.arg(aliases=("--max-new-tokens", "--max-tokens"))
    ] = 64
    """Maximum number of tokens to add."""
    temperature: float = 0.8
    """Temperature; 0 always takes the most likely token; below 1, likely tokens come
    more often."""
    top_k: int | None = None
    """Draw only from this many of the most likely tokens; None: from all."""
    top_p: float = 1.0
    """Draw only from the fewest tokens that together have this probability."""
    stop: str | None = None
    """End before this text."""
    seed: int = 0
    """The same seed gives the same text."""
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
    """Print text, tokens, reason, prompt_tokens, first_s and tokens_per_s as JSON."""


def sample(arguments: Sequence[str]) -> None:
    """Print the text that the model generates."""
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
