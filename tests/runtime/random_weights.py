# SPDX-License-Identifier: Apache-2.0
"""Weights of a sensible scale, drawn with numpy to avoid compilation."""

import numpy as np

from hetjax.models.model import Model, abstract_params


def random_params(model: Model, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"{spec.path}.{name}": (
            0.3 * rng.standard_normal(param.shape) + name.endswith("scale")
        ).astype(np.float32)
        for spec in model.modules
        for name, param in abstract_params(spec).items()
    }
