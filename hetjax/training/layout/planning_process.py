# SPDX-License-Identifier: Apache-2.0
"""A process that plans for clusters which a run may have next.

Owns the process that makes them, both its sides. It is none of the run's threads: those
would train more slowly meanwhile, and one that is inside a solver or a compiler when
the interpreter ends takes the whole process down with an abort. Does not own which
clusters those are (`training/recovery/standby_plans.py`) nor how plans are made
(`plan_choice.py`). Controllers start it (`python -m
hetjax.training.layout.planning_process`); it is not meant to be typed.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.files.parsing import json_value
from hetjax.models.named import TypedName
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import parse_plan, plan_json
from hetjax.training.layout.plan_choice import next_plan, read_run_slowness
from hetjax.training.run_model import run_model
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values, read_config

_LAST_WORDS = 3  # lines: as many as a BadInput has


class Planning:
    """A process that plans for each of these clusters, in place of `current`."""

    def __init__(
        self, config: RunConfig, clusters: Sequence[Cluster], current: Plan
    ) -> None:
        self._clusters, self._current = clusters, current
        self._read_bytes, self.has_ended = 0, False
        self._answers, self._errors = TemporaryFile(), TemporaryFile()
        request = {
            "config": config_values(config),
            "clusters": [*map(cluster_toml, clusters)],
            "current": plan_json(current),
        }
        with TemporaryFile() as asked:  # a pipe would be full before anybody reads
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetjax.training.layout.planning_process"],
                stdin=asked,
                stdout=self._answers,
                stderr=self._errors,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # devices are the workers'
                start_new_session=True,  # Ctrl-C is the run's to hear
            )

    def found(self) -> list[tuple[Cluster, Plan]]:
        """What has been planned since the last call; returns at once."""
        if not self.has_ended and self._process.poll() is not None:
            self.has_ended = True
            if self._process.returncode:
                said = _text(self._errors, 0).strip().splitlines()
                why = "; ".join(said[-_LAST_WORDS:]) or self._process.returncode
                warnings.warn(f"no plans ahead: {why}", stacklevel=2)
        whole, newline, _ = _text(self._answers, self._read_bytes).rpartition("\n")
        self._read_bytes += len((whole + newline).encode())
        answers = map(json_value, whole.splitlines())
        return [(self._clusters[n], parse_plan(text)) for n, text in answers]

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._errors.close()


def _text(file: IO[bytes], start: int) -> str:
    """What is in the file from there on; the other process writes at its end."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size - start, start).decode()


def main() -> None:
    """Answer the request on standard input, a line for each plan.

    What else is written to standard output, as by a solver, goes to that of errors.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json_value(sys.stdin.read())
    config = read_config(request["config"], "settings")
    config = replace(config, model=TypedName(config.model))  # by our own controller
    model, current = run_model(config), parse_plan(request["current"])
    slow = read_run_slowness(config)
    for number, text in enumerate(request["clusters"]):
        with suppress(NoFeasiblePlan):  # then there is nothing to be ready for
            plan = next_plan(config, model, parse_cluster(text), current, slow)
            print(json.dumps([number, plan_json(plan)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
