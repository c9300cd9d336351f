# SPDX-License-Identifier: Apache-2.0
"""Measures attention's rates by form and length, beside those that costs assume.

Owns which forms and lengths fit a card, and the rows. Does not own how attention is
called (`attention_passes.py`).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from experiments.gpu.rows import Row
from experiments.gpu.timing.attention_passes import PASSES, AttentionPasses, HeadSizes
from experiments.gpu.timing.calibrating import TimedProduct
from experiments.gpu.timing.card import Card
from hetjax.models.attention.kernel_attention import FORWARD
from hetjax.plans.attention import EVERYWHERE
from hetjax.plans.plan import AttentionForm

LONGEST = "attention of the longest sequence, heads of 128, both passes"
# as in Llama-3-8B and in the published figures
_HEADS_OF_128 = HeadSizes(num_heads=32, num_kv_heads=8, head_size=128)
_SCORES_AT_ONCE = 5  # fp32 arrays of all scores that compiled `xla` attention holds

Timed = dict[str, TimedProduct]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """`positions` is the number that fills a device, in several sequences if they are
    short. `timed` collects the passes of the form that a stage uses."""

    card: Card
    heads: HeadSizes
    positions: int
    timed: dict[str, list[TimedProduct]] = field(
        default_factory=lambda: {name: [] for name in PASSES}
    )

    def longest(self, length: int) -> Iterator[Row]:
        """Measure both passes together, with the heads of published figures."""
        form = self.card.attention(length, _HEADS_OF_128.head_size)
        passes = self._passes(length, form, _HEADS_OF_128)
        found, note = _timed(passes, self.card)
        yield Row(
            what=LONGEST,
            measured=_tflops([*found.values()]),
            unit="TFLOP/s",
            predicted=_tflops([*passes.predicted(self.card.spec).values()]),
            note=f"{length:,} positions, {form}{note}",
        )

    def as_stages(self, lengths: Sequence[int]) -> Iterator[Row]:
        """Measure attention in the form that a stage uses at each length."""
        for length in lengths:
            form = self.card.attention(length, self.heads.head_size)
            found = yield from self._rows(length, form)
            for name, passed in found.items():
                self.timed[name].append(passed)

    def otherwise(self, lengths: Sequence[int]) -> Iterator[Row]:
        """Measure the forms without a kernel; `xla` only where all scores fit."""
        for length in lengths:
            usual = self.card.attention(length, self.heads.head_size)
            if usual != EVERYWHERE:
                yield from self._rows(length, EVERYWHERE)
            rows = self.heads.num_heads * length * self._sequences(length)
            scores_bytes = 4 * rows * length
            if _SCORES_AT_ONCE * scores_bytes < self.card.spec.memory_gib * 2**30:
                yield from self._rows(length, "xla")

    def _rows(self, length: int, form: AttentionForm) -> Generator[Row, None, Timed]:
        passes = self._passes(length, form, self.heads)
        predicted = passes.predicted(self.card.spec)
        found, note = _timed(passes, self.card)
        for name in PASSES:
            yield Row(
                what=f"attention {_word(name)}, {length:,} positions, {form}",
                measured=_tflops([found[name]] if found else []),
                unit="TFLOP/s",
                predicted=_tflops([predicted[name]]),
                note=f"{passes.sequences} sequences, heads of {self.heads.head_size}"
                + (f", {1e6 * found[name].seconds:.1f} us" if found else note),
            )
        return found

    def _passes(
        self, length: int, form: AttentionForm, heads: HeadSizes
    ) -> AttentionPasses:
        return AttentionPasses(
            sequences=self._sequences(length),
            length=length,
            heads=heads,
            form=form,
            precision=self.card.precision,
        )

    def _sequences(self, length: int) -> int:
        return max(1, self.positions // length)


def _timed(passes: AttentionPasses, card: Card) -> tuple[Timed, str]:
    """Return both passes; where they do not run, none and the reason."""
    try:
        return passes.timed(card.device), ""
    except RuntimeError as error:  # XLA's: not supported here, or too large
        return {}, f": {str(error).partition(chr(10))[0]}"


def _tflops(passes: Sequence[TimedProduct]) -> float | None:
    seconds = sum(passed.seconds for passed in passes)
    return sum(passed.flops for passed in passes) / seconds / 1e12 if passes else None


def _word(name: str) -> str:
    return "forward" if name == FORWARD else "backward"
