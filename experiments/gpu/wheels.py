# SPDX-License-Identifier: Apache-2.0
"""Lists the wheels that hetjax needs on a machine with JAX but without a network.

    python -m experiments.gpu.wheels --python 3.12 --jax 0.11.2 0.12.0.1 --download DIR

Writes `wheels-3.12.txt` beside this file: a requirement for each wheel, with its size.
The list leaves out JAX, flax, optax, orbax-checkpoint and their requirements, and what
hetjax never imports. `--download` keeps the wheels, for `session.sh --wheels`. The list
has to be the same for all releases of JAX that are named.
"""

import argparse
import configparser
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MOST_BYTES = 60_000_000
THERE = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "tensorstore")
# Solvers of cvxpy that hetjax does not call, and the hub that tokenizers can load from.
UNUSED = ("clarabel", "osqp", "scs", "sparsediffpy", "huggingface-hub")
_GLIBC_MINORS = range(34, 16, -1)  # since 2021; a wheel may be for an older one
_SETUP = Path(__file__).parents[2] / "setup.cfg"

Packages = Mapping[str, Mapping[str, Any]]  # metadata by canonical name


def hetjax_requires() -> list[str]:
    """Return the requirements of setup.cfg, without extras."""
    setup = configparser.ConfigParser()
    setup.read(_SETUP, encoding="utf-8")
    return setup["options"]["install_requires"].split()


def resolve(python: str, requirements: Sequence[str]) -> Packages:
    """Return the packages that pip would install on an empty Linux machine."""
    command = ["install", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--target", "unused", *_platform(python), *requirements]
    report = json.loads(_pip(*command))
    found = [item["metadata"] for item in report["install"]]
    return {canonicalize_name(metadata["name"]): metadata for metadata in found}


def reached(
    packages: Packages,
    roots: Iterable[str],
    python: str,
    left_out: Sequence[str] = (),
) -> set[str]:
    """Return the names of all packages that the roots require, directly or not."""
    found: set[tuple[str, str]] = set()  # with an extra, or ""
    left = [*map(Requirement, roots)]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found and name not in left_out:
                found.add((name, extra))
                left += _required(packages[name], extra, python)
    return {name for name, _ in found}


def _required(
    metadata: Mapping[str, Any], extra: str, python: str
) -> Iterator[Requirement]:
    there = {"extra": extra, "python_version": python, "sys_platform": "linux"}
    there |= {"python_full_version": f"{python}.0", "platform_system": "Linux"}
    for requirement in map(Requirement, metadata.get("requires_dist", ())):
        if requirement.marker is None or requirement.marker.evaluate(there):
            yield requirement


def needed(python: str, jax: str) -> list[str]:
    """Return NAME==VERSION of what hetjax needs beside that release of JAX."""
    required = hetjax_requires()
    packages = resolve(python, [f"jax=={jax}", *required])
    there = reached(packages, THERE, python)
    names = reached(packages, required, python, UNUSED) - there
    return [f"{name}=={packages[name]['version']}" for name in sorted(names)]


def download(python: str, requirements: Sequence[str], folder: Path) -> None:
    """Download these wheels, and no others, into the folder."""
    command = ["download", "--no-deps", "--dest", str(folder), *_platform(python)]
    _pip(*command, *requirements)


def listed(
    python: str, jax: Sequence[str], requirements: Sequence[str], folder: Path
) -> str:
    """Return the list, with the size of each wheel in the folder."""
    sizes: dict[str, int] = {
        canonicalize_name(wheel.name.partition("-")[0]): wheel.stat().st_size
        for wheel in folder.glob("*.whl")
    }
    of_each = [(line, sizes[line.partition("==")[0]]) for line in requirements]
    total = sum(size for _, size in of_each)
    lines = [
        f"# For hetjax on Python {python} beside JAX {' or '.join(jax)}, by",
        f"# python -m experiments.gpu.wheels --python {python} --jax {' '.join(jax)}",
        f"# {total:,} bytes in all",
        *(f"{line}  # {size:,} bytes" for line, size in of_each),
    ]
    return "\n".join(lines) + "\n"


def _platform(python: str) -> list[str]:
    names = [*(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS)]
    options = [f"--platform={name}" for name in (*names, "manylinux2014_x86_64")]
    return ["--only-binary=:all:", f"--python-version={python}", *options]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--python", default="3.12", metavar="VERSION")
    made.add_argument(
        "--jax", nargs="+", default=["0.11.2", "0.12.0.1"], metavar="VERSION"
    )
    made.add_argument("--download", type=Path, metavar="DIR", help="keeps the wheels")
    return made


def main() -> None:
    arguments = parser().parse_args()
    python, jax = arguments.python, arguments.jax
    requirements, *others = (needed(python, release) for release in jax)
    if any(other != requirements for other in others):
        sys.exit(f"JAX {' and '.join(jax)} need unlike wheels: name one of them")
    with TemporaryDirectory() as temporary:
        folder = arguments.download or Path(temporary)
        download(python, requirements, folder)
        text = listed(python, jax, requirements, folder)
    Path(__file__).with_name(f"wheels-{python}.txt").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
