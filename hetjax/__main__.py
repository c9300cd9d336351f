# SPDX-License-Identifier: Apache-2.0
"""`hetjax NAME [arguments]`, or `python -m hetjax NAME`: all commands under one name.

Owns the list of commands. Does not own any command: `hetjax train` is
`python -m hetjax.train`.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from hetjax.cli.process import process_main

COMMANDS = {
    "demo": "race planners on a small cluster of unlike cards",
    "train": "train a model, or resume a run",
    "launch": "start a run on a Slurm cluster, or on hosts by ssh",
    "worker": "join a run that waits for this machine",
    "plan": "find the best plan for a cluster",
    "simulate": "predict a step of a plan before it runs",
    "sample": "continue a text with a trained model",
    "eval": "score a trained model on texts and questions",
    "export": "write a run's weights for transformers",
    "profile": "time a model's layers on the devices here",
    "devices": "list the known devices, and those of this machine",
    "doctor": "check this machine, its packages, and what a run will need",
    "preempt": "ask a run to save and stop, or to release a node",
}


def _run(given: Sequence[str]) -> int:
    from hetjax.cli.command import main_of  # slow, so after the signal handlers are set

    return main_of(_chosen)(given)


def _chosen(given: Sequence[str]) -> int:
    """Run the command named first with the other arguments; return its exit code."""
    if not given or given[0] in ("-h", "--help", "--help-all"):
        print(_help())
        return 0 if given else 2
    name, *rest = given
    if name == "help":
        return _chosen([*rest[:1], "--help"])
    if name == "completion":
        from hetjax.cli.options.completion import completion

        print(completion(COMMANDS, rest))
        return 0
    if name == "--version":
        print(f"hetjax {version('hetjax')}")
        return 0
    if name not in COMMANDS:
        from hetjax.errors import BadInput, did_you_mean

        raise BadInput(
            got=f"command {name!r}",
            allowed=", ".join(COMMANDS),
            fix=did_you_mean(name, list(COMMANDS)),
        )
    return import_module(f"hetjax.cli.{name}").main(rest)


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())
    return f"""usage: hetjax COMMAND [arguments]  (or python -m hetjax.COMMAND)

{commands}

hetjax help COMMAND says more; COMMAND --help-all lists every option.
-q shows only results and errors; hetjax --version prints the version;
hetjax completion bash, zsh or fish prints a script that completes options."""


main = process_main(_run)


if __name__ == "__main__":
    raise SystemExit(main())
