# SPDX-License-Identifier: Apache-2.0
"""Measures the rate of generated text in tokens per second, beside transformers.

Times the prompt and the following tokens apart. The first token needs the whole prompt,
and is bound by products. Each later token reads all weights, and is bound by the
memory's bandwidth. Uses the code behind `hetjax sample`, at temperature 0. The product
does not predict these times; it does predict the memory of the weights.

Owns the rows. Does not own transformers' part (`experiments/gpu/models/torch_text.py`).
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.gpu.models.one_stage import node_of
from experiments.gpu.models.random_weights import random_weights
from experiments.gpu.models.way import peak_bytes
from experiments.gpu.parts.speed import has_torch
from experiments.gpu.rows import Row, without_names
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import device_spec
from hetjax.models.decoders import model_of
from hetjax.models.hugging_face.written import DTYPES
from hetjax.models.presets import model_config
from hetjax.plans.precision import node_precision
from hetjax.serving.decoding import Continuation
from hetjax.serving.generation import generated
from hetjax.serving.loaded_model import LoadedModel, load_layers, model_bytes
from hetjax.serving.sampling import Sampling

_RUNS = "runs, transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The numbers of tokens in the prompt and after it."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Tokens per second of the prompt, and of the tokens after the first new one."""

    prompt: float
    following: float


def measure(setting: Setting) -> Iterator[Row]:
    name, device = setting.choose("llama-1b", "tiny"), setting.device
    text = Text(
        prompt_tokens=setting.choose(512, 16), new_tokens=setting.choose(128, 8)
    )
    node, model = node_of(device), model_of(model_config(name))
    precision = node_precision(node)
    dtype, before_bytes = DTYPES[precision], _used_bytes(setting)
    loaded = load_layers(model, random_weights(dtype), dtype, [device])
    note = f"{name}, {precision}, {text.prompt_tokens} + {text.new_tokens} tokens"
    after_bytes, weight_bytes = _used_bytes(setting), model_bytes(model, dtype)
    yield Row(
        what="memory of the weights",
        measured=after_bytes - before_bytes if after_bytes else None,
        unit="bytes",
        predicted=weight_bytes,
        note=note,
    )
    ours = product_rates(loaded, text)
    yield from _rates("hetjax", ours, note)
    bandwidth = device_spec(node).memory_gb_per_s * 1e9
    share = ours.following * weight_bytes / bandwidth
    yield Row(
        what="following tokens, hetjax: share of the memory's bandwidth",
        measured=share,
        note="weights are read once for each token; bandwidth of the data sheet",
    )
    yield _peak("hetjax", peak_bytes(device))
    yield from _beside_transformers(setting, name, precision, text, ours)


def product_rates(loaded: LoadedModel, text: Text) -> Rates:
    """Return the rates of a second text; the first text compiles the programs."""
    rng = np.random.default_rng(0)
    vocab_size = loaded.model.vocab_size
    prompt = rng.integers(0, vocab_size, text.prompt_tokens).tolist()
    for _ in range(2):
        begin_s, times_s = time.perf_counter(), list[float]()
        for _ in generated(
            partial(Continuation, loaded),
            loaded.model.max_seq_len,
            prompt,
            text.new_tokens,
            Sampling(temperature=0.0),
            vocab_size,
        ):
            times_s.append(time.perf_counter())
    assert len(times_s) == text.new_tokens, len(times_s)
    return rates(text, times_s[0] - begin_s, times_s[-1] - begin_s)


def rates(text: Text, prompt_s: float, whole_s: float) -> Rates:
    """Compute the rates from the times to the first token and to the last."""
    return Rates(
        prompt=text.prompt_tokens / prompt_s,
        following=(text.new_tokens - 1) / (whole_s - prompt_s),
    )


def _beside_transformers(
    setting: Setting, name: str, precision: str, text: Text, ours: Rates
) -> Iterator[Row]:
    if not has_torch():
        why = "PyTorch or transformers is missing"
        yield Row(what=_RUNS, measured=None, note=why)
        return
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.models.torch_text",
        name,
        precision,
    ]
    command += [setting.platform, str(text.prompt_tokens), str(text.new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield Row(what=_RUNS, measured=False, note=without_names(done.stderr))
        return
    found = json.loads(done.stdout.splitlines()[-1])
    theirs = rates(text, found["prompt_s"], found["whole_s"])
    yield Row(what=_RUNS, measured=True)
    yield from _rates("transformers", theirs, "generate, with its cache and SDPA")
    yield _peak("transformers", found["peak_bytes"])
    what = "rate of hetjax over transformers"
    yield Row(what=f"{what}, prompt", measured=ours.prompt / theirs.prompt)
    ratio = ours.following / theirs.following
    yield Row(what=f"{what}, following tokens", measured=ratio)


def _rates(who: str, found: Rates, note: str) -> Iterator[Row]:
    unit = "tokens/s"
    yield Row(what=f"prompt, {who}", measured=found.prompt, unit=unit, note=note)
    what = f"following tokens, {who}"
    yield Row(what=what, measured=found.following, unit=unit, note=note)


def _peak(who: str, peak: int | None) -> Row:
    note = "" if peak is not None else "the device does not tell"
    return Row(what=f"peak memory, {who}", measured=peak, unit="bytes", note=note)


def _used_bytes(setting: Setting) -> int:
    """Return the device bytes that this process holds now; 0 if not reported."""
    return (setting.device.memory_stats() or {}).get("bytes_in_use", 0)
