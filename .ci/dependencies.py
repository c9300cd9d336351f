# SPDX-License-Identifier: Apache-2.0
"""Keeps environments with a project's dependencies, for all who check that project.

usage: python dependencies.py FOLDER REQUIREMENT [OVER]

Prints the path of an environment of the Python that runs this. It has what pip would
choose today for REQUIREMENT (as `.[dev]`), except the project itself, on top of OVER,
another such environment. It lies in FOLDER, under a name that depends on what pip
chooses. An existing, complete environment is reused; one that was not used for two
weeks is removed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNUSED_DAYS = 14
CONTENTS = "contents"  # a digest of the files; touched with each use
# organisations add certificates of their own to this file
CERTIFICATES = os.path.join("certifi", "cacert.pem")


def main(folder: Path, requirement: str, over: Path | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_unused(folder)
        pip = newest_pip(folder)
        chosen = resolve(pip, requirement, over)
        environment = folder / digest([*here(), str(over), *chosen])
        if not is_whole(environment):
            make(environment, pip, chosen, over)
        (environment / CONTENTS).touch()
    return environment


def here() -> list[str]:
    return [sys.version, sys.base_prefix]


def newest_pip(folder: Path) -> Path:
    """Return an environment with pip alone: Python 3.11's own is three times slower."""
    venv = folder / digest(["pip", *here()])
    if not is_whole(venv):
        create(venv)
        run(venv / "bin" / "python", "-m", "pip", "install", "-qq", "--upgrade", "pip")
        (venv / CONTENTS).write_text(contents(venv), encoding="utf-8")
    (venv / CONTENTS).touch()
    return venv


def resolve(pip: Path, requirement: str, over: Path | None) -> list[str]:
    """Return what pip would install: requirements with one version each, sorted."""
    target = pip if over is None else over
    seen = ["--ignore-installed"] if over is None else []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        dry = ["--dry-run", *seen, "--report", report]
        install(pip, target, *dry, requirement)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    items = [item["metadata"] for item in found if not item["is_direct"]]
    return sorted(f"{item['name']}=={item['version']}" for item in items)


def make(environment: Path, pip: Path, chosen: list[str], over: Path | None) -> None:
    create(environment, over)
    listed = environment / "requirements.txt"
    listed.write_text("\n".join(chosen), encoding="utf-8")
    install(pip, environment, "--no-deps", "--requirement", listed)
    (environment / CONTENTS).write_text(contents(environment), encoding="utf-8")


def create(venv: Path, over: Path | None = None) -> None:
    """Make an environment that sees the packages of another, or has its own pip."""
    shutil.rmtree(venv, ignore_errors=True)
    without = [] if over is None else ["--without-pip"]
    run(sys.executable, "-m", "venv", *without, venv)
    if over is not None:
        (packages,) = venv.glob("lib/python*/site-packages")
        seen = over / packages.relative_to(venv)
        line = f"import site; site.addsitedir({str(seen)!r})\n"
        (packages / "dependencies.pth").write_text(line, encoding="utf-8")


def install(pip: Path, target: Path, *words: str | Path) -> None:
    options = ["-qq", "--disable-pip-version-check", "--python", target / "bin/python"]
    run(pip / "bin" / "python", "-m", "pip", *options, "install", *words)


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:20]


def run(*words: str | Path) -> None:
    done = subprocess.run(words, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, words))}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_unused(folder: Path) -> None:
    unused_since = time.time() - UNUSED_DAYS * 24 * 3600
    for contents in folder.glob(f"*/{CONTENTS}"):
        if contents.stat().st_mtime < unused_since:
            shutil.rmtree(contents.parent)


def is_whole(environment: Path) -> bool:
    kept = environment / CONTENTS
    return kept.exists() and kept.read_text(encoding="utf-8") == contents(environment)


def contents(environment: Path) -> str:
    """Return a digest of the names and sizes of all files that Python did not write."""
    sizes = []
    for parent, _, names in os.walk(environment):
        if not parent.endswith("__pycache__"):
            paths = (os.path.join(parent, name) for name in names)
            sizes += [f"{path} {size(path)}" for path in paths]
    told = (line for line in sorted(sizes) if f"{os.sep}{CONTENTS} " not in line)
    return digest(list(told))


def size(path: str) -> int | None:
    return None if path.endswith(CERTIFICATES) else os.lstat(path).st_size


if __name__ == "__main__":
    folder, requirement, *rest = sys.argv[1:]
    print(main(Path(folder), requirement, Path(rest[0]) if rest else None))
