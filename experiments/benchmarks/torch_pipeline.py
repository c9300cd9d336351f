# SPDX-License-Identifier: Apache-2.0
"""Compares PyTorch's 1F1B pipeline on two processes with PyTorch on one process.

    python -m experiments.benchmarks.torch_pipeline [--rounds 3] [--steps 5]

Prints one JSON object. Two processes of one thread each live through all rounds. In
each round process 0 first trains the whole model alone (microbatches one by one,
gradients added up; process 1 sleeps in a barrier). Then both train it as two stages cut
for equal work: `torch.distributed.pipelining.Schedule1F1B`, gloo over loopback. Seed,
batch, fp32 and AdamW are the same both ways. A step is timed from a barrier to the end
of its update, on the process that ends last; a rate is tokens / the median of a round's
steps. `efficiency` is the median over rounds of pipelined rate / (2 x one-process
rate); `bubble_allows` is M / (M + 1) for M microbatches. `losses_first_last` must agree
between both ways, which shows that they train the same model.

Needs PyTorch (`pip install torch`, the CPU build is enough) and two free cores. Cores
that slow each other down, by shared caches, memory or load, lower `efficiency` too.

Does not own our side of the comparison. Imports no JAX, so it also runs in a virtual
environment that has PyTorch alone.

Letters: B sequences of a microbatch, G sequences of a step, L tokens of a sequence,
D width, F inner width (4 D), H heads, K width of a head, V vocabulary.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput

try:
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]
    from torch.distributed.pipelining import (  # pyright: ignore[reportMissingImports]
        PipelineStage,
        Schedule1F1B,
    )
    from torch.multiprocessing.spawn import (  # pyright: ignore[reportMissingImports]
        spawn,
    )
    from torch.nn import functional  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as missing:
    error = BadInput(
        got=f"a Python without the module {missing.name} ({sys.executable})",
        allowed="a Python with PyTorch (tried with 2.13; the CPU build is enough)",
        fix="pip install torch",
    )
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)

NUM_HEADS = 8
NUM_STAGES = 2
NUM_WARM_UP_STEPS = 2
# process 1 waits in one barrier for as long as process 0 trains alone
LONGEST_WAIT = datetime.timedelta(hours=12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is trained and how often; the fields are the command line's options."""

    layers: int = 8
    width: int = 512
    seq_len: int = 256
    vocab: int = 256
    microbatches: int = 8
    microbatch_size: int = 4
    steps: int = 5
    rounds: int = 3

    def __post_init__(self) -> None:
        for option, value in asdict(self).items():
            least = NUM_STAGES if option in ("layers", "microbatches") else 1
            if value < least:
                option = option.replace("_", "-")
                raise BadInput(
                    got=f"--{option} {value}",
                    allowed=f"{least} or more",
                    fix=f"--{option} {least}",
                )
        if self.width % NUM_HEADS:
            raise BadInput(
                got=f"--width {self.width}",
                allowed=f"multiples of the {NUM_HEADS} heads",
                fix=f"--width {self.width + -self.width % NUM_HEADS}",
            )

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.microbatch_size * self.seq_len


class Embedding(nn.Module):
    """Tokens plus learned positions."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.tokens_VD = nn.Embedding(setting.vocab, setting.width)
        self.positions_LD = nn.Parameter(
            0.02 * torch.randn(setting.seq_len, setting.width)
        )

    def forward(self, tokens_BL: Any) -> Any:
        return self.tokens_VD(tokens_BL) + self.positions_LD


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a GELU MLP 4 x as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BLD: Any) -> Any:
        q_BHLK, k_BHLK, v_BHLK = (
            y_BLD.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for y_BLD in self.qkv(self.attention_norm(x_BLD)).chunk(3, dim=-1)
        )
        mixed_BHLK = functional.scaled_dot_product_attention(
            q_BHLK, k_BHLK, v_BHLK, is_causal=True
        )
        x_BLD = x_BLD + self.output(mixed_BHLK.transpose(1, 2).flatten(2))
        inner_BLF = functional.gelu(self.up(self.mlp_norm(x_BLD)), approximate="tanh")
        return x_BLD + self.down(inner_BLF)


def all_layers(setting: Setting) -> list[Any]:
    """Return all layers: first the embedding, last the untied head with its norm."""
    torch.manual_seed(0)
    blocks = [Block(setting.width) for _ in range(setting.layers)]
    norm = nn.LayerNorm(setting.width)
    head = nn.Linear(setting.width, setting.vocab, bias=False)
    return [Embedding(setting), *blocks, nn.Sequential(norm, head)]


def equal_cut(setting: Setting) -> int:
    """Return the second stage's first layer that minimises the larger stage's FLOPs.

    Per token and pass: a block 24 D^2 + 2 L D (causal), the head 2 D V.
    """
    block = 24 * setting.width**2 + 2 * setting.seq_len * setting.width
    head = 2 * setting.width * setting.vocab

    def larger_flops(num_first: int) -> int:
        return max(num_first * block, (setting.layers - num_first) * block + head)

    return 1 + min(range(1, setting.layers + 1), key=larger_flops)


def random_batch(setting: Setting) -> tuple[Any, Any]:
    """Return random tokens and targets, the same on every process."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, setting.microbatches * setting.microbatch_size, setting.seq_len)
    tokens_GL, targets_GL = torch.randint(setting.vocab, shape, generator=generator)
    return tokens_GL, targets_GL


def cross_entropy(logits_BLV: Any, targets_BL: Any) -> Any:
    return functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def one_process_step(setting: Setting) -> Callable[[], float]:
    """Return a step of the whole model on this process; it returns the mean loss."""
    model = nn.Sequential(*all_layers(setting))
    optimizer = adamw(model)
    batch = [x_GL.split(setting.microbatch_size) for x_GL in random_batch(setting)]

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for tokens_BL, targets_BL in zip(*batch, strict=True):
            loss = cross_entropy(model(tokens_BL), targets_BL) / setting.microbatches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return float(sum(losses))

    return step


def pipelined_step(setting: Setting, rank: int) -> Callable[[], float]:
    """Return a step of this process's stage. The step returns the mean loss on the last
    stage, 0 elsewhere."""
    cut = equal_cut(setting)
    held = slice(cut) if rank == 0 else slice(cut, None)
    model = nn.Sequential(*all_layers(setting)[held])
    optimizer = adamw(model)
    tokens_GL, targets_GL = random_batch(setting)
    stage = PipelineStage(model, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, setting.microbatches, loss_fn=cross_entropy)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Any] = []
        if rank == 0:
            schedule.step(tokens_GL, return_outputs=False)
        else:
            schedule.step(target=targets_GL, losses=losses, return_outputs=False)
        optimizer.step()
        return float(sum(x.detach() for x in losses)) / setting.microbatches

    return step


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Return the loss, and the seconds from a barrier to the end of the slower step.

    Both processes call this at once; one without work passes `idle`.
    """
    dist.barrier()
    start_s = time.perf_counter()
    loss = step()
    taken_s = time.perf_counter() - start_s
    both = torch.tensor([taken_s, loss], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].item(), both[1].item()


def idle() -> float:
    return 0.0


def measure(setting: Setting, rank: int) -> dict[str, Any]:
    """Run all rounds, both ways in turn; both processes return the same figures."""
    steps = {
        "one_process": one_process_step(setting) if rank == 0 else idle,
        "pipelined": pipelined_step(setting, rank),
    }
    rates: dict[str, list[float]] = {way: [] for way in steps}
    losses: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(setting.rounds):
        for way, step in steps.items():
            taken = [timed(step) for _ in range(NUM_WARM_UP_STEPS + setting.steps)]
            step_s = statistics.median(s for s, _ in taken[NUM_WARM_UP_STEPS:])
            rates[way].append(setting.tokens_per_step / step_s)
            losses[way] += [loss for _, loss in taken]
    pairs = zip(rates["pipelined"], rates["one_process"], strict=True)
    return {
        "one_process_tokens_per_s": rates["one_process"],
        "pipelined_tokens_per_s": rates["pipelined"],
        "efficiency": statistics.median(p / (NUM_STAGES * o) for p, o in pairs),
        "bubble_allows": setting.microbatches / (setting.microbatches + NUM_STAGES - 1),
        "losses_first_last": {way: [x[0], x[-1]] for way, x in losses.items()},
    }


def work(rank: int, setting: Setting, folder: str) -> None:
    """Run process `rank`; process 0 leaves the figures in the folder."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_STAGES,
        timeout=LONGEST_WAIT,
    )
    figures = measure(setting, rank)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def run(setting: Setting) -> dict[str, Any]:
    """Start both processes, wait for them, and describe what was run."""
    # by default gloo listens on the address of the host's name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (setting, folder), NUM_STAGES)
        figures = json.loads(Path(folder, "figures.json").read_text())
    return figures | {
        "setting": asdict(setting) | {"second_stage_from_layer": equal_cut(setting)},
        "cores": os.cpu_count(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in asdict(Setting()).items():
        name = f"--{option.replace('_', '-')}"
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"default {default}"
        )
    try:
        setting = Setting(**vars(parser.parse_args()))
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(run(setting), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
