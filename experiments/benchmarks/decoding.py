# SPDX-License-Identifier: Apache-2.0
"""Measures tokens per second with cached keys and values, and host memory of loading.

    python -m experiments.benchmarks.decoding [--rounds 7] [--tokens 24]

Speed: a Llama with the sizes of preset `tiny` but more positions continues texts of
several lengths, once by `hetjax/serving/decoding.py`, once by running the whole text
(one program of its full length) for each token. Both alternate; medians of rounds.

Memory: a Llama of 150 million parameters in fp32 on disk is loaded as bf16 in its own
process. `peak_bytes` is the most anonymous memory above that before loading; on a CPU
the weights are part of it. Prints one JSON object.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from experiments.machine import machine
from hetjax.models.configs import LlamaConfig
from hetjax.models.decoders import model_of
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.model import abstract_params, apply, bind, parameter_count
from hetjax.models.named import load_named
from hetjax.models.presets import TINY
from hetjax.serving.decoding import Continuation
from hetjax.serving.loaded_model import LoadedModel, load_layers

_COMMAND = "python -m experiments.benchmarks.decoding"
_READ = LlamaConfig(
    name="read",
    vocab_size=16_000,
    hidden_size=1_024,
    inner_size=2_816,
    num_blocks=9,
    num_heads=16,
    num_kv_heads=16,
    max_seq_len=128,
)
_POSITIONS = (128, 512, 1_024)


def drawn(path: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([*path.encode()]).normal(0, 0.02, shape)


def whole(loaded: LoadedModel) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function for logits_V after a position, by one program on all tokens."""

    @jax.jit
    def program(params: list[Any], tokens_BL: jax.Array, at: jax.Array) -> jax.Array:
        x: Any = tokens_BL
        for layer, own in zip(loaded.layers[:-1], params[:-1], strict=True):
            for spec in layer.specs:
                x, _ = apply(spec, own[spec.name], x)
        (spec,) = loaded.layers[-1].specs
        head: Any = bind(spec, params[-1][spec.name])
        x_11D = jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1)
        return head.logits(x_11D)[0, 0]

    params = [layer.params for layer in loaded.layers]
    return lambda tokens_BL, at: np.asarray(program(params, tokens_BL, np.int32(at)))


def kept_rate(loaded: LoadedModel, tokens_L: np.ndarray, num_tokens: int) -> float:
    """Return tokens per second after the first."""
    text = Continuation(loaded, len(tokens_L))
    text.prefill(tokens_L[:-num_tokens].tolist())
    start_s = time.perf_counter()
    for token in tokens_L[-num_tokens:]:
        text.decode(int(token))
    return num_tokens / (time.perf_counter() - start_s)


def whole_rate(
    program: Callable[[np.ndarray, int], np.ndarray],
    tokens_L: np.ndarray,
    num_tokens: int,
) -> float:
    start_s = time.perf_counter()
    for at in range(len(tokens_L) - num_tokens, len(tokens_L)):
        program(tokens_L[None], at)
    return num_tokens / (time.perf_counter() - start_s)


def speed(positions: int, rounds: int, num_tokens: int) -> dict[str, Any]:
    model = model_of(replace(TINY, max_seq_len=positions))
    loaded = load_layers(model, drawn, np.dtype(np.float32), jax.local_devices())
    tokens_L = np.random.default_rng(0).integers(0, 1_024, positions, np.int32)
    ways = {
        "kept": partial(kept_rate, loaded),
        "whole": partial(whole_rate, whole(loaded)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            found = way(tokens_L, num_tokens)
            if round_:  # the first compiles
                rates[name].append(found)
    shares = [k / w for k, w in zip(rates["kept"], rates["whole"], strict=True)]
    told = {f"{name}_tokens_per_s": median(each) for name, each in rates.items()}
    return {"positions": positions, **told, "times_as_fast": median(shares)}


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, which no file backs."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def reading(folder: Path) -> None:
    """Be the other process: print the bytes of weights and the peak memory."""
    model, weights = (
        load_named(str(folder)),
        FolderWeights(folder, np.dtype("bfloat16")),
    )
    for spec in model.modules:
        abstract_params(spec)
    jax.device_put(np.ones(1, np.float32)).block_until_ready()
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    loaded = load_layers(model, weights, weights.dtype, jax.local_devices())
    done.set()
    watching.join()
    arrays = jax.tree.leaves([layer.params for layer in loaded.layers])
    print(json.dumps([sum(a.nbytes for a in arrays), peak - before]))


def memory() -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder, _READ, fields_of(_READ), drawn, "float32")
        command = [sys.executable, "-m", __spec__.name, "--reading", scratch]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    weight_bytes, peak_bytes = json.loads(done.stdout)
    model = model_of(_READ)
    return {
        "parameters": sum(map(parameter_count, model.layers)),
        "weight_bytes": weight_bytes,
        "peak_bytes": peak_bytes,
        "peak_per_weight_byte": peak_bytes / weight_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--reading", type=Path)
    options = parser.parse_args()
    if options.reading is not None:
        reading(options.reading)
        return
    result = {
        "command": _COMMAND,
        "machine": machine(),
        "rounds": options.rounds,
        "tokens": options.tokens,
        "speed": [speed(p, options.rounds, options.tokens) for p in _POSITIONS],
        "memory": memory(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
