# SPDX-License-Identifier: Apache-2.0
"""Counts the gradient bytes that replicas send each other: full training against LoRA.

    python -m experiments.finetune.wire [--output FILE]

Two worker processes each hold a replica of a small Llama, and train it for some steps:
all of its weights, then adapters of rank 8 on all linear weights, with gradients in
float32 and in bfloat16 on the wire. Each worker counts the bytes that it hands to its
connections. For comparison, it reports the bytes of the trained parameters, which each
of two replicas sends to the other once.
"""

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from experiments.finetune.counting_worker import FOLDER
from experiments.machine import machine
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.comm.wire import SUMS
from hetjax.data.dataset import prepare
from hetjax.data.settings import Ingredients
from hetjax.launchers.launcher import start_workers
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.models.configs import LlamaConfig
from hetjax.models.finetuning import LoraConfig
from hetjax.models.hugging_face.configs import CONFIG
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.training.settings.config import RunConfig
from hetjax.training.worker import worker_settings

COMMAND = "python -m experiments.finetune.wire"
MODEL = LlamaConfig(
    name="wire",
    vocab_size=512,
    hidden_size=256,
    inner_size=768,
    num_blocks=4,
    num_heads=8,
    num_kv_heads=8,
    max_seq_len=32,
)
LORA = LoraConfig(rank=8, alpha=16.0)
NODES = ("a", "b")
Wire = Literal["float32", "bfloat16"]
WIRE_BYTES: dict[Wire, int] = {"float32": 4, "bfloat16": 2}
_STEPS = 3
_TEXT = "".join(f"{number} times {number} is {number**2}.\n" for number in range(2000))
_CLUSTER = Cluster(
    name="two", nodes=tuple(Node(name=n, device="T4", count=1) for n in NODES)
)


def trained_parameters(config: LlamaConfig, rank: int) -> int:
    """Return how many numbers are trained, in closed form; rank 0: all of the model."""
    size, inner = config.hidden_size, config.inner_size
    if rank:  # q, k, v and out; gate, up and down
        return config.num_blocks * rank * (4 * 2 * size + 3 * (size + inner))
    block = size * (4 * size + 3 * inner + 2)
    return config.num_blocks * block + size * (2 * config.vocab_size + 1)


def plan_of(model: str, config: LlamaConfig) -> Plan:
    """Return a plan with a whole replica on each node."""
    layers = (0, config.num_blocks + 2)
    return Plan(
        model=model,
        seq_len=config.max_seq_len,
        global_batch=len(NODES),
        replicas=tuple(
            Replica(
                num_microbatches=1,
                microbatch_size=1,
                stages=(Stage(node=node, devices=(0,), layers=layers, launch_ahead=1),),
            )
            for node in NODES
        ),
    )


def run_config(
    folder: Path, model: Path, seq_len: int, lora: LoraConfig, wire: Wire
) -> RunConfig:
    """Return the settings of a run of the model in the folder."""
    config = RunConfig(
        model=str(model),
        run_dir=folder / "run",
        steps=_STEPS,
        seq_len=seq_len,
        global_batch=len(NODES),
        dtype="float32",
        simulate=True,
        digest_every=0,
        lora=lora,
        gradient_wire=wire,
    )
    data = replace(config.data, cache_dir=folder / "cache")
    return replace(config, data=data)


def step_bytes(folder: Path, config: LlamaConfig, lora: LoraConfig, wire: Wire) -> int:
    """Train a model in a folder; return all workers' gradient bytes per step.

    Raises AssertionError if steps differ in this number.
    """
    model, text = folder / "model", folder / "text.txt"
    model.mkdir(parents=True)
    (model / CONFIG).write_text(json.dumps(fields_of(config)))
    text.write_text(_TEXT)
    dataset = prepare(folder / "data", Ingredients(path=text), config.vocab_size)
    plan = plan_of(str(model), config)
    own = run_config(folder, model, config.max_seq_len, lora, wire)
    settings = worker_settings(own, cluster_toml(_CLUSTER), plan, dataset)
    with ExitStack() as stack:
        launcher = OnThisMachine(
            folder / "logs", stack, module="experiments.finetune.counting_worker"
        )
        controller = start_workers(launcher, plan)
        controller.build(settings | {FOLDER: str(folder)})
        controller.connect()
        controller.compile()
        controller.initialise(0)
        for step in range(_STEPS):
            controller.step(step)
        controller.end()
    so_far = [0, *(_sent_bytes(folder, step) for step in range(_STEPS))]
    by_step = {b - a for a, b in zip(so_far, so_far[1:], strict=False)}
    assert len(by_step) == 1, so_far
    return by_step.pop()


def _sent_bytes(folder: Path, step: int) -> int:
    """Return the bytes that all workers had sent for gradient sums after the step."""
    return sum(
        num_bytes
        for node in NODES
        for _, kind, num_bytes in json.loads(
            (folder / f"{node}.{step}.json").read_text()
        )
        if kind == SUMS
    )


def measured(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, lora in (("full", LoraConfig()), ("lora", LORA)):
        num_trained = trained_parameters(MODEL, lora.rank)
        found[what] = {"trained_bytes": 4 * num_trained}
        for wire, item_bytes in WIRE_BYTES.items():
            sent_bytes = step_bytes(folder / f"{what}-{wire}", MODEL, lora, wire)
            found[what][wire] = {
                "sent_bytes": sent_bytes,
                "by_formula_bytes": len(NODES) * item_bytes * num_trained,
            }
    full, adapters = (found[what]["float32"]["sent_bytes"] for what in found)
    return {"replicas": len(NODES), **found, "lora_of_full": adapters / full}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory() as scratch:
        found = measured(Path(scratch))
    result = {"command": COMMAND, "machine": machine(), **found}
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if asked.output is not None:
        asked.output.write_text(text)


if __name__ == "__main__":
    main()
