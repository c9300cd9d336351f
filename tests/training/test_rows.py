# SPDX-License-Identifier: Apache-2.0
"""Rows of which some targets do not count, and models that are not for them."""

import pytest

from hetjax.errors import BadInput
from hetjax.training.run import check_no_balance_loss
from tests.runtime.random_plans import random_case


def test_experts_with_a_balance_loss_are_refused():
    with pytest.raises(BadInput, match="whose experts have a balance loss"):
        check_no_balance_loss(random_case(2).model)
    check_no_balance_loss(random_case(1).model)
