# SPDX-License-Identifier: Apache-2.0
"""Makes conversations that a tiny model can learn: sums, in words."""

import json
import random
from pathlib import Path
from typing import Any

Conversation = list[dict[str, str]]


def conversations(count: int, seed: int) -> list[Conversation]:
    """Return `count` conversations; equal seeds give equal ones."""
    draw = random.Random(seed)
    return [_conversation(draw) for _ in range(count)]


def _conversation(draw: random.Random) -> Conversation:
    """Return one or two questions, each with its answer."""
    count = draw.choice((1, 2))
    turns = [_turn(draw.randrange(20), draw.randrange(20)) for _ in range(count)]
    return [message for turn in turns for message in turn]


def _turn(a: int, b: int) -> Conversation:
    return [
        {"role": "user", "content": f"How much is {a} and {b}?"},
        {"role": "assistant", "content": f"{a} and {b} are {a + b}."},
    ]


def write_rows(path: Path, chats: list[Conversation]) -> None:
    """Write them as chat rows, in the form that `--data.path` takes."""
    rows: list[dict[str, Any]] = [{"messages": chat} for chat in chats]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
