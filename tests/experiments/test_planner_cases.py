# SPDX-License-Identifier: Apache-2.0
"""The cases exist, and one of them is planned as people would plan it."""

import json

import pytest

from experiments.planner.cases import CASES, main


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_cluster_and_its_model(name: str):
    request = CASES[name].request()
    assert request.cluster.num_devices > 1 and request.global_batch > 1


@pytest.mark.nightly
def test_two_slow_devices_more_make_no_plan_slower(capsys: pytest.CaptureFixture[str]):
    main(["--cases", "m0", "m1"])
    few, more = map(json.loads, capsys.readouterr().out.splitlines())
    assert more["step_s"] <= few["step_s"] * 1.005
    assert few["bound_s"] <= few["step_s"] and more["bound_s"] <= more["step_s"]
