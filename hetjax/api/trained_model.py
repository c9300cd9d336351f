# SPDX-License-Identifier: Apache-2.0
"""Uses a trained model from Python: `TrainedModel`.

Owns the methods' calls to `hetjax/serving/`. Does not own where models are found
(`trained_sources.py`) and computed (`model_places.py`), nor how texts are generated and
scored.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Self

from hetjax.api.model_places import On, WeightsChoice, placed
from hetjax.api.run_checkpoints import AskedStep
from hetjax.api.trained_sources import find_trained, turn_ends
from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.chat.conversations import RowEncoder
from hetjax.data.chat.sandbox import TemplateRefuses
from hetjax.data.sources.corpus import files
from hetjax.data.sources.forms import TEXT_COLUMN, Format
from hetjax.data.sources.questions import read_questions
from hetjax.errors import BadInput
from hetjax.plans.precision import Dtype
from hetjax.serving.choice_score import ChoiceScore, score_choices
from hetjax.serving.generation import Reason, Writing, generated, write_text
from hetjax.serving.sampling import Sampling
from hetjax.serving.scoring import Scorer
from hetjax.serving.text_score import TextScore, score_text

LONGEST_WINDOW = 2048  # tokens, by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A generated text, and why it ended.

    `reason`: "end" (a token that ends a text or a turn), "stop" (the stop text),
    "tokens" (the requested number) or "max_seq_len" (as many as the model takes).
    `tokens` are all that were sampled, including the one that ends the text. `first_s`
    is the time to the first token. `tokens_per_s` counts from the second token on, when
    all programs are compiled.
    """

    text: str
    tokens: list[int]
    reason: Reason
    prompt_tokens: int
    first_s: float
    tokens_per_s: float


class TrainedModel:
    """A model to use, from a run's newest checkpoint or a Hugging Face folder.

    `on` selects where to compute. "plan": the devices of the run's plan, as in
    training; `close` the model afterwards, or use it in `with`. "one-device": one
    device if the model fits, otherwise whole layers follow each other over the devices
    of this process. "auto": one device of this machine if the model fits, otherwise the
    run's plan, if there is one; `report_line` gets the choice and the reason.

    `step` "best" takes the run's checkpoint with the lowest validation loss, `ema` the
    averages of its weights. `dtype` is the precision of weights and computation;
    "best": the best that the device has. Experts drop no tokens, even if they did in
    training. If a run names a function as the model, `allow_model_code` has to name the
    same function, or it is not called.

    Raises BadInput for a folder without a model or a tokenizer, for a run without a
    checkpoint, and for devices that are too small.

    >>> TrainedModel("runs/never")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: 'runs/never'...
    ...
    """

    def __init__(
        self,
        run_or_folder: str | Path,
        *,
        step: AskedStep = None,
        ema: bool = False,
        dtype: Dtype = "best",
        platform: Literal["auto", "cpu"] = "auto",
        on: On = "auto",
        allow_model_code: str | None = None,
        report_line: Callable[[str], None] = lambda line: None,
        doing: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._source = find_trained(
            run_or_folder, step, ema=ema, allow_model_code=allow_model_code
        )
        self._stack = ExitStack()
        asked = WeightsChoice(
            step=step,
            ema=ema,
            allow_model_code=allow_model_code,
            dtype=dtype,
            platform=platform,
        )
        self._place = self._stack.enter_context(
            placed(self._source, asked, on, report_line, doing)
        )

    def close(self) -> None:
        """End the workers of the model, if any. It cannot be used afterwards."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @property
    def dtype(self) -> str:
        """The precision of computation."""
        return self._place.dtype

    def sample(
        self,
        prompt: str = "",
        *,
        num_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: str | None = None,
        seed: int = 0,
        chat: bool = False,
        said: Callable[[str], None] = lambda piece: None,
    ) -> Sampled:
        """Generate the text after the prompt; `said` gets each piece as it comes.

        The same seed gives the same text. With `chat` the prompt is a user's message,
        in the model's chat template. The text ends before `stop`. Raises BadInput for a
        prompt that is longer than the model takes.
        """
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        if num_tokens < 1:
            raise BadInput(
                got=f"--tokens {num_tokens}",
                allowed="1 or more",
                fix="give --tokens 64",
            )
        source, ends = self._source, self._source.ends
        given = source.ids.start(prompt)
        if chat:
            given, ends = self._turn(prompt), ends | self._turn_ends()
        if len(given) > source.model.max_seq_len:
            raise BadInput(
                got=f"a prompt of {len(given)} tokens",
                allowed=f"up to {source.model.max_seq_len} tokens, the limit of model "
                f"{source.model.name}",
                fix="shorten --prompt",
            )
        writing = Writing(source.ids, ends, stop)
        clock = _Clock()
        tokens = generated(
            self._place.new_text,
            source.model.max_seq_len,
            given,
            num_tokens,
            sampling,
            source.num_words,
        )
        write_text(map(clock.ticked, tokens), writing, said, asked=num_tokens)
        assert writing.reason is not None
        return Sampled(
            text=writing.text,
            tokens=writing.tokens,
            reason=writing.reason,
            prompt_tokens=len(given),
            first_s=clock.first_s,
            tokens_per_s=clock.rate,
        )

    def evaluate(
        self,
        data: str | Path,
        *,
        column: str = TEXT_COLUMN,
        format: Format | None = None,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int | None = None,
        scored: Callable[[int], None] = lambda num_tokens: None,
    ) -> TextScore:
        """Return how well the model predicts a file of text or rows, or a folder.

        `format` is the format of the rows; None: recognised from their fields.

        Windows have `window` tokens (None: as many as the model takes, up to 2,048) and
        begin `stride` tokens apart (None: windows do not overlap). Each token counts
        once, in the window that gives it the most context. In a document all tokens of
        its text count; in a prompt with its completion and in conversations, those that
        training learns.
        """
        length = self._length(window)
        stride = _within("stride", length if stride is None else stride, length)
        scores = self._scorer(batch_size)
        path = Path(data)
        found = score_text(
            scores,
            RowEncoder(self._source.ids, self._source.template),
            files(path, column, "--data", format=format).rows(),
            length=length,
            stride=stride,
            scored=scored,
        )
        if found is None:
            raise BadInput(
                got=f"no text in {path}",
                allowed="a file that contains text",
                fix="give another --data",
            )
        return found

    def evaluate_choices(
        self,
        choices: str | Path,
        *,
        delimiter: str = " ",
        window: int | None = None,
        batch_size: int | None = None,
        scored: Callable[[int, int], None] = lambda done, of: None,
    ) -> ChoiceScore:
        """Return how many multiple-choice questions of a JSONL file the model solves.

        A row is `{"context": ..., "choices": [...], "gold": index}`, or has "query" and
        "answer" for "context" and "gold". The `delimiter` precedes each choice. A
        context that is too long for a window loses its beginning.
        """
        return score_choices(
            self._scorer(batch_size),
            self._source.ids,
            read_questions(Path(choices)),
            delimiter=delimiter,
            length=self._length(window),
            scored=scored,
        )

    def __repr__(self) -> str:
        return f"TrainedModel({self._source.model.name!r}, {self.dtype}, {self._place})"

    def _scorer(self, batch_size: int | None) -> Scorer:
        if batch_size is not None:
            batch_size = _within("batch-size", batch_size)
        return self._place.scorer(batch_size)

    def _length(self, window: int | None) -> int:
        most = self._source.model.max_seq_len
        longest = min(most, LONGEST_WINDOW)
        return _within("window", longest if window is None else window, most)

    def _turn(self, prompt: str) -> list[int]:
        """Return the tokens of a user's message and the start of the model's turn."""
        messages = [{"role": "user", "content": prompt}]
        try:
            text = self._template.render(messages, add_generation_prompt=True)
        except TemplateRefuses as refused:
            raise BadInput(
                got=f"--chat with a prompt that the chat template refuses: {refused}",
                allowed="a user message that the model's chat template accepts",
                fix="give another --prompt",
            ) from refused
        return self._source.ids.encode(text)

    def _turn_ends(self) -> set[int]:
        return turn_ends(self._template, self._source.ids)

    @property
    def _template(self) -> ChatTemplate:
        if self._source.template is None:
            raise BadInput(
                got="--chat with a model that has no chat template",
                allowed="--chat with a model whose tokenizer has a chat template",
                fix="leave --chat out, or put a chat_template.jinja into the model's "
                "folder (of a run: hetjax export RUN_DIR --to FOLDER writes one)",
            )
        return self._source.template


class _Clock:
    """The times at which tokens arrived."""

    def __init__(self) -> None:
        self._start_s = perf_counter()
        self._times_s: list[float] = []

    def ticked(self, token: int) -> int:
        self._times_s.append(perf_counter())
        return token

    @property
    def first_s(self) -> float:
        return self._times_s[0] - self._start_s

    @property
    def rate(self) -> float:
        """Tokens per second after the second token, when all is compiled; 0 if none."""
        later_s = self._times_s[1:]
        took_s = later_s[-1] - later_s[0] if later_s else 0.0
        return (len(later_s) - 1) / took_s if took_s else 0.0


def _within(name: str, value: int, most: int | None = None) -> int:
    if value < 1 or (most is not None and value > most):
        raise BadInput(
            got=f"--{name} {value}",
            allowed="1 or more" if most is None else f"1 to {most}",
            fix=f"give --{name} {most or 8}, say",
        )
    return value
