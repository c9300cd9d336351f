# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation, which mkdocs draws whenever it builds the pages.

Owns what is drawn. Does not own the drawing: these are the product's own plots, as its
commands make them.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import hetjax
from hetjax.cluster.cluster_files import parse_cluster
from hetjax.report.pictures.layout import layout_picture
from hetjax.report.pictures.picture import Picture

_PLAN_PAGE = Path(__file__).parent / "plan.md"


def _tiny_timeline() -> Picture:
    return hetjax.simulate_plan("tiny", calibration="none", quiet=True).draw()


def _tiny_searched() -> Picture:
    return hetjax.simulate_plan(
        "tiny", schedule="searched", calibration="none", quiet=True
    ).draw()


def _tiny_layout() -> Picture:
    plan = hetjax.simulate_plan("tiny", calibration="none", quiet=True).plan
    return layout_picture(plan, hetjax.load_cluster("tiny"), plan.title)


def _tiny_without_a100() -> Picture:
    whole = hetjax.load_cluster("tiny")
    nodes = tuple(node for node in whole.nodes if node.name != "a100-0")
    found = hetjax.find_plan(
        "tiny",
        cluster=replace(whole, nodes=nodes),
        microbatch_sizes=(8,),
        tensor=(1,),
        remat=("none",),
        calibration="none",
        quiet=True,
    )
    return found.draw()


def _mine_layout() -> Picture:
    """The plan of the first command on the page about planning."""
    toml = re.findall(r"```toml.*?\n(.*?)```", _PLAN_PAGE.read_text(), re.DOTALL)[0]
    found = hetjax.find_plan(
        model="gpt2-124m",
        cluster=parse_cluster(toml),
        global_batch=64,
        seq_len=1024,
        calibration="none",
        quiet=True,
    )
    return found.draw()


PICTURES: dict[str, Callable[[], Picture]] = {
    "mine-layout": _mine_layout,
    "tiny-layout": _tiny_layout,
    "tiny-searched": _tiny_searched,
    "tiny-timeline": _tiny_timeline,
    "tiny-without-a100": _tiny_without_a100,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures to the site; mkdocs calls this by its name."""
    for name, draw in PICTURES.items():
        path = f"pictures/{name}.svg"
        files.append(File.generated(config, path, content=draw().image("svg")))
    return files
