# SPDX-License-Identifier: Apache-2.0
"""A process that trains in argv[1] and kills itself while it saves step argv[2].

With a store (argv[3]) and its server (argv[4]), the test kills the process.
"""

import os
import signal
import sys
from pathlib import Path

import jax

from hetjax.checkpoint import writer
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from tests.training.small import MODEL, ONE_STAGE, but, small_preset

jax.config.update("jax_disable_most_optimizations", True)  # compiling dominates here


def main(directory: Path, step: int) -> None:
    """Train until the save of the step kills the process."""
    commit = writer.replace_text

    def commit_or_die(path: Path, text: str) -> None:
        if f"step_{step:08d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        commit(path, text)

    writer.replace_text = commit_or_die
    train(directory, CheckpointConfig(every=4))


def train(directory: Path, checkpoint: CheckpointConfig) -> None:
    preset = small_preset(directory, ONE_STAGE)  # the fewest programs to compile
    preset = but(preset, checkpoint=checkpoint)
    run(preset.config, preset, MODEL)


if __name__ == "__main__":
    if sys.argv[3:]:
        cloud, endpoint = sys.argv[3:]
        store = CheckpointConfig(every=2, cloud=cloud, endpoint=endpoint)
        train(Path(sys.argv[1]), store)
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
