# SPDX-License-Identifier: Apache-2.0
"""The notebooks: stored without outputs, and run from the first cell to the last.

Each sets its sizes in one cell, tagged `settings`, which this test replaces with small
ones. `.ci/run` runs this folder on one version of JAX.
"""

import configparser
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.serving.model_folder import CONFIG, write_folder
from tests.short_runs import draws
from tests.training.small import LICENCE
from tests.training.test_workers import set_environment

ROOT = Path(__file__).parents[2]
FOLDER = "experiments/notebooks"
NAMES = (
    "01_first_run",
    "02_plan_your_fleet",
    "03_unlike_devices",
    "04_losing_a_node",
    "05_finetune_hf",
)
# the page Start of docs/ and tests of plans, islands and recoveries cover these
_LATER = set(NAMES) - {"05_finetune_hf"}
SMALL = {
    "01_first_run": 'STEPS, TEXT, PROMPT = 3, "text.txt", "The"',
    "02_plan_your_fleet": 'MODEL = "tiny"\n'
    'CHOICES = {"global_batch": 8, "seq_len": 32, "microbatch_sizes": (8,), '
    '"remat": ("none",), "tensor": (1,)}',
    "03_unlike_devices": 'STEPS, TEXT, LEARNING_RATE = 3, "text.txt", 0.1\n'
    "GLOBAL_BATCH, SEQ_LEN = 6, 16",
    # the end must be far enough to come after the kill
    "04_losing_a_node": 'STEPS, KILLED_AFTER, TEXT = 40, 3, "text.txt"\n'
    "GLOBAL_BATCH, SEQ_LEN = 16, 16",
    "05_finetune_hf": 'MODEL, STEPS, RANK = "base", 3, 4\n'
    "GLOBAL_BATCH, SEQ_LEN = 4, 96",
}
# what a reader sees: kinds of outputs of all cells together, words in them
SHOWN = {
    "01_first_run": (("image/png", "text/html"), ("step 3/3  loss", "val_loss")),
    "02_plan_your_fleet": (
        ("image/svg+xml", "image/png", "text/html"),
        ("tokens per second", "megatron", "one more A100", "usd_per_million_tokens"),
    ),
    "03_unlike_devices": (("text/html",), ("one jax.jit", "pipeline: at most")),
    "04_losing_a_node": (("image/png", "text/html"), ("recovered", "goodput 0.")),
    "05_finetune_hf": (("image/png",), ("step 3/3  loss", "adapter_model.safetensors")),
}


def read(name: str) -> Any:
    return nbformat.read(ROOT / FOLDER / f"{name}.ipynb", as_version=4)


def tagged(notebook: Any, tag: str) -> Any:
    """Return the only cell with this tag."""
    (cell,) = (c for c in notebook.cells if tag in c.metadata.get("tags", ()))
    return cell


@pytest.fixture
def folder(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A notebook's folder, with a text and a model; all share a separate home."""
    set_environment(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    (tmp_path / "text.txt").write_text(LICENCE.read_text())
    write_folder(tmp_path / "base", replace(CONFIG, max_seq_len=128))
    return tmp_path


@pytest.mark.parametrize("name", draws(sorted(NAMES, key=_LATER.__contains__), short=1))
def test_a_notebook_runs_from_the_first_cell_to_the_last(name: str, folder: Path):
    notebook = read(name)
    tagged(notebook, "settings").source = SMALL[name]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    kinds, words = SHOWN[name]
    assert {*kinds} <= {kind for output in outputs for kind in output.get("data", {})}
    said = "".join(str(output) for output in outputs)
    assert [word for word in words if word not in said] == []
    # a reader is not shown passing errors
    assert [o.text for o in outputs if o.get("name") == "stderr"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs_and_leads_on(name: str):
    notebook = read(name)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert "execution" not in cell.metadata
    assert notebook.cells[0].source.startswith("# ")
    assert "## What to try next" in notebook.cells[-1].source
    assert set(re.findall(r"`(\d\d_\w+)\.ipynb`", str(notebook.cells))) <= {*NAMES}


def test_there_are_no_other_notebooks_and_all_install_alike():
    found = sorted(path.stem for path in (ROOT / FOLDER).glob("*.ipynb"))
    assert found == [*NAMES]
    assert len({tagged(read(name), "install").source for name in NAMES}) == 1


def colab(url: str, name: str) -> str:
    """Return the badge for a notebook of the GitHub repository at `url`."""
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    repository = url.removesuffix("/").removeprefix("https://github.com/")
    notebook = f"{repository}/blob/main/{FOLDER}/{name}.ipynb"
    target = f"https://colab.research.google.com/github/{notebook}"
    return f"[![Open in Colab]({image})]({target})"


def misses(notebook: Any, name: str, url: str | None) -> list[str]:
    """Return what a notebook lacks to open from elsewhere, or has too early."""
    first, install = notebook.cells[0].source, tagged(notebook, "install").source
    if url is None:
        return ["no badge yet"] if "colab-badge" in first else []
    source = f'SOURCE = "git+{url.removesuffix("/")}"'
    wanted = [(colab(url, name), first), (source, install)]
    return [wish for wish, where in wanted if wish not in where]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_a_colab_badge_once_the_repository_has_an_address(name: str):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert misses(read(name), name, setup["metadata"].get("url")) == []


def test_with_an_address_both_badge_and_source_are_demanded():
    notebook, url = read(NAMES[0]), "https://github.com/someone/hetjax"
    badge, source = misses(notebook, NAMES[0], url)
    path = "someone/hetjax/blob/main/experiments/notebooks/01_first_run.ipynb"
    assert badge.endswith(f"(https://colab.research.google.com/github/{path})")
    assert source == f'SOURCE = "git+{url}"'
    notebook.cells[0].source += f"\n{badge}"
    install = tagged(notebook, "install")
    install.source = re.sub(r'SOURCE = "[^"]*"', source, install.source)
    assert misses(notebook, NAMES[0], url) == []
    assert misses(notebook, NAMES[0], None) == ["no badge yet"]
