# SPDX-License-Identifier: Apache-2.0
"""First light on an accelerator: speed, memory, repeats, mixed kinds, peer transfers.

    python -m experiments.gpu.first_light --output experiments/results/first_light.json
    python -m experiments.gpu.first_light PART [--model llama-1b] [--platform cuda]

The first command runs all parts, each in a process of its own (a peak of memory is a
process's), and writes what each printed, or what it failed with, after each one. The
second runs one part in this process. Each prints one JSON object.

`speed` trains a model through the runtime (one stage) and then as one plain jit, in
the precision and with the attention that the product takes on the device, and reports
tokens/s and model FLOP utilisation, of the catalogue's peak and of the matrix rate that
is measured in the same process; beside them the predicted step time, and the memory
that was predicted (by the model alone, and with the compiler's workspaces as `train
--compiled` counts it) beside the measured peak. `repeats` takes the same step of two of
the model's blocks several times and says whether gradients and weights are bit-equal,
and how far the gradients of each form of attention are from those in fp32; it is run in
two processes, whose bits are compared, too. `mixed` runs a plan with a stage on the
accelerator and one on the host's CPU in fp32 and compares gradients with those of the
CPU alone. `transfer` pulls arrays between two processes on the accelerator by
jax.experimental.transfer and checks them.

A card that cannot hold the model is told so before a step; `--model gpt2-124m` is for
cards of 8 GB. Not run on GPU so far: no figure of it exists; `--platform cpu --model
tiny` runs the code path without an accelerator.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.gpu.mixed import mixed
from experiments.gpu.options import add_options
from experiments.gpu.repeats import repeats
from experiments.gpu.speed import speed
from experiments.gpu.transfers import pull, transfers
from experiments.machine import machine
from hetjax.launch.isolation import memory_share

PARTS = {
    "speed": speed,
    "repeats": repeats,
    "mixed": mixed,
    "transfer": transfers,
    "pull": pull,
}
# each a process of its own; the second `repeats` is held against the first
ALL = ("speed", "repeats", "repeats", "mixed", "transfer")
_MODULE = "experiments.gpu.first_light"
_LIMIT_S = 1_800  # of a part
_LAST = 4_000  # characters of what a part failed with


def run_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run it here; starts JAX."""
    device = jax.local_devices(backend=arguments.platform)[0]
    figures = PARTS[arguments.part](arguments, device)
    return {"part": arguments.part, "device": told(device)} | figures


def told(device: jax.Device) -> dict[str, Any]:
    """What the device says of itself, as results keep it."""
    return {
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "platform": device.client.platform_version.splitlines()[0],
        "bytes_limit": (device.memory_stats() or {}).get("bytes_limit"),
    }


def run_all(
    options: Sequence[str], output: Path | None, parts: Sequence[str] = ALL
) -> dict[str, Any]:
    """Run every part apart; the result is written as far as it is known."""
    result: dict[str, Any] = {
        "command": " ".join(("python -m", _MODULE, *options)),
        "machine": machine(),
        "parts": [],
    }
    for part in parts:
        result["parts"].append({"part": part} | _apart(part, options))
        result["equal_between_processes"] = equal_between_processes(result["parts"])
        if output is not None:
            output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _apart(part: str, options: Sequence[str]) -> dict[str, Any]:
    """What the part prints in a process of its own, or its error."""
    command = [sys.executable, "-m", _MODULE, part, *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as failed:
        return {"error": failed.stderr[-_LAST:]}
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {_LIMIT_S} s"}


def equal_between_processes(parts: Sequence[dict[str, Any]]) -> bool | None:
    """Whether `repeats` came to the same bits; None where there are no two of them."""
    digests = [part["digest"] for part in parts if "digest" in part]
    return len({*digests}) == 1 if len(digests) > 1 else None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", nargs="?", choices=PARTS, help="without one: all")
    made.add_argument("--output", type=Path, help="where the result of all is written")
    add_options(made)
    return made


def main() -> None:
    arguments = parser().parse_args()
    if arguments.part is not None:
        # as much of the card as plans count on, which two processes may share: neither
        # takes it before it needs it
        os.environ.update(memory_share(os.environ))
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        print(json.dumps(run_part(arguments)))
        return
    print(json.dumps(run_all(sys.argv[1:], arguments.output)))


if __name__ == "__main__":
    main()
