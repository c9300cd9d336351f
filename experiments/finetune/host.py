# SPDX-License-Identifier: Apache-2.0
"""Measures what import and export of a model cost the hosts: bytes read, and memory.

    python -m experiments.finetune.host [--output FILE]

A Llama with random weights, 34 MB a block in bfloat16, is imported by three worker
processes with unlike numbers of layers, trained for one step and exported. For each
worker, it reports the size of its layers in closed form, and how much of the
memory-mapped file the kernel has loaded for it (whole pages, up to 64 KiB around each
read). For the export, it reports by how much the memory of its process rose, in bytes
and in multiples of a block as written. It does the same for exports that add adapters
of all linear weights to frozen weights (`--merged`); these are read as they are, or
rounded as the run held them in four bits. Each export is the second of its process,
because the first needs memory to compile, whatever the size of the model.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from experiments.finetune.runs import CLUSTER
from experiments.machine import machine
from hetjax.api.exporting import export_model
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.models.configs import LlamaConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.stored_tensors import WHOLE
from hetjax.models.hugging_face.written import write_model
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.rundir import LOGS

COMMAND = "python -m experiments.finetune.host"
MODEL = LlamaConfig(
    name="host",
    vocab_size=4096,
    hidden_size=1024,
    inner_size=4096,
    num_blocks=6,
    num_heads=16,
    num_kv_heads=16,
    max_seq_len=16,
)
LAYERS = {"a100": (0, 2), "v100": (2, 3), "t4": (3, 8)}  # of 8, by node
ADAPTED = ("--lora.rank", "8")
RUNS = {
    "whole": (),
    "merged": ADAPTED,
    "merged_nf4": (*ADAPTED, "--lora.frozen", "nf4"),
}
_BATCH, _LOOK_S, _LIMIT_S = 4, 0.005, 1200
# glibc keeps freed memory, up to 32 MiB, which would hide the next peak
_FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_TEXT = "".join(f"{number} times {number} is {number**2}.\n" for number in range(2000))


def layer_bytes(layer: int, item_bytes: int) -> int:
    """Return the bytes of a layer's weights in closed form.

    The first layer is the embedding, the last the head.
    """
    size, table = MODEL.hidden_size, MODEL.vocab_size * MODEL.hidden_size
    if layer == 0:
        return item_bytes * table
    if layer == MODEL.num_blocks + 1:
        return item_bytes * (table + size)
    return item_bytes * size * (4 * size + 3 * MODEL.inner_size + 2)


def plan(model: str) -> Plan:
    depth = len(LAYERS)
    stages = tuple(
        Stage(node=node, devices=(0,), layers=layers, launch_ahead=depth - at)
        for at, (node, layers) in enumerate(LAYERS.items())
    )
    replica = Replica(num_microbatches=_BATCH, microbatch_size=1, stages=stages)
    return Plan(
        model=model, seq_len=MODEL.max_seq_len, global_batch=_BATCH, replicas=(replica,)
    )


def write_base(folder: Path) -> None:
    """Write the model with random weights."""
    folder.mkdir()
    rng = np.random.default_rng(0)

    def drawn(_: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)

    write_model(folder, MODEL, fields_of(MODEL), drawn, "bfloat16")


def imported(base: Path, run_dir: Path, own: Sequence[str] = ()) -> dict[str, int]:
    """Train a step from these weights; return the bytes that each worker read."""
    cluster, file = run_dir.with_suffix(".toml"), run_dir.with_suffix(".json")
    cluster.write_text(cluster_toml(CLUSTER))
    write_plan(file, plan(str(base)))
    text = run_dir.with_suffix(".txt")
    text.write_text(_TEXT)
    words = [sys.executable, "-m", "hetjax.train", str(base), "--simulate"]
    words += ["--launcher", "processes", "--run-dir", str(run_dir)]
    words += ["--cluster", str(cluster), "--plan", str(file), "--steps", "1"]
    words += ["--seq-len", str(MODEL.max_seq_len), "--global-batch", str(_BATCH)]
    words += ["--dtype", "float32", "--data.path", str(text)]
    words += ["--data.cache-dir", str(run_dir.with_name("cache"))]
    words += ["--evaluation.every", "0", "--evaluation.sample-tokens", "0", *own]
    read: dict[str, int] = {}
    with subprocess.Popen(words, stdout=sys.stderr) as run:
        until_s = time.monotonic() + _LIMIT_S
        while run.poll() is None and time.monotonic() < until_s:
            for node in LAYERS:
                now = mapped_bytes(run_dir / LOGS / f"{node}.log", base / WHOLE)
                read[node] = max(read.get(node, 0), now)
            time.sleep(_LOOK_S)
        run.terminate()
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}")
    return read


def mapped_bytes(log: Path, file: Path) -> int:
    """Return how much of the file the process with this log has in its memory."""
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if entry.resolve() == log.resolve():
                return _resident(entry.parents[1] / "smaps", file)
        except OSError:  # it has ended
            continue
    return 0


def _resident(smaps: Path, file: Path) -> int:
    found, is_of_file = 0, False
    for line in smaps.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(f" {file.resolve()}")
        elif is_of_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def exporting(run_dir: Path, to: Path, dtype: str, merged: bool) -> None:
    """Export in the other process, and print the most memory that this took."""
    export_model(run_dir, to, dtype=dtype, merged=merged)
    shutil.rmtree(to)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until here
    before = _status_bytes("VmHWM")
    export_model(run_dir, to, dtype=dtype, merged=merged)
    print(_status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found) * 1024


def exported(run_dir: Path, to: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--dtype", dtype]
    command += ["--run-dir", str(run_dir), "--to", str(to)]
    command += ["--merged"] if run_dir.name.startswith("merged") else []
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **_FREED_AT_ONCE},
    )
    block_bytes = layer_bytes(1, 4 if dtype == "float32" else 2)
    peak_bytes = int(done.stdout)
    return {
        "model_bytes": sum(file.stat().st_size for file in to.glob("*.safetensors")),
        "block_bytes": block_bytes,
        "peak_bytes": peak_bytes,
        "peak_blocks": peak_bytes / block_bytes,
    }


def measured(folder: Path) -> dict[str, Any]:
    base = folder / "base"
    write_base(base)
    read, *_ = [imported(base, folder / name, own) for name, own in RUNS.items()]
    own = {
        node: sum(layer_bytes(layer, 2) for layer in range(*layers))
        for node, layers in LAYERS.items()
    }
    found: dict[str, Any] = {
        name: {
            dtype: exported(folder / name, folder / f"{name}_{dtype}", dtype)
            for dtype in ("float32", "bfloat16")
        }
        for name in RUNS
    }
    return {
        "import": {
            "file_bytes": (base / WHOLE).stat().st_size,
            "layer_bytes": own,
            "read_bytes": read,
            "read_of_layers": {node: read[node] / own[node] for node in own},
        },
        "export": found.pop("whole") | found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    for name in ("--run-dir", "--to", "--dtype"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--merged", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run_dir is not None:
        exporting(Path(asked.run_dir), Path(asked.to), asked.dtype, merged=asked.merged)
        return
    with TemporaryDirectory() as scratch:
        found = measured(Path(scratch))
    result = {"command": COMMAND, "machine": machine(), **found}
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if asked.output is not None:
        asked.output.write_text(text)


if __name__ == "__main__":
    main()
