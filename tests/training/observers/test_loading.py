# SPDX-License-Identifier: Apache-2.0
"""Which names and values are accepted as observers, before anything is written."""

import sys
from pathlib import Path

import pytest

from hetjax.cli.train import parse
from hetjax.errors import BadInput
from hetjax.train import main
from hetjax.training.observers.loading import observer_sources
from hetjax.training.settings.presets import preset
from hetjax.training.settings.values import config_values
from tests.training.observers.seen import MODULE, SEEN, Seen

BROKEN = "raise RuntimeError('no licence')\n"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an observer in a module that cannot be imported."""
    (tmp_path / "broken_module.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    return "broken_module:Watch"


def test_names_of_trackers_code_classes_and_values_are_taken():
    given = ["tensorboard", f"{MODULE}:Seen", f"{MODULE}:SEEN", Seen, SEEN]
    sources = observer_sources(given)
    names = ["tensorboard", f"{MODULE}:Seen", f"{MODULE}:SEEN"]
    assert [each.name for each in sources] == [
        *names,
        f"{MODULE}:Seen",
        f"{MODULE}:Seen",
    ]
    made = [each.observer() for each in sources[1:]]
    assert all(isinstance(each, Seen) for each in made)
    assert made[1] is made[3] is SEEN and SEEN not in (made[0], made[2])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mlflow", "tensorboard, wandb, or package.module:name"),
        ("tests/seen.py", "package.module:name"),
        ("not_a_package:Watch", "No module named 'not_a_package'"),
        (f"{MODULE}:NotThere", "NotThere"),
        ("os:getcwd", "standard library"),
        (f"{MODULE}:Raising", None),
        (f"{MODULE}:MODULE", "is a str"),
        ("tests.training.small:stage", "without arguments"),
        ("broken_module:Watch", "RuntimeError: no licence"),
    ],
)
def test_what_cannot_be_one_is_refused(name: str, why: str | None, broken: str):
    if why is None:
        assert observer_sources([name])  # all its arguments have defaults
        return
    with pytest.raises(BadInput) as refused:
        observer_sources([name])
    text = str(refused.value).replace("prometheus, ", "")
    assert why in text and name in refused.value.got and refused.value.fix


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("wandb", "wandb"),
        ("tensorboard", "tensorboardX"),
        ("prometheus", "prometheus_client"),
    ],
)
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
):
    for module in [m for m in sys.modules if m.startswith("hetjax.training.observers")]:
        if module.rpartition(".")[2] in ("weights_and_biases", name):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BadInput) as refused:
        observer_sources([name])
    assert refused.value.fix == f"pip install 'hetjax[{name}]'"


def test_the_command_refuses_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = tmp_path / "run"
    words = ["tiny", "--run-dir", str(run_dir), "--observer", "not_a_package:Watch"]
    assert main(words) == 2
    assert "observer not_a_package:Watch" in capsys.readouterr().err
    assert not run_dir.exists()


def test_observers_are_no_settings_of_the_run():
    config, _ = parse(["tiny", "--observer", "wandb", "--observer", f"{MODULE}:Seen"])
    assert config == preset("tiny").config
    assert "observer" not in str(config_values(config))
