# SPDX-License-Identifier: Apache-2.0
"""A run's model on the run's plan gives the results of one device.

Both use the weights of the same checkpoint.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.api.trained_model import TrainedModel
from hetjax.errors import BadInput
from hetjax.eval import main as evaluate
from hetjax.models.configs import Routing
from hetjax.models.decoders import LlamaConfig
from hetjax.models.finetuning import LoraConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import TypedName
from hetjax.plans.plan import Plan, Replica, StageMesh
from hetjax.sample import main as sample
from hetjax.serving.scoring import Window
from hetjax.training.directory.rundir import CONFIG, LOGS, locked
from hetjax.training.run_model import run_model
from hetjax.training.session import run
from hetjax.training.settings.config import OptimizerConfig
from tests.short_runs import draws
from tests.training.small import (
    MODEL_CONFIG,
    ONE_REPLICA,
    TWO_REPLICAS,
    but,
    plan,
    small_preset,
    stage,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

# the first stage splits its microbatches over two devices with the same weights
DATA_FIRST = plan(
    Replica(
        num_microbatches=3,
        microbatch_size=2,
        stages=(
            replace(stage("a100-0", (0, 1), (0, 3), 2), mesh=StageMesh(data=2)),
            stage("h20-0", (0,), (3, 4), 1),
        ),
    )
)


def small_moe() -> LlamaConfig:
    """Return a config whose experts drop many tokens in training."""
    routing = Routing(num_experts=4, top_k=2, capacity_factor=0.5)
    return replace(MODEL_CONFIG, name="small-moe", max_seq_len=64, routing=routing)


def trained(folder: Path, of: Plan, inner_size: int = 32, **changes: Any) -> Path:
    """Return the directory of a run that has taken two steps.

    Its model has room for texts longer than the training texts, and weights that no
    seed gives.
    """
    config = replace(MODEL_CONFIG, max_seq_len=64, inner_size=inner_size)
    model = folder / "model"
    model.mkdir(parents=True)
    rng = np.random.default_rng(0)
    write_model(
        model,
        config,
        fields_of(config),
        lambda _, shape: rng.normal(0, 0.3, shape).astype(np.float32),
        "float32",
    )
    given = {"model": str(model), "init": str(model), "steps": 2} | changes
    of = replace(of, model=given["model"], fingerprint=None)
    chosen = but(small_preset(folder, of), **given)
    assert run(chosen.config, chosen, run_model(chosen.config)) == 0
    return chosen.config.run_dir


def windows() -> list[Window]:
    """Return windows of many lengths, with few and many tokens that count."""
    rng, found = np.random.default_rng(3), list[Window]()
    for number in range(8):
        length = int(rng.integers(2, 40))
        counted = [False, True, *(rng.random(length - 2) < 0.6).tolist()]
        tokens = rng.integers(0, 300, length).tolist()
        found.append(Window(tokens, counted, number))
    return found


def log_likelihoods(model: TrainedModel, given: Sequence[Window]) -> list[float]:
    scores = model._place.scorer(None)
    return [found for _, found in scores(given, length=40)]


def both(run_dir: Path, **asked: Any) -> tuple[TrainedModel, TrainedModel]:
    one = TrainedModel(run_dir, on="one-device", dtype="float32", **asked)
    return TrainedModel(run_dir, on="plan", **asked), one


def check_same(run_dir: Path, **asked: Any) -> None:
    """Assert that tokens are equal, and log-likelihoods to 1e-5."""
    ours, theirs = both(run_dir, **asked)
    with ours:
        found, expected = (log_likelihoods(m, windows()) for m in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for prompt, length in (("Licen", 9), ("in this case, or not" * 2, 20)):
            texts = [
                m.sample(prompt, num_tokens=length, temperature=0).tokens
                for m in (ours, theirs)
            ]
            assert texts[0] == texts[1]
        drawn = [m.sample("A", num_tokens=12, seed=5).tokens for m in (ours, theirs)]
        assert drawn[0] == drawn[1] and len({*drawn[0]}) > 3


@pytest.mark.parametrize("of", draws([TWO_REPLICAS, DATA_FIRST, ONE_REPLICA], short=1))
def test_stages_find_what_one_device_finds(tmp_path: Path, of: Plan):
    check_same(trained(tmp_path, of))


def test_stages_hold_frozen_weights_as_they_were_and_averages_if_asked(tmp_path: Path):
    lora = LoraConfig(rank=2, alpha=6.0, frozen="nf4")
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, ema=0.75)
    run_dir = trained(tmp_path, ONE_REPLICA, 128, lora=lora, optimizer=optimizer)
    for ema in (True, False):
        check_same(run_dir, ema=ema)


def test_no_expert_turns_a_token_away_on_a_plan_either(tmp_path: Path):
    name = TypedName(f"{__name__}:{small_moe.__name__}")
    run_dir = trained(tmp_path, TWO_REPLICAS, model=name, init=None)
    check_same(run_dir, allow_model_code=name)


def json_of(capsys: pytest.CaptureFixture[str], command, *arguments: str) -> Any:
    capsys.readouterr()
    assert command([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("environment")
def test_worker_processes_score_and_go_on_as_one_device_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = trained(tmp_path, ONE_REPLICA, launcher="processes")
    before = (run_dir / "events.jsonl").read_text()
    text, questions = tmp_path / "held.txt", tmp_path / "questions.jsonl"
    text.write_text("Permission is granted.\n\n\nThe work, or a copy of it, is free.\n")
    rows = (
        {"query": "The License is", "choices": ["free", "not", "a work"], "answer": i}
        for i in range(3)
    )
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = [str(run_dir), "--data", str(text), "--choices", str(questions)]
    asked = [str(run_dir), "--prompt", "Permission", "--tokens", "9", "--temperature=0"]
    one = ["--on", "one-device", "--dtype", "float32"]
    found, expected = (
        json_of(capsys, evaluate, *scored, *on) for on in (["--on", "plan"], one)
    )
    assert found.keys() == expected.keys() and found["num_questions"] == 3
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    texts = [json_of(capsys, sample, *asked, *on) for on in (["--on", "plan"], one)]
    assert texts[0]["tokens"] == texts[1]["tokens"]
    assert {f"{name}.log" for name in ("v100-0", "a100-0", "h20-0")} == {
        log.name for log in (run_dir / LOGS).iterdir()
    }
    assert (run_dir / "events.jsonl").read_text() == before


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, quickly: None) -> Path:
    return trained(tmp_path_factory.mktemp("done"), ONE_REPLICA)


def not_simulated(run_dir: Path) -> list[str]:
    settings = json.loads((run_dir / CONFIG).read_text())
    settings["config"]["simulate"] = False
    (run_dir / CONFIG).write_text(json.dumps(settings))
    return []


BAD: list[tuple[Callable[[Path], list[str]], str]] = [
    (lambda run_dir: ["--dtype", "bfloat16"], "--dtype bfloat16 on the run's plan"),
    (lambda run_dir: ["--platform", "cpu"], "--platform cpu on the run's plan"),
    (lambda run_dir: ["--batch-size", "3"], "--batch-size 3 on the run's plan"),
    (lambda run_dir: ["--step", "1"], "no complete checkpoint of step 1"),
    (not_simulated, "the run's cluster is not here"),
]


@pytest.mark.parametrize(("spoilt", "told"), BAD)
def test_what_the_plan_cannot_do_is_refused_in_three_parts(
    done: Path, capsys: pytest.CaptureFixture[str], spoilt, told: str
):
    kept = (done / CONFIG).read_text()
    try:
        options = spoilt(done)
        check_refused([str(done), "--on", "plan", *options], told, capsys)
    finally:
        (done / CONFIG).write_text(kept)


def test_a_run_that_goes_on_is_not_used_on_its_plan_beside_that(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    with locked(done):
        check_refused([str(done), "--on", "plan"], "is in use by process", capsys)


def check_refused(arguments: list[str], told: str, capsys) -> None:
    capsys.readouterr()
    text = ["--data", str(Path(__file__))]
    assert evaluate([*arguments, *text]) == BadInput.exit_code == 2
    heard = capsys.readouterr()
    assert told in heard.err and heard.out == ""
    assert all(part in heard.err for part in ("got:", "allowed:", "fix:"))


def test_where_nothing_limits_memory_one_device_is_taken_and_the_plan_named(
    done: Path, capsys: pytest.CaptureFixture[str]
):
    assert sample([str(done), "--prompt", "A", "--tokens", "1"]) == 0
    assert capsys.readouterr().err.count("on one device: ") == 1
