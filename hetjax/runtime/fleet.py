# SPDX-License-Identifier: Apache-2.0
"""The controller of workers in other processes: says when, and hears how it went.

Owns generations, turns, and the step as its caller sees it. Out of the data path:
activations, gradients, batches and checkpoints never come here. Does not own how worker
processes are started (`processes.py`), nor what they do (`serving.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hetjax.mesh.pull import check_fits
from hetjax.plans.plan import Plan
from hetjax.runtime.control import Crew, Message

TransportName = Literal["sockets", "transfer"]


@dataclass(frozen=True, slots=True)
class FleetStep:
    """Outcome of one committed step."""

    grad_norm: float
    loss_sum: float
    num_tokens: int

    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return self.loss_sum / self.num_tokens


class Fleet:
    """A plan on workers, one per node, that have called or will call the `crew`.

    Every method may raise WorkerLost; the survivors then keep their state and wait for
    `connect`.
    """

    def __init__(self, plan: Plan, crew: Crew) -> None:
        self.plan, self.crew = plan, crew
        self.workers = list(dict.fromkeys(s.node for _, _, s in plan.stages()))
        self._generation = self._turn = 0

    def build(self, settings: Mapping[str, Any]) -> None:
        """Let every worker make its stages from these settings."""
        self._all({"do": "build", "settings": dict(settings)})

    def connect(self, transport: TransportName = "sockets") -> None:
        """Join the workers to each other, as a new generation.

        BadInput if the transport's tags cannot tell all messages of the plan apart.
        """
        if transport == "transfer":
            replicas = self.plan.replicas
            check_fits(
                num_replicas=len(replicas),
                num_stages=max(len(r.stages) for r in replicas),
                num_microbatches=max(r.num_microbatches for r in replicas),
            )
        self._generation += 1
        told = self._all({"do": "listen"})
        addresses = {worker: told[worker]["address"] for worker in self.workers}
        self.crew.ask(
            {
                worker: {
                    "do": "join",
                    "generation": self._generation,
                    "transport": transport,
                    "addresses": {w: a for w, a in addresses.items() if w != worker},
                }
                for worker in self.workers
            }
        )

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the programs of all stages."""
        counts: dict[str, tuple[int, int]] = {}

        def told(worker: str, news: Message) -> None:
            counts[worker] = news["done"], news["of"]
            if progress is not None and len(counts) == len(self.workers):
                progress(*map(sum, zip(*counts.values(), strict=True)))

        self.crew.ask({w: {"do": "compile"} for w in self.workers}, told)

    def initialise(self, seed: int) -> None:
        """Fresh weights and optimizer state, a function of the seed alone."""
        self._all({"do": "initialise", "seed": seed})

    def restore(self, directory: Path, step: int) -> None:
        """State of all stages from a checkpoint that all workers can read."""
        self._all({"do": "restore", "directory": str(directory), "step": step})

    def step(self, number: int) -> FleetStep:
        """Train on the global batch of this step; returns once all know NORM."""
        told = self._in_turn({"do": "step", "step": number})
        norms = {message["grad_norm"] for message in told.values()}
        assert len(norms) == 1, f"workers disagree on the norm of step {number}"
        return FleetStep(norms.pop(), *_loss(told))

    def evaluate(self, batches: Sequence[int]) -> float:
        """Mean cross-entropy in nats per token over batches of these numbers."""
        found = [_loss(self._in_turn({"do": "evaluate", "batch": n})) for n in batches]
        sums, num_tokens = zip(*found, strict=True)
        return sum(sums) / sum(num_tokens)

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """logits_V that follow the (last seq_len) tokens, by the first replica."""
        told = self._in_turn({"do": "logits", "tokens": list(tokens)})
        (logits_V,) = [m["logits"] for m in told.values() if "logits" in m]
        return np.array(logits_V, np.float32)

    def save(
        self, directory: Path, step: int, keep: int, host: Mapping[str, Any]
    ) -> bool:
        """Start a checkpoint; False if one is still being written somewhere.

        Workers write side by side into a directory that all can reach.
        """
        told = self._all({"do": "saver"})
        if any(message["busy"] for message in told.values()):
            return False
        saving = [worker for worker, message in told.items() if message["saves"]]
        request = {
            "do": "save",
            "directory": str(directory),
            "step": step,
            "keep": keep,
            "host": dict(host),
            "workers": saving,
        }
        self.crew.ask(dict.fromkeys(saving, request))
        return True

    def wait_saved(self) -> None:
        """Return once no checkpoint is being written."""
        self._all({"do": "saved"})

    def end(self) -> None:
        """Let the workers finish what they write, and leave."""
        self._all({"do": "end"})

    def _in_turn(self, request: Message) -> dict[str, Message]:
        """Run a program on all workers; no two runs share their messages."""
        self._turn += 1
        return self._all(request | {"turn": self._turn})

    def _all(self, request: Message) -> dict[str, Message]:
        return self.crew.ask(dict.fromkeys(self.workers, request))


def _loss(told: Mapping[str, Message]) -> tuple[float, int]:
    """(summed loss over last stages, tokens), added in the order of the stages."""
    sums = sorted(
        tuple(part) for message in told.values() for part in message["losses"]
    )
    (num_tokens,) = {message["num_tokens"] for message in told.values()}
    return float(np.sum([value for _, _, value in sums])), num_tokens
