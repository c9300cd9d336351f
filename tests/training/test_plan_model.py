# SPDX-License-Identifier: Apache-2.0
"""A plan fits its model, whichever way each was named, and no other model."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import hetjax
from hetjax.api import planning
from hetjax.api.planning import find_plan
from hetjax.api.simulating import simulate_plan
from hetjax.cluster.cluster_files import load_cluster
from hetjax.errors import BadInput
from hetjax.models.configs import LlamaConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.named import TypedName, load_named
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.plan import main as plan_command
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.simulate import main as simulate_command
from hetjax.train import main as train_command
from hetjax.training.layout.plan_choice import choose_plan
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from tests.short_runs import draws, rows_drawn
from tests.training.small import LICENCE, MODEL_CONFIG, SIX

CONFIG = replace(MODEL_CONFIG, name="Own-0.6B")
OTHER = replace(CONFIG, inner_size=40)
FEW: dict[str, Any] = {
    "global_batch": 6,
    "seq_len": 16,
    "microbatch_sizes": (2,),
    "tensor": (1,),
    "remat": ("none",),
}
OPTIONS = "--global-batch 6 --seq-len 16 --microbatch-sizes 2 --tensor 1 --remat none "
OPTIONS += f"--compare none --cluster {SIX}"
NAMINGS = ("preset", "folder", "json", "toml", "function", "function-of-config")
MODULE = """
from hetjax.models.configs import LlamaConfig
from hetjax.models.decoders import model_of

def config():
    return LlamaConfig({})

def model():
    return model_of(config())
"""


@pytest.fixture(autouse=True)
def only_quick_searches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "LOCAL_WORK", 0)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The names of the same model in each form, and the name of another model."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODEL_CONFIGS, "own-preset", replace(CONFIG, name="own-preset"))
        patch.syspath_prepend(str(folder))
        sizes = ", ".join(
            f"{field}={getattr(CONFIG, field)!r}"
            for field in LlamaConfig.__dataclass_fields__
            if isinstance(getattr(CONFIG, field), int | str)
        )
        (folder / "own_named_model.py").write_text(MODULE.format(sizes))
        yield {
            "preset": "own-preset",
            "folder": str(_folder(folder / "Own-0.6B", CONFIG)),
            "json": str(_folder(folder / "elsewhere", CONFIG) / "config.json"),
            "toml": str(_toml(folder / "own-1.5.toml", CONFIG)),
            "function": "own_named_model:model",
            "function-of-config": "own_named_model:config",
            "other": str(_folder(folder / "other" / "Own-0.6B", OTHER)),
        }
        sys.modules.pop("own_named_model", None)


def _folder(folder: Path, config: LlamaConfig) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields_of(config)))
    return folder


def _toml(path: Path, config: LlamaConfig) -> Path:
    fields = {k: v for k, v in fields_of(config).items() if isinstance(v, str | int)}
    lines = (f"{key} = {json.dumps(value)}" for key, value in fields.items())
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(name: str, folder: Path, **changes: Any) -> RunConfig:
    changes = {"planner": "even", "microbatch_size": 2} | changes
    return RunConfig(
        model=TypedName(name),
        run_dir=folder / "run",
        steps=1,
        seq_len=16,
        global_batch=6,
        simulate=True,
        dtype="float32",
        **changes,
    )


def chosen(
    name: str, folder: Path, plan: Plan | Path | None = None, **changes: Any
) -> Plan:
    """Return the plan that a run of the model would follow."""
    given = plan if isinstance(plan, Plan) else None
    config = settings(name, folder, plan=None if given else plan, **changes)
    model, cluster = load_named(config.model), load_cluster(SIX)
    preset = Preset(summary="", config=config)
    return choose_plan(config, model, cluster, preset, None, given=given).plan


def by_command(name: str, folder: Path) -> Path:
    path = folder / "by_command.json"
    words = f"--model {name} {OPTIONS} --output {path}".split()
    assert plan_command(words) == 0
    return path


def by_find_plan(name: str, folder: Path) -> Path:
    found = find_plan(model=name, cluster=SIX, quiet=True, **FEW)
    write_plan(folder / "found.json", found.plan)
    return folder / "found.json"


def of_a_run(name: str, folder: Path) -> Path:
    """Write the plan that a run follows, as the run does."""
    write_plan(folder / "plan.json", chosen(name, folder))
    return folder / "plan.json"


def by_simulate(name: str, folder: Path) -> Path:
    path = folder / "simulated.json"
    words = [str(of_a_run(name, folder)), "--model", name, "--cluster", str(SIX)]
    assert simulate_command([*words, "--output", str(path)]) == 0
    return path


# Short test runs take the first two: both ways to search, two of the namings.
SEARCHES = [("folder", by_command), ("function", by_find_plan), ("toml", by_find_plan)]
_ALL = product(NAMINGS, (by_command, by_find_plan))
SEARCHES += [pair for pair in _ALL if pair not in SEARCHES]
OTHERS = [*product(NAMINGS, (of_a_run, by_simulate))]


@pytest.mark.parametrize(
    "naming, make", [*rows_drawn(SEARCHES, short=2), *rows_drawn(OTHERS, short=6)]
)
def test_a_plan_fits_its_model_however_that_is_named(
    naming: str,
    make: Callable[[str, Path], Path],
    names: dict[str, str],
    tmp_path: Path,
):
    path = make(names[naming], tmp_path)
    plan = read_plan(path)
    for other in NAMINGS:
        assert chosen(names[other], tmp_path, path) == plan, other
        assert chosen(names[other], tmp_path, plan) == plan, other
    with pytest.raises(BadInput, match="different layers or shapes"):
        chosen(names["other"], tmp_path, path)


@pytest.mark.parametrize("naming", draws(reversed(NAMINGS), short=1))
def test_later_plans_start_from_a_plan_however_its_model_is_named(
    naming: str, names: dict[str, str], tmp_path: Path
):
    path = of_a_run(names["folder"], tmp_path)
    few = FEW | {"cluster": SIX, "current": path, "quiet": True}
    found = find_plan(model=names[naming], **few)
    assert found.plan.fingerprint == read_plan(path).fingerprint
    with pytest.raises(BadInput, match="--from .* different layers or shapes"):
        find_plan(model=names["other"], **few)


def test_a_trainer_takes_what_find_plan_found(names: dict[str, str], tmp_path: Path):
    found = find_plan(model=names["folder"], cluster=SIX, quiet=True, **FEW)
    for naming in NAMINGS:
        config = settings(names[naming], tmp_path)
        with hetjax.Trainer(config, cluster=str(SIX), plan=found.plan) as trainer:
            assert trainer.plan.replicas == found.plan.replicas


def test_a_plan_of_the_command_is_trained_and_so_is_the_runs_own(
    names: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copyfile(LICENCE, text := tmp_path / "text.txt")

    def train(naming: str, plan: Path) -> Path:
        run_dir = tmp_path / naming
        words = f"{names[naming]} --plan {plan} --run-dir {run_dir} --cluster {SIX} "
        words += f"--steps 1 --seq-len 16 --global-batch 6 --data.path {text} "
        words += f"--data.cache-dir {tmp_path / 'cache'} --simulate --dtype float32 "
        words += "--evaluation.sample-tokens 0 --evaluation.num-batches 1"
        assert train_command(words.split()) == 0, capsys.readouterr().err
        return run_dir / "plan.json"

    planned = by_command(names["toml"], tmp_path)
    own = train("folder", planned)
    assert train("function", own).read_text() == own.read_text()


def test_what_is_advised_of_another_models_plan_works(
    names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = of_a_run(names["folder"], tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as refused:
        chosen(names["other"], tmp_path, path, cluster=SIX)
    command = refused.value.fix.partition("python -m hetjax.plan ")[2]
    few = "--microbatch-sizes 2 --tensor 1 --remat none --compare none"
    assert plan_command([*shlex.split(command), *few.split()]) == 0
    advised = read_plan("plan.json")
    assert chosen(names["other"], tmp_path, Path("plan.json")) == advised


def test_a_plan_without_a_fingerprint_fits_by_name(
    names: dict[str, str], tmp_path: Path
):
    plan = replace(read_plan(of_a_run(names["folder"], tmp_path)), fingerprint=None)
    for name in (names["folder"], "Own-0.6B"):
        named = replace(plan, model=name)
        assert chosen(names["folder"], tmp_path, named).replicas == plan.replicas
    with pytest.raises(BadInput, match="is for model 'Own-0'"):
        chosen(names["folder"], tmp_path, replace(plan, model="Own-0"))


def test_simulate_asks_for_the_model_that_a_plans_name_does_not_find(
    names: dict[str, str], tmp_path: Path
):
    path = of_a_run(names["folder"], tmp_path)
    with pytest.raises(BadInput) as refused:
        simulate_plan(path, cluster=SIX, quiet=True)
    assert "for model 'Own-0.6B', but no model with that name" in refused.value.got
    assert "add --model" in refused.value.fix
    whole = simulate_plan(path, model=names["toml"], cluster=SIX, quiet=True)
    assert whole.plan.model == "own-1.5"
    with pytest.warns(UserWarning, match="model .* with different layers or shapes"):
        simulate_plan(path, model=names["other"], cluster=SIX, quiet=True)


def test_a_plan_whose_name_is_a_presets_and_whose_layers_are_not_is_refused(
    names: dict[str, str], tmp_path: Path
):
    plan = read_plan(of_a_run(names["folder"], tmp_path))
    with pytest.raises(BadInput, match="'tiny' has different layers or shapes"):
        simulate_plan(replace(plan, model="tiny"), cluster=SIX, quiet=True)
