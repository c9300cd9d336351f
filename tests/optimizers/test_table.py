# SPDX-License-Identifier: Apache-2.0
"""Every rule's description of itself is true; unknown rules are refused."""

import pkgutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax.optimizers
from hetjax.errors import BadInput
from hetjax.optimizers.checks import optimizer_problems
from hetjax.optimizers.optimizer import NonElementwise, optimizer
from hetjax.optimizers.rule import Rule
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.optimizers.table import RULES, rule_named

DOCS = Path(__file__).parents[2] / "docs"
WEIGHTS = {
    "block.w": jax.random.normal(jax.random.key(0), (8, 6)),
    "norm.scale": jnp.ones(8),
}
# names in checkpoints: saved runs must stay readable
STATE = {
    "adamw": "0.count 0.mu 0.nu 2.count",
    "adafactor": "0.0.count 0.0.v 0.0.v_col 0.0.v_row 2.count",
    "lion": "0.count 0.mu 2.count",
    "muon": "0.inner_states.adam.inner_state.0.count "
    "0.inner_states.adam.inner_state.0.mu 0.inner_states.adam.inner_state.0.nu "
    "0.inner_states.muon.inner_state.0.count 0.inner_states.muon.inner_state.0.mu "
    "0.inner_states.muon.inner_state.0.ns_coeffs 2.count",
    "schedule-free": "b1 base_optimizer_state.0.count base_optimizer_state.0.nu "
    "base_optimizer_state.2.count max_lr step_count weight_sum z",
    "sgd": "1.0.trace 1.1.count",
}


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, schedule="constant", warmup_steps=0, **changes)


def changes(config: OptimizerConfig, weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return three updates' changes, by gradients that each depend on one weight."""
    rule, now = optimizer(config, 9), weights
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state: Any = rule.init(weights)
        for factor in (3.0, -50.0, 70.0):
            grads = jax.tree.map(lambda w, f=factor: jnp.sin(f * w), now)
            updates, state = rule.update(grads, state, now)
            now: Any = optax.apply_updates(now, updates)
    return {leaf: np.asarray(now[leaf] - old) for leaf, old in weights.items()}


def test_every_file_with_a_rule_has_its_row_and_its_place_in_help_and_docs():
    found = [
        value
        for module in pkgutil.iter_modules(hetjax.optimizers.__path__)
        for value in vars(import_module(f"hetjax.optimizers.{module.name}")).values()
        if isinstance(value, Rule)
    ]
    assert {*map(id, found)} == {*map(id, RULES.values())}
    help_ = Path(import_module("hetjax.optimizers.settings").__file__ or "").read_text()
    page = (DOCS / "train.md").read_text()
    of_page = page[page.index("## Optimizers") : page.index("### Moments in 8 bits")]
    for name, rule in RULES.items():
        assert name in help_
        (row,) = [
            line for line in of_page.splitlines() if line.startswith(f"| `{name}`")
        ]
        assert f"| {rule.summary} |" in row
        assert all(f"`{field}`" in row for field in rule.fields), row
        assert row.count("`") == 2 * (1 + len(rule.fields))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_reads_the_fields_that_it_names_and_no_other(name: str):
    config, rule = config_of(name), RULES[name]
    before = changes(config, WEIGHTS)
    for field, value in {"beta1": 0.5, "beta2": 0.7}.items():
        after = changes(replace(config, **{field: value}), WEIGHTS)
        same = [np.array_equal(after[leaf], was) for leaf, was in before.items()]
        assert all(same) == (field not in rule.fields), field


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_elementwise_if_it_updates_halves_as_it_does_the_whole(name: str):
    config, rule = config_of(name, weight_decay=0.01), RULES[name]
    whole = changes(config, WEIGHTS)["block.w"]
    halves = [
        changes(config, {"block.w": half})["block.w"]
        for half in jnp.split(WEIGHTS["block.w"], 2)
    ]
    is_alike = np.allclose(np.concatenate(halves), whole, rtol=1e-5, atol=1e-8)
    assert is_alike == rule.is_elementwise
    assert isinstance(optimizer(config, 9), NonElementwise) != rule.is_elementwise


@pytest.mark.parametrize("name", RULES)
def test_state_has_the_names_under_which_runs_have_saved_it(name: str):
    state = optimizer(config_of(name), 9).init(WEIGHTS)
    found = set[str]()
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        keys = [
            getattr(k, "idx", getattr(k, "name", getattr(k, "key", k))) for k in path
        ]
        found.add(".".join(str(key) for key in keys if key not in WEIGHTS))
    assert sorted(found) == sorted(STATE[name].split())


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.moments])
def test_moments_that_may_be_in_8_bits_are_marked_and_nothing_else_is(name: str):
    def shown(bits: Any) -> Any:
        state = optimizer(config_of(name, state_bits=bits), 9).init(WEIGHTS)
        return jax.tree_util.tree_leaves_with_path(state)

    kept, marked = shown(32), shown(8)
    fields = {moment.rpartition(".")[2] for moment in RULES[name].moments}
    for (path, _), (marked_path, _) in zip(kept, marked, strict=True):
        names = {getattr(key, "name", None) for key in path}
        is_marked = "values" in {getattr(key, "name", None) for key in marked_path}
        assert is_marked == bool(names & fields), path


def test_rules_agree_on_the_numbers_of_states_that_they_share():
    said: dict[str, str] = {}
    for rule in RULES.values():
        for number, what in rule.numbers.items():
            assert said.setdefault(number, what) == what, number


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("sophia", "an estimate of the Hessian's diagonal"),
        ("L-BFGS", "the loss at other weights within a step"),
        ("sam", "the loss at other weights within a step"),
        ("prodigy", "sums over all parameters"),
    ],
)
def test_a_rule_that_needs_another_input_is_refused_by_name(name: str, needs: str):
    with pytest.raises(BadInput) as refused:
        rule_named(name)
    assert name in refused.value.got and needs in refused.value.got
    assert "schedule-free" in refused.value.allowed
    assert "--optimizer.name adamw" in refused.value.fix


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"schedule": "cosine"}, ["schedule cosine", "--optimizer.schedule constant"]),
        ({"ema": 0.9}, ["--optimizer.ema 0.9", "--optimizer.ema 0"]),
        ({"beta1": 0.0}, ["beta1 = 0", "0.1 <= optimizer.beta1", "beta1 0.9"]),
        ({"state_bits": 8}, ["state-bits 8", "adamw", "lion", "sgd"]),
    ],
)
def test_schedule_free_refuses_what_it_could_only_ignore(
    changed: dict[str, Any], words: list[str]
):
    config = replace(config_of("schedule-free"), **changed)
    (problem,) = optimizer_problems(config)
    assert all(word in str(problem) for word in words), str(problem)
    assert not [*optimizer_problems(config_of("schedule-free"))]


def test_settings_and_their_checks_import_no_jax():
    told = "import sys, hetjax.training.settings.checks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert "hetjax.optimizers.schedule_free" in modules, done.stderr
    assert not modules & {"jax", "optax", "flax"}
