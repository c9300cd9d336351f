# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters on workers: what each reads, and recovery after a kill.

Frozen weights are no state. A new worker reads them from where the run started, and
gets the adapters from the workers that still have them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.finetune.host import mapped_bytes
from hetjax.export import main as export
from hetjax.models.configs import LlamaConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import named_config
from hetjax.train import main
from hetjax.training.directory.rundir import LOGS
from tests.training.pair import (
    NODES,
    ONE_REPLICA,
    TWO_REPLICAS,
    between_steps,
    kill,
    training,
)
from tests.training.small import events
from tests.training.test_workers import losses, set_environment

LORA = ["--lora.rank", "2", "--optimizer.learning-rate", "3e-4"]
PAGES_BYTES = 2 * 65536  # pages around the bytes read, at either end


@dataclass(frozen=True)
class Run:
    """An undisturbed run, and the bytes of the file that its workers read."""

    run_dir: Path
    read_bytes: dict[str, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `tiny` with weights that no seed gives."""
    path, rng = tmp_path_factory.mktemp("base"), np.random.default_rng(0)

    def drawn(_: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(0, 0.05, shape).astype(np.float32)

    config = named_config("tiny")
    write_model(path, config, fields_of(config), drawn, "float32")
    return path


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, cache: Path
) -> Run:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    read: dict[str, int] = {}

    def look() -> None:
        for node in NODES:
            log, file = run_dir / LOGS / f"{node}.log", folder / "model.safetensors"
            read[node] = mapped_bytes(log, file)

    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        between_steps(patched, look)
        options = ["--init", str(folder), *LORA]
        assert main(training(run_dir, cache, *options, of=ONE_REPLICA)) == 0
    return Run(run_dir, read)


def test_a_worker_reads_the_bytes_of_its_layers_and_no_others(undisturbed: Run):
    config = named_config("tiny")
    assert isinstance(config, LlamaConfig) and config.num_blocks == 4
    size, heads = config.hidden_size, config.size_of_heads
    of_attention = 2 * size * heads * (config.num_heads + config.num_kv_heads)
    block = of_attention + 3 * size * config.inner_size + 2 * size
    table = config.vocab_size * size
    expected = {"left": table + 2 * block, "right": 2 * block + size + table}
    for node, num_parameters in expected.items():
        read_bytes = undisturbed.read_bytes[node]
        assert 4 * num_parameters <= read_bytes <= 4 * num_parameters + PAGES_BYTES


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_workers_that_are_killed_come_back_to_the_same_weights(
    tmp_path: Path,
    folder: Path,
    cache: Path,
    undisturbed: Run,
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"
    between_steps(monkeypatch, *(lambda n=n: kill(run_dir, n) for n in NODES))
    options = ["--init", str(folder), *LORA]
    assert main(training(run_dir, cache, *options, of=TWO_REPLICAS)) == 0
    assert losses(run_dir) == pytest.approx(losses(undisturbed.run_dir), rel=1e-5)
    recovered = events(run_dir, "recovered")
    assert len(recovered) == 2
    for event in recovered:
        assert event["lost_steps"] == 0 and event["bytes"].keys() == {"peer"}
    first, *both = (
        load_file(to / "model.safetensors")
        for to in (
            folder,
            *(merged(of, tmp_path) for of in (run_dir, undisturbed.run_dir)),
        )
    )
    for name, value in first.items():
        killed, other = (weights[name] for weights in both)
        if "_proj" in name:
            assert 0 < np.abs(killed - value).max() < 0.05
            np.testing.assert_allclose(killed, other, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(killed, value)


def merged(run_dir: Path, beside: Path) -> Path:
    to = beside / f"merged-{run_dir.parent.name}"
    assert export([str(run_dir), "--to", str(to), "--merged"]) == 0
    return to
