# SPDX-License-Identifier: Apache-2.0
"""The README's lines of Python, one cell each, in a notebook's kernel."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.training.small import LICENCE, lines
from tests.training.test_workers import set_environment

README = Path(__file__).parents[2] / "README.md"
# seconds instead of minutes
SHORTER = {
    "search_s=10": 'search_s=10, microbatch_sizes=(4,), remat=("none",)',
    "steps=20": 'steps=20, data={"path": "text.txt", "cache_dir": "cache"}, '
    'evaluation={"num_batches": 1, "sample_tokens": 2}',
    '"Return the"': '"Return the", num_tokens=4',
}


def cells() -> Iterator[str]:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for was, now in SHORTER.items():
        assert block.count(was) == 1, was
        block = block.replace(was, now)
    yield from filter(None, block.splitlines())


def run_in(folder: Path, code: list[str]) -> list[dict[str, Any]]:
    """Run the cells there; return what each shows first, by kind."""
    (folder / "text.txt").write_text(LICENCE.read_text())
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, code)])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    return [_shown(cell.outputs) for cell in notebook.cells]


def _shown(outputs: list[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for output in outputs:
        shown = output.get("data", {}) | shown
        if "text" in output:  # of a stream
            shown[output.name] = shown.get(output.name, "") + output.text
    return shown


def losses(folder: Path) -> list[float]:
    metrics = lines(folder / "runs" / "tiny" / "metrics.jsonl")
    return [line["loss"] for line in metrics if "loss" in line]


def launcher(folder: Path) -> str:
    settings = json.loads((folder / "runs" / "tiny" / "config.json").read_text())
    return settings["config"]["launcher"]


@pytest.mark.nightly
def test_a_notebook_plans_trains_and_samples_also_where_jax_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    set_environment(monkeypatch)
    fresh, late = tmp_path / "fresh", tmp_path / "late"
    for folder in (fresh, late):
        folder.mkdir()
    code = [*cells()]
    assert 9 <= len(code) <= 10
    code.insert(4, "found")
    *_, page, picture, _, trained, metrics, sample = run_in(fresh, code)
    assert page["text/html"].startswith("<iframe srcdoc=")
    assert all(word in page["text/html"] for word in ("&lt;svg", "step time"))
    assert "<svg" in picture["image/svg+xml"]
    # progress is one line that changes; the last step's line stays
    assert trained["text/plain"].startswith("step 20/20  loss")
    assert "plan (given)" in trained["stdout"] and "compiled" not in trained["stdout"]
    assert "<th>loss</th>" in metrics["text/html"]
    assert sample["text/plain"].startswith("'Return the")
    assert launcher(fresh) == "embedded"
    # the first run's plan, so that only the place of the workers differs
    planned = next(n for n, line in enumerate(code) if line.startswith("found ="))
    code[planned : planned + 3] = [
        f'plan = hetjax.load_plan("{fresh}/runs/tiny/plan.json")',
        "import jax; len(jax.devices())",
    ]
    code = [line.replace("found.plan", "plan") for line in code]
    *_, devices, _, trained, _, again = run_in(late, code)
    assert devices["text/plain"] == "1"
    assert "workers (processes): " in trained["stdout"]
    assert launcher(late) == "processes"
    assert len(losses(fresh)) == 20
    assert losses(late) == pytest.approx(losses(fresh), rel=1e-5)
    assert again == sample
