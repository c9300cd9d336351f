# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a model of transformers on unlike devices, and exports it again.

    python -m experiments.finetune [--folder runs/finetune] [--output FILE]

Transformers makes a tiny Llama and trains it a little. `hetjax train --init` continues
with chat rows: all of its weights, then LoRA adapters alone. Each run is spread over
three simulated kinds of device by a plan of unlike replicas, is killed once, and
resumes by another plan; `hetjax export` writes the result. For comparison, torch does
the same training on one device (for LoRA: PEFT). Prints one JSON object: losses of both
by step, their largest relative difference, and the difference between logits of the
export, as transformers or PEFT loads it, and torch's own.

Needs the extra `transformers`.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers as hf  # pyright: ignore[reportMissingImports]
from peft import PeftModel  # pyright: ignore[reportMissingImports]

from experiments.finetune import reference, runs
from experiments.finetune.base_model import make_base_model
from experiments.finetune.chats import conversations, write_rows

COMMAND = "python -m experiments.finetune"
_CHATS = 400
_LORA = ("--lora.rank", "8", "--lora.alpha", "16")


def prepare(folder: Path) -> tuple[Path, Path]:
    """Make the model and the rows; return their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chats = conversations(_CHATS, seed=0)
    base, rows = folder / "base", folder / "rows.jsonl"
    make_base_model(base, [message["content"] for chat in chats for message in chat])
    write_rows(rows, chats)
    return base, rows


def fully(base: Path, rows: Path, run_dir: Path) -> dict[str, Any]:
    """Train all weights here and by torch; compare."""
    ours = runs.fine_tune(base, rows, run_dir)
    model = loaded(base)
    theirs = reference.train(model, run_dir)
    export = exported(run_dir)
    return compared(ours, theirs, loaded(export), model, run_dir)


def adapters(base: Path, rows: Path, run_dir: Path) -> dict[str, Any]:
    """Train adapters alone here and by torch, from the same ones; compare."""
    ours = runs.fine_tune(base, rows, run_dir, *_LORA)
    first = run_dir.with_name(run_dir.name + "-first")
    reference.first_adapters(run_dir, first)
    model = PeftModel.from_pretrained(loaded(base), first, is_trainable=True)
    theirs = reference.train(model, run_dir)
    export = PeftModel.from_pretrained(loaded(base), exported(run_dir))
    return compared(ours, theirs, export, model, run_dir)


def loaded(folder: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def exported(run_dir: Path, *more: str) -> Path:
    """Export a run's result into a folder beside it."""
    to = run_dir.with_name(run_dir.name + "-exported")
    words = [sys.executable, "-m", "hetjax.export", str(run_dir), "--to", str(to)]
    subprocess.run([*words, *more], check=True, stdout=sys.stderr)
    return to


def compared(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    our_model: Any,
    their_model: Any,
    run_dir: Path,
) -> dict[str, Any]:
    """Return losses and logits side by side."""
    tokens_BL = next(reference.batches(run_dir))[0]
    made = [reference.logits(model, tokens_BL) for model in (our_model, their_model)]
    apart = [abs(ours[step] / theirs[step] - 1) for step in theirs]
    return {
        "losses": {step: [ours[step], theirs[step]] for step in theirs},
        "most_apart_loss": max(apart),
        "most_apart_logits": float(np.abs(made[0] - made[1]).max()),
        "greatest_logit": float(np.abs(made[1]).max()),
    }


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    base, rows = prepare(options.folder)
    found = {
        "full": fully(base, rows, options.folder / "full"),
        "lora": adapters(base, rows, options.folder / "lora"),
    }
    text = json.dumps({"command": COMMAND, "runs": found}, indent=2) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
