# SPDX-License-Identifier: Apache-2.0
"""A device that the catalogue lacks is measured once, and then is as good as any."""

import json
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.cluster import catalogue
from hetjax.cluster.catalogue import best_precision, device_spec
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.errors import BadInput
from hetjax.plans.precision import node_precision
from hetjax.profiling import probe as probing
from hetjax.profiling.found_here import as_found
from hetjax.profiling.probe import Probe, ProbeSizes, memory_gib_of, probe
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.layout.plan_choice import choose_plan
from tests.training.small import MODEL, small_preset

SMALL = ProbeSizes(product=(32, 64), copy_bytes=1 << 16, message_bytes=1 << 16)
FOUND = Probe(
    tflops={"bfloat16": 12.0, "float16": 80.0, "float32": 16.0},
    memory_gib=1.0,
    memory_gb_per_s=720.0,
    host_gb_per_s=12.0,
    link_gb_per_s=10.0,
    seconds=9.0,
)
quick = partial(probe, sizes=SMALL)


@dataclass
class Fake:
    """What a GPU reports about itself."""

    device_kind: str = "NVIDIA RTX 9999"
    platform: str = "gpu"
    memory_stats: Any = lambda: {"bytes_limit": 18 << 30}


@dataclass
class Measured:
    """Measures CPU devices instead of those of a fake kind, and counts calls."""

    found: Probe | None = None
    asked: list[int] = field(default_factory=list)

    def __call__(self, devices: Sequence[Any], memory_gib: float) -> Probe:
        self.asked.append(len(devices))
        if self.found is not None:
            return replace(self.found, memory_gib=memory_gib)
        return quick(jax.devices()[: len(devices)], memory_gib)


def cluster(device: str = "RTX-9999", count: int = 2, **more: Any) -> Cluster:
    nodes = (Node(name="box", device=device, count=count, **more),)
    return Cluster(name="mine", nodes=nodes)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_SAMPLE_S", 1e-3)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_cpu_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A catalogue that lacks this machine's devices."""
    text = catalogue._FILE.read_text()
    head, _, tail = text.partition("[device.cpu]")
    path = tmp_path / "devices.toml"
    path.write_text(head + tail[tail.index("[sources]") :])
    assert "cpu" not in tomllib.loads(path.read_text())["device"]
    with monkeypatch.context() as patched:
        patched.setattr(catalogue, "_FILE", path)
        catalogue.catalogue.cache_clear()
        catalogue._names.cache_clear()
        catalogue.canonical_name.cache_clear()
        yield
    catalogue.catalogue.cache_clear()
    catalogue._names.cache_clear()
    catalogue.canonical_name.cache_clear()


def test_an_unknown_kind_is_measured_once_and_said_once(tmp_path: Path):
    measure = Measured()
    devices = {"box": [Fake(), Fake()]}
    with pytest.warns(UserWarning, match="RTX-9999: not in the catalogue") as told:
        first = as_found(cluster(), devices, cache_dir=tmp_path, measure=measure)
    (kept,) = (tmp_path / "devices").iterdir()
    assert [str(kept) in str(one.message) for one in told] == [True]
    (node,) = first.nodes
    assert all(getattr(node, key) > 0 for key in DEVICE_FIGURES)
    assert node.memory_gib == pytest.approx(24.0)  # JAX takes three quarters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = as_found(cluster(), devices, cache_dir=tmp_path, measure=measure)
    assert (again, measure.asked) == (first, [2])
    assert parse_cluster(cluster_toml(first)) == first


def test_what_was_measured_counts_as_it_would_from_a_cluster_file(tmp_path: Path):
    with pytest.warns(UserWarning, match="80 float16.* in 9.0 s; kept in"):
        (node,) = as_found(
            cluster(network_gbit_per_s=25.0),
            {"box": [Fake()]},
            cache_dir=tmp_path,
            measure=Measured(FOUND),
        ).nodes
    spec = device_spec(node)
    assert node_precision(node) == best_precision(spec) == "float16"
    # costs assume 0.8 of a peak and of the memory's bandwidth
    assert (spec.peak_tflops, spec.memory_gb_per_s) == (100.0, 900.0)
    assert (spec.intra_node_gb_per_s, spec.network_gbit_per_s) == (10.0, 25.0)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({"bfloat16": 75.0, "float16": 80.0, "float32": 30.0}, "bfloat16"),
        ({"float16": 80.0, "float32": 15.0}, "float16"),
        ({"bfloat16": 0.01, "float16": 0.01, "float32": 0.1}, "float32"),
    ],
)
def test_the_precision_is_the_easiest_of_the_fast_ones(rates, best):
    rest = dict.fromkeys(("memory_gib", "memory_gb_per_s", "host_gb_per_s"), 1.0)
    assert Probe(tflops=rates, seconds=1.0, **rest).precision == best


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"seconds"', '"hours"'),
        lambda text: text.replace('"memory_gib": ', '"memory_gib": -'),
        lambda text: json.dumps(json.loads(text) | {"tflops": {}}),
        lambda text: json.dumps(json.loads(text) | {"tflops": {"float8": 1.0}}),
        lambda text: json.dumps(json.loads(text) | {"memory_gib": "24"}),
    ],
)
def test_a_damaged_file_is_told_of_and_measured_anew(damage, tmp_path: Path):
    measure, devices = Measured(FOUND), {"box": [Fake()]}
    with pytest.warns(UserWarning, match="kept in"):
        as_found(cluster(), devices, cache_dir=tmp_path, measure=measure)
    (kept,) = (tmp_path / "devices").iterdir()
    kept.write_text(damage(kept.read_text()))
    with pytest.warns(UserWarning) as told:
        as_found(cluster(), devices, cache_dir=tmp_path, measure=measure)
    message = str(told[0].message)
    assert "it is measured again" in message and str(kept) in message
    assert len(measure.asked) == 2
    as_found(cluster(), devices, cache_dir=tmp_path, measure=measure)
    assert len(measure.asked) == 2


def test_a_cache_that_cannot_be_written_is_told_of(tmp_path: Path):
    (tmp_path / "devices").write_text("a file")
    with pytest.warns(UserWarning, match="not kept: "):
        found = as_found(
            cluster(), {"box": [Fake()]}, cache_dir=tmp_path, measure=Measured(FOUND)
        )
    assert found.nodes[0].peak_tflops


def test_a_device_that_cannot_be_measured_is_bad_input(tmp_path: Path):
    def late(devices: Sequence[Any], memory_gib: float) -> Probe:
        return probe(jax.devices(), memory_gib, sizes=SMALL, limit_s=0.0)

    with pytest.raises(BadInput, match="within 0 s") as refused:
        as_found(cluster(), {"box": [Fake()]}, cache_dir=tmp_path, measure=late)
    assert refused.value.got.startswith("node 'box': device 'RTX-9999': ")
    assert all(f"{key} = ..." in refused.value.fix for key in DEVICE_FIGURES)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_device_is_told(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("INTERNAL: fell off the bus\nat line 7")

    monkeypatch.setattr(jax, "device_put", fails)
    with pytest.raises(BadInput, match="measured: INTERNAL: fell off the bus\n"):
        quick(jax.devices(), 1.0)


def test_a_precision_that_the_device_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
):
    product_s = probing._product_s

    def some(device: jax.Device, precision: str, size: int) -> float:
        if precision == "bfloat16":
            raise RuntimeError("UNIMPLEMENTED: unsupported algorithm")
        return product_s(device, precision, size)

    monkeypatch.setattr(probing, "_product_s", some)
    assert list(quick(jax.devices(), 1.0).tflops) == ["float16", "float32"]


def test_cards_before_compute_capability_8_are_not_trained_in_bf16():
    class Old(Fake):
        compute_capability = "7.5"

    class New(Fake):
        compute_capability = "10.0"

    assert "bfloat16" not in probing._precisions_of(Old())
    assert probing._precisions_of(New()) == probing.PRECISIONS
    assert probing._precisions_of(Fake()) == probing.PRECISIONS


def test_rates_are_those_of_the_work_that_was_done(monkeypatch: pytest.MonkeyPatch):
    """The clock gives every call a tenth of a second."""
    monkeypatch.setattr(probing, "_seconds", lambda call: (call(), 0.1)[1])
    found = quick(jax.devices(), 1.0)
    flops = 10 * 2 * 64**3
    assert found.tflops == pytest.approx(dict.fromkeys(found.tflops, flops / 1e12))
    assert found.memory_gb_per_s == pytest.approx(10 * 2 * 65536 / 1e9)
    assert found.link_gb_per_s == found.host_gb_per_s == pytest.approx(10 * 65536 / 1e9)
    assert quick(jax.devices()[:1], 1.0).link_gb_per_s is None


def test_a_card_of_the_catalogue_with_another_memory_is_believed(tmp_path: Path):
    def two(gib: float) -> dict[str, Any]:
        kind = "NVIDIA GeForce RTX 4060 Ti"
        limit = int(0.75 * gib * 2**30)
        return {"box": [Fake(kind, memory_stats=lambda: {"bytes_limit": limit})]}

    known = cluster("GeForce-RTX-4060-Ti")
    assert as_found(known, two(7.75), cache_dir=tmp_path) == known
    (larger,) = as_found(known, two(15.6), cache_dir=tmp_path).nodes
    assert larger.memory_gib == 15.6
    said = cluster("GeForce-RTX-4060-Ti", memory_gib=8.0)
    assert as_found(said, two(15.6), cache_dir=tmp_path) == said
    assert as_found(said, two(7.75), cache_dir=tmp_path) == said  # it is rounded
    assert as_found(known, {}, cache_dir=tmp_path) == known  # elsewhere


def cards(kind: str, *sizes_gib: float) -> dict[str, Any]:
    """Return devices of one kind with unlike memory; JAX takes three quarters of it."""

    def card(gib: float) -> Fake:
        return Fake(kind, memory_stats=lambda: {"bytes_limit": int(0.75 * gib * 2**30)})

    return {"box": [*map(card, sizes_gib)]}


@pytest.mark.parametrize("sizes", [(16.0, 8.0), (8.0, 16.0), (16.0, 16.0, 8.0)])
@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 4060 Ti", "NVIDIA RTX 9999"])
@pytest.mark.filterwarnings("ignore:RTX-9999. not in the catalogue")
def test_of_cards_of_one_name_the_least_memory_counts(
    kind: str, sizes: tuple[float, ...], tmp_path: Path
):
    """Even if the other card was measured before."""
    device = kind.removeprefix("NVIDIA ").replace(" ", "-")
    measured: dict[str, Any] = {"cache_dir": tmp_path, "measure": Measured(FOUND)}
    as_found(cluster(device, count=1), cards(kind, 16.0), **measured)
    box = cluster(device, count=len(sizes))
    with pytest.warns(UserWarning, match="have 8 and 16 GiB: 8 is assumed for each"):
        (node,) = as_found(box, cards(kind, *sizes), **measured).nodes
    assert device_spec(node).memory_gib == 8.0


@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 4060 Ti", "NVIDIA RTX 9999"])
def test_a_file_that_says_more_than_a_card_tells_is_warned_of(
    kind: str, tmp_path: Path
):
    device = kind.removeprefix("NVIDIA ").replace(" ", "-")
    figures = dict.fromkeys(DEVICE_FIGURES, 16.0)
    box = cluster(device, count=1, **figures)
    advice = r"memory_gib = 16, but a .* here has 12: .* write memory_gib = 12$"
    with pytest.warns(UserWarning, match=advice):
        assert as_found(box, cards(kind, 12.0), cache_dir=tmp_path) == box
    advised = cluster(device, count=1, **figures | {"memory_gib": 12.0})
    assert as_found(advised, cards(kind, 12.0), cache_dir=tmp_path) == advised


def test_a_memory_that_nobody_tells_is_assumed_and_said(tmp_path: Path):
    silent = Fake(memory_stats=lambda: None)
    with pytest.warns(UserWarning, match="its memory is unknown: 4 GiB are assumed"):
        (node,) = as_found(
            cluster(), {"box": [silent]}, cache_dir=tmp_path, measure=Measured(FOUND)
        ).nodes
    assert node.memory_gib == 4.0


@pytest.mark.parametrize(
    ("fraction", "gib"), [(None, 24.0), ("0.9", 20.0), ("nonsense", 24.0)]
)
def test_what_jax_leaves_to_others_counts_as_the_cards(
    fraction: str | None, gib: float, monkeypatch: pytest.MonkeyPatch
):
    if fraction is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    assert memory_gib_of(Fake()) == pytest.approx(gib)


@pytest.mark.usefixtures("no_cpu_entry")
def test_plan_and_train_go_on_with_devices_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hetjax.profiling.found_here.probe", quick)
    monkeypatch.setattr(
        as_found, "__kwdefaults__", {"cache_dir": tmp_path, "measure": quick}
    )
    chosen = small_preset(tmp_path)
    config = replace(chosen.config, simulate=False, cluster=None)
    config = replace(config, data=replace(config.data, cache_dir=tmp_path))
    bare = replace(chosen, config=config, cluster=None, plan=None)
    with pytest.warns(UserWarning, match="cpu: not in the catalogue"):
        there = choose_hardware(config, bare)
    (node,) = there.cluster.nodes
    assert node.precision and device_spec(node).peak_tflops == node.peak_tflops
    plan = choose_plan(config, MODEL, there.cluster, bare, None).plan
    assert {stage.node for r in plan.replicas for stage in r.stages} == {node.name}


def test_products_are_right(monkeypatch: pytest.MonkeyPatch):
    """What is timed is a real product of matrices."""
    made: list[jax.Array] = []
    monkeypatch.setattr(probing, "_seconds", lambda call: made.append(call()) or 1.0)
    probing._product_s(jax.devices()[0], "float32", 8)
    x = np.random.default_rng(0).standard_normal((8, 8), np.float32)
    np.testing.assert_allclose(made[0], x @ x, atol=1e-5)
