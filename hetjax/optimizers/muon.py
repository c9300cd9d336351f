# SPDX-License-Identifier: Apache-2.0
"""Muon: Jordan et al. 2024, for the matrices inside blocks; Adam for the rest.

Owns which parameters Muon treats as matrices, and which of their dims are rows.
"""

from typing import TYPE_CHECKING, Any

from hetjax.optimizers.rule import BETA, STEPS, Rule, mean_problems
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax
    from optax.contrib import MuonDimensionNumbers

_LOOKED_UP = ("table", "positions")  # rows that are looked up, not projections
_RMS = 0.2  # of Muon's updates, like Adam's: arXiv 2502.16982, section 2.2


def _transform(
    config: OptimizerConfig, rate: "optax.Schedule"
) -> "optax.GradientTransformation":
    import optax
    from optax.contrib import muon

    from hetjax.optimizers.decay import matrices

    direction = muon(
        learning_rate=-1.0,  # the end of the chain makes this a descent
        beta=config.beta1,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=_projections,
        consistent_rms=_RMS,
    )
    decayed = optax.add_decayed_weights(config.weight_decay, matrices)
    return optax.chain(direction, decayed, optax.scale_by_learning_rate(rate))


def _projections(params: Any) -> Any:
    """Return for each parameter the dims that Muon takes for rows and columns.

    None: Adam updates it. Heads are columns of a weight that produces them, and rows of
    one that consumes them. Each expert is a separate matrix.
    """
    import jax
    from optax.contrib import MuonDimensionNumbers

    def dims(path: Any, leaf: Any) -> "MuonDimensionNumbers | None":
        name = str(path[-1].key).rpartition(".")[2]
        if name in _LOOKED_UP or name.endswith("bias"):
            return None
        if leaf.ndim == 3 and name in ("q", "k", "v"):
            return MuonDimensionNumbers(0, (1, 2))
        if leaf.ndim == 3:
            return MuonDimensionNumbers(*(((0, 1), 2) if name == "out" else (1, 2)))
        return MuonDimensionNumbers(0, 1) if leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(dims, params)


MUON = Rule(
    summary="orthogonalised momentum: its singular values are made equal; adamw for "
    "vectors and tables",
    transform=_transform,
    fields={"beta1": BETA, "beta2": BETA},
    numbers={
        "MuonState.count": "updates",  # bias correction
        "MuonState.ns_coeffs": "constant",  # of the Newton-Schulz iteration
        "ScaleByAdamState.count": "updates",
        **STEPS,
    },
    is_elementwise=False,
    problems=mean_problems,
)
