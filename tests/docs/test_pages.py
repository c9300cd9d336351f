# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the README and of docs/, from top to bottom of each page.

Each page gets a folder, in which its blocks run in order, as they would for a reader. A
block with a title is a file of that name. Commands of hetjax run in this process, all
others in bash. A block of `text` is the output of the command above it. Before a block,
`<!-- skip: next "why" -->` skips it.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import SkipTest

import jax
import pytest
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from hetjax.__main__ import main as hetjax
from hetjax.cli.train import parse
from hetjax.cli.worker import parse as parse_worker
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.hosts import load_hosts
from hetjax.launchers import on_machines, over_ssh
from hetjax.plans.plan_files import parse_plan
from hetjax.training.settings.presets import PRESETS
from tests.launchers import fake_programs
from tests.short_runs import draws
from tests.training.test_workers import set_environment

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# the slowest; other tests run most of their commands
_LATER = [
    *(ROOT / f"docs/{name}.md" for name in ("join", "observe", "plan", "report")),
    *(ROOT / f"docs/{name}.md" for name in ("slurm", "ssh", "sure", "survive")),
    *(ROOT / f"docs/{name}.md" for name in ("train", "use")),
]
REASONS = [
    "installs packages",
    "needs a Ray cluster",
    "needs a Slurm job",
    "needs machines that join",
    "needs machines that share nothing",
    "needs a bucket of your own",
    "needs a bucket of your own: run by tests/docs/test_stores_page.py",
    "needs a card",
    "the page Survive does it, with a kill",
    "a minute: run by tests/cli/test_demo.py",
    "measures for up to a minute: run by tests/cli/test_doctor.py",
    "minutes: run with fewer steps by tests/training/test_readme.py",
    "run as cells of a notebook by tests/api/test_notebook.py",
    "takes the compilers of above",
]
_INFO = re.compile(r'(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?[ ]*$\n', re.M)
_PROGRAM = re.compile(r"[&|<$;`]|^\s*(cd|export|set|source)\b")
_FIGURE = re.compile(r"-?\d[\d,.]*(e[-+]?\d+)?")


@dataclass
class Reader:
    """A reader who follows a page in this folder."""

    folder: Path
    heard: pytest.CaptureFixture[str]
    printed: str | None = ""  # None: unknown

    def blocks(self, document: Document) -> Iterator[Region]:
        for region in RawFencedCodeBlockLexer(_INFO)(document):
            region.parsed = region.lexemes["source"]
            region.evaluator = getattr(self, region.lexemes["language"])
            yield region

    def bash(self, example: Example) -> None:
        self.printed = ""
        for commands in parts_of(example.parsed):
            if all(words_of_hetjax(line) for line in commands):
                for line in commands:
                    assert hetjax(words_of_hetjax(line)) == 0, self.heard.readouterr()
                heard = self.heard.readouterr()
                self.printed += heard.out + heard.err
                continue
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.printed += done.stdout
            assert done.returncode == 0, self.printed

    def python(self, example: Example) -> None:
        PythonEvaluator()(example)
        self.printed = self.heard.readouterr().out

    def toml(self, example: Example) -> None:
        path = self._written(example, "cluster.toml")
        if path.name == "hosts.toml":
            assert load_hosts(path).hosts
        else:
            assert load_cluster(path).nodes

    def json(self, example: Example) -> None:
        self._written(example, "some-plan.json")
        assert parse_plan(example.parsed).replicas

    def text(self, example: Example) -> None:
        """Check that each line but `...` was printed, apart from figures and breaks."""
        if self.printed is None:
            return
        printed = shape(self.printed)
        for line in filter(str.strip, example.parsed.splitlines()):
            if line != "...":
                assert shape(line.removesuffix("...")) in printed, line

    def _written(self, example: Example, otherwise: str) -> Path:
        path = self.folder / (example.region.lexemes["title"] or otherwise)
        path.write_text(example.parsed)
        return path


def parts_of(code: str) -> list[list[str]]:
    """Split a block into commands of hetjax and other commands.

    A block whose commands are one shell program stays whole.
    """
    lines = code.replace("\\\n", " ").splitlines()
    if any(_PROGRAM.search(line) for line in lines):
        return [[code]]
    together = groupby(lines, key=lambda line: bool(words_of_hetjax(line)))
    return [list(commands) for _, commands in together]


def words_of_hetjax(command: str) -> list[str]:
    """Return the words after `hetjax` or `python -m hetjax.`; none for others."""
    found = re.fullmatch(r"(?:hetjax |python -m hetjax\.)(\w.*)", command.strip())
    plain = found and not re.search(r"[&|<>$;]", command)
    return shlex.split(found.group(1), comments=True) if found and plain else []


def shape(text: str) -> str:
    """Return the text without figures and line breaks, with single spaces."""
    return " ".join(_FIGURE.sub("0", text).split())


def parsed(page: Path, reader: Reader) -> Document:
    return Document.parse(str(page), reader.blocks, SkipParser())


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all pages keep the offline corpus."""
    return tmp_path_factory.mktemp("home")


def few_devices(patched: pytest.MonkeyPatch) -> None:
    """Give the reader's machine two CPU devices, not the sixteen of the tests.

    Simulated clusters request CPUs by name, and get all of them.
    """
    found = jax.local_devices

    def local_devices(*args: Any, **asked: Any) -> list[jax.Device]:
        return found(*args, **asked) if args or asked else found()[:2]

    patched.setattr(jax, "local_devices", local_devices)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in this process sample only a few tokens of text."""
    tiny = PRESETS["tiny"]
    evaluation = replace(tiny.config.evaluation, sample_tokens=4)
    config = replace(tiny.config, evaluation=evaluation)
    monkeypatch.setitem(PRESETS, "tiny", replace(tiny, config=config))


@pytest.fixture
def far_machines(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and hosts that are this machine: 10.0.0.2 is 127.0.0.2."""
    fake_programs.put_on_path(tmp_path_factory.mktemp("far"), monkeypatch)
    for module in (on_machines, over_ssh):
        monkeypatch.setattr(
            module, "number_of", lambda address: address.replace("10.0.0.", "127.0.0.")
        )


@pytest.fixture
def reader(
    tmp_path: Path,
    home: Path,
    far_machines: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Reader:
    set_environment(monkeypatch)
    few_devices(monkeypatch)
    monkeypatch.setenv("HOME", str(home))
    here = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([here, os.environ["PATH"]]))
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, capsys)


@pytest.mark.usefixtures("quick_compiling", "few_samples")
@pytest.mark.parametrize(
    "page",
    draws(sorted(PAGES, key=_LATER.__contains__), short=len(PAGES) - len(_LATER)),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_can_be_followed_from_top_to_bottom(page: Path, reader: Reader):
    for example in parsed(page, reader):
        try:
            example.evaluate()
        except SkipTest:
            reader.printed = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why_and_can_be_parsed(page: Path, reader: Reader):
    text = page.read_text(encoding="utf-8")
    skipped = re.findall(
        r'^<!-- skip: next "([^"]*)" -->\n+```\w*\n(.*?)^```$', text, re.M | re.S
    )
    assert len(skipped) == text.count("<!-- skip:")
    for reason, block in skipped:
        assert reason in REASONS
        for line in block.replace("\\\n", " ").splitlines():
            name, *arguments = words_of_hetjax(line) or [""]
            if name == "train":
                parse(arguments)
            elif name == "worker":
                parse_worker(arguments)
            else:
                assert name in ("", "demo", "doctor"), f"{line} can be run"


def test_options_of_the_longest_page_of_commands_exist():
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    typed = [
        words[1:] for line in lines if (words := words_of_hetjax(line))[:1] == ["train"]
    ]
    assert len(typed) > 5
    for model, *options in typed:
        # the page creates the others
        parse([model if model in PRESETS else "tiny", *options])
