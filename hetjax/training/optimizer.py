# SPDX-License-Identifier: Apache-2.0
"""The optimizer settings as an Optax transformation and a learning-rate schedule.

Owns which parameters decay, which are matrices to Muon, the course of the learning
rate, and the average of the weights. Does not own clipping, which needs the norm over
all stages (NORM, `hetjax/runtime/`), nor state.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from hetjax.runtime.execution.update import OfWholeLeaves
from hetjax.stage.eight_bits import Moment
from hetjax.training.settings.config import OptimizerConfig

AVERAGES = "opt.ema."  # how names of entries of checkpoints begin that are `Averaged`
_BLOCK = 4096  # steps
_LOOKED_UP = ("table", "positions")  # rows for tokens, by which nothing is projected
# fields of Optax's states that are moments, and whether they have signs
_SIGNS: dict[type, tuple[tuple[str, bool], ...]] = {
    optax.ScaleByAdamState: (("mu", True), ("nu", False)),
    optax.ScaleByLionState: (("mu", True),),
    optax.TraceState: (("trace", True),),
}
_MUON_RMS = 0.2  # of its updates, like Adam's: arXiv 2502.16982, section 2.2


def optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Return the leaf-wise rule of a run of so many steps, without clipping."""
    rule = _rule(config, num_steps)
    return _averaging(rule, config.ema) if config.ema else rule


class Averaged(NamedTuple):
    """The state of a rule, and the average of the weights it has made."""

    rule: Any
    ema: Any


def _averaging(
    rule: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """The rule, with an average that begins as the first weights."""

    def init(params: Any) -> Averaged:
        return Averaged(rule.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        assert params is not None, "averages are of weights"
        updates, of_rule = rule.update(updates, state.rule, params)
        made = optax.apply_updates(params, updates)
        ema = optax.incremental_update(made, state.ema, 1 - decay)
        return updates, Averaged(of_rule, ema)

    kind = OfWholeLeaves if isinstance(rule, OfWholeLeaves) else type(rule)
    return kind(init, update)


def _rule(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    rate = schedule(config, num_steps)
    decay, beta1, beta2 = config.weight_decay, config.beta1, config.beta2
    if config.state_bits == 8:
        return _with_moments(_rule(replace(config, state_bits=32), num_steps))
    decayed = optax.add_decayed_weights(decay, matrices)
    if config.name == "adamw":
        return optax.adamw(rate, beta1, beta2, weight_decay=decay, mask=matrices)
    if config.name == "lion":
        return optax.lion(rate, beta1, beta2, weight_decay=decay, mask=matrices)
    if config.name == "sgd":
        return optax.chain(decayed, optax.sgd(rate, momentum=beta1 or None))
    direction = _adafactor() if config.name == "adafactor" else _muon(config)
    descent = optax.scale_by_learning_rate(rate)
    return OfWholeLeaves(*optax.chain(direction, decayed, descent))


def _with_moments(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule, with the moments of its state marked as such: they are held in 8 bits
    between two updates."""

    def init(params: Any) -> Any:
        return _marked(rule.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = rule.update(updates, _unmarked(state), params)
        return updates, _marked(state)

    return optax.GradientTransformation(init, update)


def _marked(state: Any) -> Any:
    def of(node: Any) -> Any:
        signs = _SIGNS.get(type(node))
        if signs is None:
            return node
        moments = {name: Moment(getattr(node, name), s) for name, s in signs}
        return node._replace(**moments)

    return jax.tree.map(of, state, is_leaf=lambda node: type(node) in _SIGNS)


def _unmarked(state: Any) -> Any:
    def of(node: Any) -> Any:
        return node.values if isinstance(node, Moment) else node

    return jax.tree.map(of, state, is_leaf=lambda node: isinstance(node, Moment))


def _adafactor() -> optax.GradientTransformation:
    """arXiv 1804.04235, algorithm 4 without momentum; Optax's own decays by no rate."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest; a rate of -1 leaves descent to others."""
    return muon(
        learning_rate=-1.0,
        beta=config.beta1,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=_projections,
        consistent_rms=_MUON_RMS,
    )


def _projections(params: Any) -> Any:
    """Say of each parameter which dims Muon takes for rows and columns; None: Adam's.

    Heads are columns of what makes them, and rows of what takes them; experts are
    matrices of their own.
    """

    def of(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        name = str(path[-1].key).rpartition(".")[2]
        if name in _LOOKED_UP or name.endswith("bias"):
            return None
        if leaf.ndim == 3 and name in ("q", "k", "v"):
            return MuonDimensionNumbers(0, (1, 2))
        if leaf.ndim == 3:
            return MuonDimensionNumbers(*(((0, 1), 2) if name == "out" else (1, 2)))
        return MuonDimensionNumbers(0, 1) if leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(of, params)


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the steps done.

    A linear rise over the warm-up, then the schedule's course to the last step.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, num_steps // 2)
    rest = num_steps - warmup
    if config.schedule == "cosine":
        course = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        course = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    else:
        course = optax.constant_schedule(peak)
    if not warmup:
        return course
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, course], [warmup])


class LearningRates:
    """The learning rate of each step, by its index, for people to read.

    Made a block of steps at a time: on its own a value would wait for busy devices.
    """

    def __init__(self, config: OptimizerConfig, num_steps: int, first: int = 0) -> None:
        """Make the block that holds step `first`."""
        self._of_steps = jax.jit(jax.vmap(schedule(config, num_steps)))
        self._start, self._block = self._made(first)

    def __getitem__(self, step: int) -> float:
        if not self._start <= step < self._start + len(self._block):
            self._start, self._block = self._made(step)
        return float(self._block[step - self._start])

    def _made(self, step: int) -> tuple[int, np.ndarray]:
        start = step - step % _BLOCK
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return start, np.asarray(self._of_steps(np.arange(start, start + _BLOCK)))


def matrices(params: Any) -> Any:
    """Mark the parameters that decay: two dims or more and no bias."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        return leaf.ndim >= 2 and not str(path[-1].key).endswith("bias")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
