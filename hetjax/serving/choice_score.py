# SPDX-License-Identifier: Apache-2.0
"""Scores multiple-choice questions by log-likelihood, as lm-eval does.

Owns the tokens of a choice after its context, the same as in lm-eval, and the two kinds
of accuracy. Does not own questions in files (`data/sources/questions.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.data.sources.questions import Question
from hetjax.data.tokenizer import Tokenizer
from hetjax.errors import BadInput
from hetjax.serving.scoring import Scorer, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceScore:
    """Shares of questions that are answered correctly.

    `accuracy`: the correct choice has the largest summed log-likelihood LL of its
    tokens (lm-eval's acc). `accuracy_by_bytes`: it has the largest LL / UTF-8 bytes of
    the choice, without the delimiter (acc_norm of lm-eval, which counts characters). On
    a tie the first choice wins. `num_cut` contexts were truncated at their beginning.
    """

    accuracy: float
    accuracy_by_bytes: float
    num_questions: int
    num_cut: int


def score_choices(
    scores: Scorer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    delimiter: str,
    length: int,
    scored: Callable[[int, int], None] = lambda done, of: None,
) -> ChoiceScore:
    """Score all questions; `delimiter` stands between a context and each choice.

    `scored` is called for each question. Raises BadInput for a choice longer than
    `length`.
    """
    found: list[list[float]] = [[] for _ in questions]
    given = list(_windows(tokenizer, questions, delimiter, length))
    for window, found_sum in scores((window for window, _ in given), length=length):
        own = found[window.passage]
        own.append(found_sum)
        if len(own) == len(questions[window.passage].choices):
            scored(window.passage + 1, len(questions))
    right, right_by_bytes = [], []
    for question, sums in zip(questions, found, strict=True):
        num_bytes = np.array([len(choice.encode()) for choice in question.choices])
        right.append(int(np.argmax(sums)) == question.gold)
        right_by_bytes.append(int(np.argmax(sums / num_bytes)) == question.gold)
    return ChoiceScore(
        accuracy=float(np.mean(right)),
        accuracy_by_bytes=float(np.mean(right_by_bytes)),
        num_questions=len(questions),
        num_cut=len({window.passage for window, is_cut in given if is_cut}),
    )


def _windows(
    tokenizer: Tokenizer, questions: Sequence[Question], delimiter: str, length: int
) -> Iterator[tuple[Window, bool]]:
    """Yield a window per choice, and whether the beginning of its context is cut."""
    for number, question in enumerate(questions):
        for choice in question.choices:
            before, after = choice_tokens(
                tokenizer, question.context, delimiter + choice
            )
            if not 0 < len(after) <= length:
                raise BadInput(
                    got=f"question {number + 1} with a choice of {len(after)} tokens",
                    allowed=f"choices of 1 to {length} tokens, the window length",
                    fix="give another --window, or remove the question",
                )
            tokens = [*before, *after][-(length + 1) :]
            counted = [False] * (len(tokens) - len(after)) + [True] * len(after)
            is_cut = len(before) + len(after) > len(tokens)
            yield Window(tokens, counted, number), is_cut


def choice_tokens(
    tokenizer: Tokenizer, context: str, choice: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a context, at least one, and those of a choice after it.

    As in lm-eval, blanks at the end of the context belong to the choice, and the tokens
    of both together are divided where those of the context alone end.
    """
    kept = context.rstrip()
    choice = context[len(kept) :] + choice
    alone = tokenizer.encode(kept)
    after = tokenizer.encode(kept + choice)[len(alone) :]
    return tokenizer.start(kept), after
