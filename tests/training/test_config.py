# SPDX-License-Identifier: Apache-2.0
"""Settings survive a round trip through their file, and the file is checked."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import BadInput
from hetjax.optimizers.table import RULES
from hetjax.plans.precision import Dtype
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import (
    DataConfig,
    EvaluationConfig,
    JoinConfig,
    OptimizerConfig,
    RunConfig,
)
from hetjax.training.settings.values import (
    changed_config,
    config_values,
    flat_values,
    read_config,
)

BASE = RunConfig(model="m", run_dir=Path("d"), steps=3, seq_len=4, global_batch=2)
PATHS = st.text("abc/.", min_size=1).map(Path)


@given(
    st.builds(
        RunConfig,
        model=st.text(),
        run_dir=PATHS,
        steps=st.integers(1, 10**9),
        seq_len=st.integers(1, 10**6),
        global_batch=st.integers(1, 10**6),
        plan=st.none() | PATHS,
        stop_after=st.none() | st.integers(1, 9),
        max_hours=st.none() | st.floats(1e-4, 1e6),
        simulate=st.booleans(),
        dtype=st.sampled_from(get_args(Dtype)),
        loss_scale_init=st.integers(0, 24).map(lambda n: 2.0**n),
        data=st.builds(DataConfig, path=st.none() | PATHS),
        evaluation=st.builds(EvaluationConfig, prompt=st.text()),
        optimizer=st.builds(
            OptimizerConfig,
            name=st.sampled_from([*RULES]),
            learning_rate=st.floats(1e-9, 1e6),
            clip_norm=st.just(float("inf")) | st.floats(1e-3, 1e3),
        ),
    )
)
def test_settings_read_back_from_json_as_they_were(config: RunConfig):
    text = json.dumps(config_values(config), allow_nan=False)
    assert read_config(json.loads(text), "config") == config


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("steps", "3", ["config.steps = '3'", "an integer"]),
        ("steps", None, ["config.steps = None"]),
        ("simulate", 1, ["config.simulate = 1", "true or false"]),
        ("dtype", "float8", ["'float8'", "best, bfloat16, float16, float32"]),
        ("optimizer", 3, ["config.optimizer = 3", "a table"]),
        ("optimizer", {"nmae": "sgd"}, ["config.optimizer.nmae", "'name'"]),
        ("learning_rate", 1.0, ["unknown key 'config.learning_rate'"]),
    ],
)
def test_a_wrong_value_in_the_file_is_named(name: str, value: object, words: list[str]):
    with pytest.raises(BadInput) as error:
        read_config({**config_values(BASE), name: value}, "config")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_settings_without_a_value_are_among_the_known_ones():
    with pytest.raises(BadInput, match=r"(?s)path, mixture.*did you mean 'path'"):
        changed_config(BASE, {"data": {"pth": "text.txt"}})


def test_a_missing_setting_in_the_file_is_named():
    values = config_values(BASE)
    del values["steps"]
    with pytest.raises(BadInput, match="no key 'steps'"):
        read_config(values, "config")


def test_a_file_from_before_a_setting_came_gives_its_default():
    values = config_values(BASE)
    del values["launcher"], values["optimizer"]["beta2"], values["tls"]
    assert read_config(values, "config") == BASE


def test_flat_names_are_those_of_the_command_line():
    flat = flat_values(BASE)
    assert flat["steps"] == 3
    assert flat["optimizer.learning_rate"] == 3e-4
    assert flat["data.path"] is None
    assert not any(isinstance(value, dict) for value in flat.values())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(BASE, global_batch=0), ["global_batch = 0", "--global-batch 1"]),
        (replace(BASE, stop_after=0), ["stop_after = 0", "--stop-after 1"]),
        (replace(BASE, max_hours=0.0), ["max_hours = 0", "--max-hours 0.0001"]),
        (replace(BASE, max_hours=float("nan")), ["max_hours = nan"]),
        (replace(BASE, seed=2**32), ["seed = 4294967296"]),
        (replace(BASE, launcher="join"), ["without --join.address", "HOST:PORT"]),
        *[
            (replace(BASE, join=JoinConfig(address="a:1", **values)), words)
            for values, words in (
                ({}, ["--join.address with --launcher embedded"]),
                ({"token_s": 0.5}, ["join.token_s = 0.5", "--join.token-s 1"]),
                ({"wait_s": float("nan")}, ["join.wait_s = nan"]),
            )
        ],
        *[
            (
                replace(BASE, launcher="join", join=JoinConfig(address=address)),
                [f"--join.address {address}", "10.0.0.1:7411"],
            )
            for address in ("here", ":1", "a:b", "a:65536", "a b:1", "[::1]:80")
        ],
        (
            replace(BASE, launcher="join", join=JoinConfig(address="0.0.0.0:80")),
            ["others cannot connect to", "ip address"],
        ),
        (
            replace(BASE, optimizer=OptimizerConfig(clip_norm=float("nan"))),
            ["optimizer.clip_norm = nan", ">= 1e-09"],
        ),
        *[
            (
                replace(BASE, optimizer=OptimizerConfig(learning_rate=rate)),
                [f"optimizer.learning_rate = {rate}", "<= 1e+06"],
            )
            for rate in (0.0, 1e39, float("inf"), float("nan"))
        ],
        (replace(BASE, steps=10**9 + 1), ["steps = 1000000001", "<= 1000000000"]),
        (
            replace(BASE, evaluation=EvaluationConfig(prompt="a\udcff")),
            ["evaluation.prompt = 'a\\udcff'", "UTF-8"],
        ),
        (
            replace(BASE, optimizer=OptimizerConfig(final_fraction=1.5)),
            ["optimizer.final_fraction = 1.5", "<= 1"],
        ),
        (
            replace(BASE, evaluation=EvaluationConfig(temperature=float("inf"))),
            ["evaluation.temperature = inf"],
        ),
    ],
)
def test_settings_out_of_range_are_refused(config: RunConfig, words: list[str]):
    with pytest.raises(BadInput) as error:
        check_config(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_settings_without_limits_are_taken():
    infinite = OptimizerConfig(clip_norm=float("inf"), weight_decay=0, warmup_steps=0)
    check_config(replace(BASE, optimizer=infinite))


def test_settings_of_a_file_may_have_their_former_names():
    values = config_values(replace(BASE, timeout_scale=2.0, standby_plans_after_s=5.0))
    values["patience"] = values.pop("timeout_scale")
    values["foresee_after_s"] = values.pop("standby_plans_after_s")
    found = read_config(values, "config")
    assert (found.timeout_scale, found.standby_plans_after_s) == (2.0, 5.0)


def test_settings_may_be_changed_by_their_former_names_with_a_warning():
    with pytest.warns(UserWarning, match="patience is called timeout_scale now"):
        assert changed_config(BASE, {"patience": 2.0}) == replace(
            BASE, timeout_scale=2.0
        )
