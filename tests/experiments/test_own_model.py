# SPDX-License-Identifier: Apache-2.0
"""The example of a user's model trains by its name, with every launcher."""

from pathlib import Path

import pytest

from hetjax.train import main
from tests.training.test_workers import command, losses, set_environment


def test_workers_and_one_process_train_it_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    set_environment(monkeypatch)
    told = "--steps 2 --seq-len 16 --global-batch 6 --simulate --cluster tiny"
    told += " --planner even --microbatch-size 2 --dtype float32"
    runs = [tmp_path / "embedded", tmp_path / "processes"]
    for run_dir in runs:
        _, *options = command(run_dir, tmp_path / "cache", *told.split())
        launcher = ["--launcher", run_dir.name]
        assert main(["experiments.own_model:model", *options, *launcher]) == 0
    alone, apart = map(losses, runs)
    assert apart == pytest.approx(alone, rel=1e-5) and len(alone) == 4
    assert alone[0] == pytest.approx(6.93, abs=0.05)  # log(1024): untrained
