# SPDX-License-Identifier: Apache-2.0
"""The planner's tables: sums over ranges of layers, with equal ranges merged."""

import numpy as np

from hetjax.planner.model.problem import merged_ranges
from tests.planner.brute import random_instance


def test_equal_ranges_share_a_row() -> None:
    range_IJ, counts_KU = merged_ranges((0, 1, 1, 1, 2))
    assert range_IJ[1, 2] == range_IJ[2, 3] == range_IJ[3, 4]
    assert range_IJ[1, 3] == range_IJ[2, 4]
    assert range_IJ[0, 2] != range_IJ[1, 3]
    assert counts_KU[:, range_IJ[0, 4]].tolist() == [1, 3, 0]
    assert counts_KU.shape == (3, 12)  # 3 of blocks only, 4 with 0, 4 with 2, 1 all


def test_what_a_stage_takes_is_the_sum_over_its_layers() -> None:
    for seed in range(20):
        instance = random_instance(seed)
        p, t = instance.problem, instance.terms
        for i in range(p.num_layers):
            for j in range(i + 1, p.num_layers + 1):
                row = p.range_IJ[i, j]
                assert t.stage_s_BO is not None
                busy_BO = sum(
                    (t.busy_s_BOK[:, :, k] for k in t.kinds[i:j]), t.stage_s_BO
                )
                np.testing.assert_allclose(p.busy_s_BOU[:, :, row], busy_BO)
                update_BO = sum(t.update_s_BOK[:, :, k] for k in t.kinds[i:j])
                np.testing.assert_allclose(p.after_s_ABOU[1][:, :, row], update_BO)


def test_no_microbatch_gets_through_faster_than_on_the_fastest_devices() -> None:
    for seed in range(20):
        instance = random_instance(seed)
        p, t = instance.problem, instance.terms
        busy_BL = t.busy_s_BOK[:, :, list(t.kinds)].min(axis=1)
        before_BL = busy_BL.cumsum(axis=1)
        assert (p.fastest_s_BJ[:, 1:] >= before_BL * (1 - 1e-9)).all()
