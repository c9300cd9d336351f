# SPDX-License-Identifier: Apache-2.0
"""Facts about the whole repository: its wheel, its links, its house rules."""

import ast
import configparser
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.house.dialect import counts
from hetjax.cluster.cluster_files import load_cluster
from tests.wheel import LINKS, build_wheel, copy_source

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hetjax"
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 400
CI_SCRIPTS = ("run", "nightly", "steps.sh")
DURATIONS = r"at most (\d+) minutes the first time, at most (\d+) after that"
DRAWERS = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}


def python_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "experiments")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def top_names(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files from which a wheel is built."""
    copy = tmp_path_factory.mktemp("source")
    copy_source(copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(source))


def test_the_wheel_holds_every_file_of_the_package_and_no_other_code(
    source: Path, wheel: zipfile.ZipFile
):
    copied = (path for path in (source / "hetjax").rglob("*") if path.is_file())
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {path.relative_to(source).as_posix() for path in copied}
    assert {"hetjax/py.typed", "hetjax/cluster/presets/tiny.toml"} <= packed


def test_the_wheel_carries_its_licence_and_its_command(wheel: zipfile.ZipFile):
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    folder = metadata.removesuffix("METADATA")
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
    assert "Version 2.0" in wheel.read(folder + "licenses/LICENSE").decode()
    commands = wheel.read(folder + "entry_points.txt").decode()
    assert "hetjax-train = hetjax.train:main" in commands


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_the_rooms_at_the_top_are_links_into_the_package(link: str, target: str):
    assert (ROOT / link).readlink() == Path(target)
    assert (ROOT / target / "__init__.py").is_file()


def test_nothing_imports_through_the_links():
    through = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if not LINKS.keys().isdisjoint(top_names(path))
    ]
    assert through == []


def test_installing_the_package_installs_all_that_it_imports():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = dict(setup["options.extras_require"])
    extras.pop("dev")
    asked = "\n".join([setup["options"]["install_requires"], *extras.values()])
    installed = {re.split(r"[<>=\[]", line)[0] for line in asked.split()}
    distributions = importlib.metadata.packages_distributions()
    unasked = {
        name: str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        for name in top_names(path) - sys.stdlib_module_names - {"hetjax"}
        if installed.isdisjoint(
            found.replace("_", "-").lower() for found in distributions.get(name, [name])
        )
    }
    assert unasked == {}


def test_a_run_that_has_its_plan_does_not_wait_for_the_solvers():
    told = "import sys, hetjax.training.session; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True
    )
    modules = set(done.stdout.split())
    assert "jax" in modules, done.stderr
    assert not modules & {"cvxpy", "scipy", "ray"}


@pytest.mark.parametrize(
    "command",
    [
        *(
            "demo",
            "devices",
            "doctor",
            "eval",
            "export",
            "launch",
            "plan",
            "preempt",
            "profile",
            "sample",
        ),
        *("simulate", "train"),
    ],
)
def test_a_command_can_say_something_before_what_takes_long_is_imported(command: str):
    told = f"import sys, hetjax.{command}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True
    )
    modules = set(done.stdout.split())
    assert f"hetjax.{command}" in modules, done.stderr
    assert not modules & {"cvxpy", "flax", "jax", "scipy"}


@pytest.mark.parametrize(("asked", "level"), [(None, "3"), ("0", "0")])
def test_noise_of_the_compiler_is_not_shown_unless_asked_for(
    asked: str | None, level: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if asked is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", asked)
    told = "import hetjax, jax, os; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    done = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == level, done.stderr


def test_every_python_file_that_is_not_empty_starts_with_its_licence():
    texts = {path: path.read_text(encoding="utf-8") for path in python_files()}
    assert len(texts) > 40
    without = [
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if text and text.splitlines()[0] != SPDX
    ]
    assert without == []


def test_no_file_of_the_package_is_too_long_to_read():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {file: n for file, n in lengths.items() if n > MAX_LINES} == {}


def test_no_file_or_room_is_a_drawer_for_what_has_no_home():
    drawers = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if DRAWERS & set(re.split(r"[_.]", path.name.lower()))
    ]
    assert drawers == []


def test_names_are_words_that_can_be_searched_for():
    found = counts(PACKAGE)
    assert [name for name, count in found["bare"].items() if count] == []
    assert [name for name, count in found["used"].items() if count] == []


def test_every_preset_cluster_can_be_read():
    presets = sorted((PACKAGE / "cluster" / "presets").iterdir())
    assert [path.name for path in presets if path.suffix != ".toml"] == []
    assert all(load_cluster(path).nodes for path in presets)


def test_the_files_that_readme_and_docs_name_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`((?:hetjax|experiments|tests)/[\w/.]+)`", text))
    assert len(named) >= 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_ci_installs_and_runs_what_the_readme_tells_people_to():
    (command,) = re.findall(r"^python3 -m venv .*pytest.*$", readme(), re.MULTILINE)
    nightly, steps = ((ROOT / ".ci" / name).read_text() for name in CI_SCRIPTS[1:])
    installed = re.findall(r"pip install (\S+ \S+)", command)
    tested = re.findall(r"python -m (pytest .*)", command)
    assert installed == ["-e '.[dev]'"] and f"{installed[0]}\n" in nightly
    assert tested == ["pytest -n 2"] and f"-m {tested[0]} " in steps


def test_readme_contributing_and_ci_tell_the_same_durations():
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"]
    told = [
        set(re.findall(DURATIONS, re.sub(r"[\s#]+", " ", path.read_text())))
        for path in texts
    ]
    assert len(told[0]) == 1 and told == [told[0]] * 3
