# SPDX-License-Identifier: Apache-2.0
"""Plans fine-tuning of Llama 3.1 on few and unlike cards, without training.

    python -m experiments.finetune.plans [--output F]

For 8B: LoRA (rank 16, all linear weights) on one RTX 4090 and one T4, and on one RTX
3090 and one RTX 3060; all parameters on 4 A100-40 and 8 V100-32, whose stages compute
in float16. For 70B: LoRA over weights in NF4 (QLoRA) on two RTX 4090 and two RTX 3090,
each of 24 GB. Times are estimated from data sheets. Also reports what replicas exchange
per step: bytes of all gradients in fp32, once, of LoRA and of the whole 8B.

`python -m hetjax.plan` finds the same plans: --model llama3.1-8b
--cluster experiments/finetune/clusters/FILE.toml --lora.rank 16, and so on.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hetjax.api.planning import find_plan
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.model import Model
from hetjax.models.named import load_named
from hetjax.report.found import FoundPlan
from hetjax.stage.partition import gradient_sizes

HERE = Path(__file__).parent
MODEL = "llama3.1-8b"
LORA = LoraConfig(rank=16, alpha=32.0)
CASES: dict[str, dict[str, Any]] = {
    "rtx4090_t4": {"lora": LORA, "global_batch": 16, "seq_len": 1024},
    "rtx3090_3060": {"lora": LORA, "global_batch": 16, "seq_len": 1024},
    "a100_v100": {"global_batch": 64, "seq_len": 2048},
    "rtx3090_4090": {
        "model": "llama3.1-70b",
        "lora": LoraConfig(rank=16, alpha=32.0, frozen="nf4"),
        "global_batch": 16,
        "seq_len": 1024,
    },
}
_GRADIENT_BYTES = 4


def row(name: str) -> dict[str, Any]:
    """Return one case's plan with its predictions."""
    cluster = HERE / "clusters" / f"{name}.toml"
    sizes = {"model": MODEL, "microbatch_sizes": (1, 2), "quiet": True}
    found = find_plan(cluster=cluster, calibration="none", **(sizes | CASES[name]))
    predicted = found.plan.predicted
    assert predicted is not None
    return {
        "tokens_per_s": found.tokens_per_s,
        "step_time_s": found.step_time_s,
        "lower_bound_s": found.lower_bound_s,
        "stages": _stages(found),
        "peak_gib": {
            device: num_bytes / 2**30
            for device, num_bytes in predicted.peak_memory_bytes.items()
        },
    }


def _stages(found: FoundPlan) -> list[dict[str, Any]]:
    return [
        {
            "node": stage.node,
            "devices": len(stage.devices),
            "layers": list(stage.layers),
            "remat": stage.remat,
        }
        for _, _, stage in found.plan.stages()
    ]


def gradient_bytes(model: Model) -> int:
    """Return the bytes of all gradients of a step, as they travel between replicas."""
    tied = {path for module in model.modules for _, path in module.tied}
    groups = [(0, len(model.layers)), *tied]
    return _GRADIENT_BYTES * sum(sum(gradient_sizes(model, group)) for group in groups)


def result() -> dict[str, Any]:
    model = load_named(MODEL)
    adapted, whole = map(gradient_bytes, (with_adapters(model, LORA), model))
    return {
        "command": "python -m experiments.finetune.plans",
        "gradient_bytes": {"lora": adapted, "whole": whole},
        "lora_share": adapted / whole,
        "cases": {name: row(name) for name in CASES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(result(), indent=1) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
