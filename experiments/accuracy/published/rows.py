# SPDX-License-Identifier: Apache-2.0
"""Turns published runs of other frameworks into plans of ours.

Owns reading the authors' printed figures, and building plans, models and clusters from
them. Does not own the prediction (`predicting.py`). Nothing here is fitted: the layout
comes from the row, the devices from the catalogue.

Where a framework shards weights (FSDP, ZeRO), the plan has one stage with a data axis.
An MLP without a gate becomes a gated MLP with as many elements. Rows in fp8, with
context parallelism or with async tensor parallelism are left out: hetjax has none of
these.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from experiments.accuracy.referee import (
    DEVICE,
    TENSOR,
    model_dims,
    model_of_size,
    read_runs,
)
from hetjax.cluster.cluster import Cluster, Node
from hetjax.models.configs import GPTConfig, LlamaConfig
from hetjax.models.decoders import gpt_model, llama_model
from hetjax.models.model import Model
from hetjax.plans.attention import Attention
from hetjax.plans.plan import Plan, Remat, Replica, Stage, StageMesh
from hetjax.plans.precision import Dtype
from hetjax.plans.schedules import default_launch_ahead

_PER_HOST = 8
_SAILOR_DEVICES = {
    "A100-40": "A100-SXM4-40GB",
    "A100-80": "A100-SXM4-80GB",
    "GH-96": "GH200-480GB",
    "RTX-2080": "GeForce-RTX-2080-Ti",
    "RTX-3090": "GeForce-RTX-3090",
    "Titan-RTX": "TITAN-RTX",
    "V100-16": "V100-SXM2-16GB",
}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row: what ran, on what, and its measured seconds of a step.

    `measured_bytes` is the peak memory of the fullest device, if it was published.
    `hides_sums`: the framework exchanges weights and gradients during compute.
    `only_passes`: only forward and backward of one microbatch were measured.
    """

    family: str
    name: str
    plan: Plan
    model: Model
    cluster: Cluster
    measured_s: float
    measured_bytes: float | None = None
    dtype: Dtype = "bfloat16"
    attention: Attention | None = None
    hides_sums: bool = False
    only_passes: bool = False

    @property
    def device_s_per_token(self) -> float:
        """The seconds of all devices of the plan together, per token."""
        num_devices = len(self.plan.used_devices())
        return self.measured_s * num_devices / self.plan.tokens_per_step


def published_runs(folder: Path) -> list[PublishedRun]:
    """Read all rows of the folder of measurements, family by family."""
    return [
        *_llm_foundry(folder),
        *_torchtitan(folder),
        *_maxtext(folder),
        *_korthikanti(folder),
        *_sailor_layers(folder),
        *_sailor_steps(folder),
    ]


def _llm_foundry(folder: Path) -> Iterator[PublishedRun]:
    raw = json.loads((folder / "llm_foundry/llm_foundry_public.json").read_text())
    sizes, vocab_size = raw["models"]["sizes"], raw["models"]["common"]["vocab"]
    devices = {"a100": ("A100-SXM4-80GB", 1600.0), "h100": ("H100-80GB-HBM3", None)}
    for row in raw["rows"]:
        kind = row["gpu"][:4]
        device, gbit_per_s = devices[kind]
        size = sizes[row["model"]]
        config = GPTConfig(
            name=row["model"],
            vocab_size=vocab_size,
            hidden_size=size["d_model"],
            num_blocks=size["layers"],
            num_heads=size["heads"],
            max_seq_len=row["seq_len"],
        )
        yield PublishedRun(
            family=f"llm-foundry {kind.upper()}",
            name="{model} x{gpus} seq {seq_len} mb {microbatch_per_gpu}".format(**row),
            plan=_one_stage(
                num_blocks=size["layers"],
                data=row["gpus"],
                seq_len=row["seq_len"],
                per_rank=row["microbatch_per_gpu"],
                num_microbatches=row["accumulation"],
                remat="full" if row["activation_checkpointing"] else "none",
            ),
            model=gpt_model(config),
            cluster=_one_node(device, row["gpus"], _PER_HOST, gbit_per_s),
            measured_s=row["step_time_s"],
            hides_sums=True,
        )


def _torchtitan(folder: Path) -> Iterator[PublishedRun]:
    raw = json.loads((folder / "torchtitan/torchtitan.json").read_text())
    remats: dict[str, Remat] = {"full": "full", "selective (per op)": "selective"}
    for row in raw["rows"]:
        if row["float8"] or row["async_tp"] or row["context"] > 1:
            continue
        if row["pipeline"] > 1 or row["activation_checkpointing"] not in remats:
            continue
        yield PublishedRun(
            family="torchtitan H100-96",
            name="{model} x{gpus} compile {compile}".format(**row),
            plan=_one_stage(
                num_blocks=raw["dims"][row["model"]]["layers"],
                data=row["fsdp"],
                tensor=row["tensor"],
                seq_len=row["seq_len"],
                per_rank=row["local_batch"],
                num_microbatches=1,
                remat=remats[row["activation_checkpointing"]],
            ),
            model=_llama(row["model"], raw["dims"][row["model"]], row["seq_len"]),
            cluster=Cluster(
                name="h100-96",
                nodes=(
                    Node(
                        name="a",
                        device="H100-80GB-HBM3",
                        count=row["gpus"],
                        hosts=row["gpus"] // _PER_HOST,
                        memory_gib=95.0,
                        memory_gb_per_s=2400.0,
                        network_gbit_per_s=3200.0,
                    ),
                ),
            ),
            measured_s=row["derived_step_time_s"],
            measured_bytes=_bytes(row["memory_gib"]),
            hides_sums=True,
        )


def _maxtext(folder: Path) -> Iterator[PublishedRun]:
    raw = json.loads((folder / "maxtext/maxtext_v5e.json").read_text())
    for row in raw["rows"]:
        dims, chips = row["dims"], row["chips"]
        config = LlamaConfig(
            name=row["model"],
            vocab_size=raw["model_defaults"]["common"]["vocab"],
            hidden_size=dims["d_model"],
            num_blocks=dims["layers"],
            num_heads=dims["heads"],
            num_kv_heads=dims["heads"],
            head_size=dims["head_dim"],
            inner_size=_ungated(dims["d_ff"]),
            max_seq_len=row["seq_len"],
            tied=True,
        )
        yield PublishedRun(
            family="MaxText v5e",
            name="{model} x{chips} b {per_chip_batch_published}".format(**row),
            plan=_one_stage(
                num_blocks=dims["layers"],
                data=chips // row["tensor"],
                tensor=row["tensor"],
                seq_len=row["seq_len"],
                per_rank=row["per_chip_batch_published"] * row["tensor"],
                num_microbatches=1,
                remat=row["remat"],
            ),
            model=llama_model(config),
            cluster=_one_node("TPU-v5e", chips, 4),
            measured_s=row["derived_step_time_s"],
            hides_sums=True,
        )


def _korthikanti(folder: Path) -> Iterator[PublishedRun]:
    path = folder / "korthikanti/korthikanti_22b_175b.json"
    remats: dict[str, Remat] = {"full": "full", "attn_only": "selective"}
    for row in json.loads(path.read_text())["table5_iteration_time"]:
        arch, execution = row["arch"], row["exec"]
        config = GPTConfig(
            name=row["model"],
            vocab_size=51200,
            hidden_size=arch["hidden"],
            num_blocks=arch["num_blocks"],
            num_heads=arch["attn_heads"],
            max_seq_len=arch["seq_size"],
        )
        tensor, depth = execution["tensor_par"], execution["pipeline_par"]
        remat = remats[execution["activation_recompute"]]
        yield PublishedRun(
            family="Korthikanti A100",
            name=f"{row['model']} {row['mode']}",
            plan=_pipeline(
                num_blocks=arch["num_blocks"],
                depth=depth,
                tensor=tensor,
                seq_len=arch["seq_size"],
                microbatch_size=execution["microbatch_size"],
                global_batch=execution["batch_size"],
                remat=remat,
            ),
            model=gpt_model(config),
            cluster=Cluster(
                name="selene",
                nodes=tuple(
                    Node(
                        name=f"a-{s}",
                        device="A100-SXM4-80GB",
                        count=tensor,
                        network_gbit_per_s=1600.0,
                    )
                    for s in range(depth)
                ),
            ),
            measured_s=row["measured_iteration_s"],
            attention="xla",
        )


def _sailor_layers(folder: Path) -> Iterator[PublishedRun]:
    """Yield layer times of two models by kind of device, summed over a whole model."""
    published = json.loads((folder / "sailor/models.json").read_text())
    for path in sorted((folder / "sailor/profiles_referee").glob("*/*.json")):
        name, device = path.parent.name, _SAILOR_DEVICES[path.stem]
        if name not in published:
            continue
        dims = published[name]
        for size, by_tensor in json.loads(path.read_text()).items():
            for tensor, layers in by_tensor.items():
                yield PublishedRun(
                    family=f"Sailor layers {path.stem}",
                    name=f"{name} tensor {tensor} mb {size}",
                    plan=_one_stage(
                        num_blocks=dims["num_layers"],
                        data=1,
                        tensor=int(tensor),
                        seq_len=dims["sequence_length"],
                        per_rank=int(size),
                        num_microbatches=1,
                        remat="none",
                    ),
                    model=gpt_model(
                        GPTConfig(
                            name=name,
                            vocab_size=dims["vocab_size"],
                            hidden_size=dims["hidden_size"],
                            num_blocks=dims["num_layers"],
                            num_heads=dims["heads"],
                            max_seq_len=dims["sequence_length"],
                        )
                    ),
                    cluster=_one_node(device, int(tensor), int(tensor)),
                    measured_s=sum(f + b for f, b, _ in layers.values()),
                    dtype="float32",
                    attention="xla",
                    only_passes=True,
                )


def _sailor_steps(folder: Path) -> Iterator[PublishedRun]:
    model = model_of_size(model_dims(folder))
    for run in read_runs(folder):
        names = dict.fromkeys(stage.node for _, _, stage in run.plan.stages())
        nodes = tuple(Node(name=name, device=DEVICE, count=TENSOR) for name in names)
        yield PublishedRun(
            family="Sailor steps GH-96",
            name=run.name,
            plan=run.plan,
            model=model,
            cluster=Cluster(name="alps", nodes=nodes),
            measured_s=run.measured_s,
            measured_bytes=run.measured_bytes,
            dtype="float32",
            attention="xla",
        )


def _llama(name: str, dims: dict[str, int], seq_len: int) -> Model:
    return llama_model(
        LlamaConfig(
            name=name,
            vocab_size=dims["vocab"],
            hidden_size=dims["d_model"],
            num_blocks=dims["layers"],
            num_heads=dims["heads"],
            num_kv_heads=dims["kv_heads"],
            inner_size=dims["d_ff"],
            max_seq_len=seq_len,
        )
    )


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * 2**30


def _ungated(inner_size: int) -> int:
    """Return the inner size of a gated MLP with as many elements, a multiple of 128."""
    return round(inner_size * 2 / 3 / 128) * 128


def _one_node(
    device: str, count: int, per_host: int, gbit_per_s: float | None = None
) -> Cluster:
    hosts = max(1, count // per_host)
    node = Node(
        name="a",
        device=device,
        count=count,
        hosts=hosts,
        network_gbit_per_s=gbit_per_s,
    )
    return Cluster(name=device, nodes=(node,))


def _one_stage(
    *,
    num_blocks: int,
    data: int,
    seq_len: int,
    per_rank: int,
    num_microbatches: int,
    remat: Remat,
    tensor: int = 1,
) -> Plan:
    stage = Stage(
        node="a",
        devices=tuple(range(data * tensor)),
        mesh=StageMesh(data=data, tensor=tensor),
        layers=(0, num_blocks + 2),
        launch_ahead=1,
        remat=remat,
    )
    return _one_replica((stage,), seq_len, num_microbatches, per_rank * data)


def _pipeline(
    *,
    num_blocks: int,
    depth: int,
    tensor: int,
    seq_len: int,
    microbatch_size: int,
    global_batch: int,
    remat: Remat,
) -> Plan:
    """Return equal stages, the embedding with the first and the head with the last."""
    num_microbatches = global_batch // microbatch_size
    cuts = [0, *accumulate([num_blocks // depth] * depth, initial=1)][2:-1]
    stages = tuple(
        Stage(
            node=f"a-{s}",
            devices=tuple(range(tensor)),
            mesh=StageMesh(tensor=tensor),
            layers=layers,
            remat=remat,
            launch_ahead=default_launch_ahead(
                "1f1b", num_stages=depth, stage=s, num_microbatches=num_microbatches
            ),
        )
        for s, layers in enumerate(pairwise([0, *cuts, num_blocks + 2]))
    )
    return _one_replica(stages, seq_len, num_microbatches, microbatch_size)


def _one_replica(
    stages: tuple[Stage, ...], seq_len: int, num_microbatches: int, size: int
) -> Plan:
    replica = Replica(
        num_microbatches=num_microbatches, microbatch_size=size, stages=stages
    )
    return Plan(
        model="published",
        seq_len=seq_len,
        global_batch=num_microbatches * size,
        replicas=(replica,),
    )
