# SPDX-License-Identifier: Apache-2.0
"""Measures how fast text becomes tokens on disk, and how much memory that takes.

Two rates alternate: the library alone, on texts already in memory and in batches as
`datasets` makes them; and our path from a file to a file. Memory is the largest
resident set of a process that builds a data set of a small text, and of a large one.

    python -m experiments.benchmarks.tokenising --output FILE [--gigabytes 1]
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from experiments.machine import machine
from hetjax.data import tokenizer
from hetjax.data.building import write_documents
from hetjax.data.dataset import prepare
from hetjax.data.settings import Ingredients
from hetjax.data.sources import corpus
from hetjax.data.tokenizer import Tokenizer

RATE_BYTES = 50_000_000
SMALL_BYTES = 100_000_000
VOCAB_SIZE = 32_000
_SAMPLE_CHARS = 4_000_000
_BATCH = 1000  # documents


def write_text(path: Path, num_bytes: int) -> None:
    """Write documents of the offline corpus, in random orders, repeated as needed.

    Each begins with its own number, so no two are equal.
    """
    documents = [text for text in corpus.offline_documents() if text.strip()]
    rng, written, number = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            for text in rng.sample(documents, len(documents)):
                line = json.dumps({"text": f"{number}\n{text}"}, ensure_ascii=False)
                written += len(line.encode()) + 1
                number += 1
                file.write(line + "\n")
                if written >= num_bytes:
                    break


def rates(path: Path, num_turns: int) -> dict[str, float]:
    """Return MB of text per second, by the library alone and by our path."""
    documents = [str(row) for row in corpus.files(path).rows()]
    num_bytes = sum(len(text.encode()) for text in documents)
    sampled = tokenizer.sample(documents, _SAMPLE_CHARS)
    ids = tokenizer.train(sampled, VOCAB_SIZE)
    alone_s, ours_s = [], []
    for _ in range(num_turns):
        alone_s.append(_alone_s(ids, documents))
        ours_s.append(_ours_s(ids, path))
    alone, ours = num_bytes / 1e6 / median(alone_s), num_bytes / 1e6 / median(ours_s)
    return {
        "text_mb": num_bytes / 1e6,
        "alone_mb_per_s": alone,
        "ours_mb_per_s": ours,
        "ratio": median(a / b for a, b in zip(alone_s, ours_s, strict=True)),
    }


def _alone_s(ids: Tokenizer, documents: list[str]) -> float:
    begin_s = time.perf_counter()
    for start in range(0, len(documents), _BATCH):
        batch = documents[start : start + _BATCH]
        ids.core.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - begin_s


def _ours_s(ids: Tokenizer, path: Path) -> float:
    """Return the seconds of our path, which also reads the file and writes tokens."""

    def documents() -> Iterator[str]:
        return (str(row) for row in corpus.files(path).rows())

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        begin_s = time.perf_counter()
        write_documents(Path(folder, "t.npy"), documents(), ids, lambda size: None)
        return time.perf_counter() - begin_s


def largest_mb(path: Path) -> float:
    """Return the largest resident set of another process that builds the data set."""
    command = [sys.executable, "-m", __spec__.name, "--build", str(path)]
    return json.loads(subprocess.check_output(command))["largest_mb"]


def build(path: Path) -> None:
    """Build a data set of the text; print the memory that it took."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        made = prepare(Path(cache), Ingredients(path=path), VOCAB_SIZE)
        num_tokens = made.num_tokens
    print(json.dumps({"largest_mb": _largest_bytes() / 1e6, "tokens": num_tokens}))


def _largest_bytes() -> int:
    """Return this program's peak; `getrusage` would include the forking process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measured(
    gigabytes: float, num_turns: int, tell: Callable[[dict[str, object]], None]
) -> None:
    """Report the results so far after each part: parts take minutes to hours."""
    found: dict[str, object] = {"machine": machine("tokenizers")}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        write_text(text, RATE_BYTES)
        found |= rates(text, num_turns)
        tell(found)
        for name, size in ("small", SMALL_BYTES), ("large", round(gigabytes * 1e9)):
            if size:
                write_text(text, size)
                found[f"{name}_mb"] = text.stat().st_size / 1e6
                found[f"{name}_largest_mb"] = largest_mb(text)
                tell(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="0: no large text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.build is not None:
        build(asked.build)
        return
    command = " ".join(["python -m experiments.benchmarks.tokenising", *sys.argv[1:]])

    def tell(found: dict[str, object]) -> None:
        text = json.dumps({"command": command, **found}, indent=1) + "\n"
        print(text, end="", flush=True)
        if asked.output is not None:
            asked.output.write_text(text)

    measured(asked.gigabytes, asked.turns, tell)


if __name__ == "__main__":
    main()
