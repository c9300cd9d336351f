# SPDX-License-Identifier: Apache-2.0
"""The catalogue's figures hold against the chips' clocks, units and links."""

import pytest

from hetjax.cluster.catalogue import (
    canonical_name,
    catalogue,
    device_price_per_hour,
    device_spec,
)
from hetjax.cluster.cluster import DEVICE_FIGURES, Node
from hetjax.cluster.cluster_files import (
    load_cluster,
    parse_cluster,
    preset_names,
    preset_path,
)
from hetjax.cluster.discovery import assign_devices, device_name
from hetjax.errors import BadInput


class Fake:
    """What is read of a `jax.Device`."""

    def __init__(self, device_kind: str, platform: str = "gpu") -> None:
        self.platform, self.device_kind = platform, device_kind


def node(device: str, **more) -> Node:
    return Node(name="n", device=device, count=4, **more)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-HBM3"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200-480GB"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla P100-SXM2-16GB", "P100-SXM2-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "GeForce-RTX-3090"),
        ("NVIDIA GeForce RTX 2080 Ti", "GeForce-RTX-2080-Ti"),
        ("NVIDIA TITAN RTX", "TITAN-RTX"),
        ("TPU v2", "TPU-v2"),
        ("TPU v3", "TPU-v3"),
        ("TPU v4", "TPU-v4"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v5e", "TPU-v5e"),
        ("TPU v5", "TPU-v5p"),
        ("TPU v5p", "TPU-v5p"),
        ("TPU v6 lite", "TPU-v6e"),
        ("TPU v6e", "TPU-v6e"),
        ("TPU7x", "TPU7x"),
    ],
)
def test_a_reported_device_kind_leads_to_its_entry(device_kind, name):
    assert device_name(Fake(device_kind)) == name
    assert device_spec(node(name)).name == name


@pytest.mark.parametrize(
    ("device", "num_multiprocessors", "flop_per_clock", "clock_ghz"),
    [
        ("A100-SXM4-80GB", 108, 2048, 1.41),
        ("A100-SXM4-40GB", 108, 2048, 1.41),
        ("H100-80GB-HBM3", 132, 4096, 1.83),
        ("H200", 132, 4096, 1.83),
        ("H100-PCIe", 114, 4096, 1.62),
        ("V100-SXM2-16GB", 80, 1024, 1.53),
        ("T4", 40, 1024, 1.59),
        ("L4", 60, 1024, 2.04),
        ("L40S", 142, 1024, 2.52),
        ("P100-SXM2-16GB", 56, 256, 1.48),
        # GeForce cards run at half rate where sums are fp32
        ("GeForce-RTX-4090", 128, 512, 2.52),
        ("GeForce-RTX-3090", 82, 512, 1.695),
        ("GeForce-RTX-2080-Ti", 68, 512, 1.545),
        ("TITAN-RTX", 72, 1024, 1.77),
    ],
)
def test_peaks_are_dense_and_follow_from_units_and_clock(
    device, num_multiprocessors, flop_per_clock, clock_ghz
):
    tflops = num_multiprocessors * flop_per_clock * clock_ghz / 1e3
    assert catalogue()[device].peak_tflops == pytest.approx(tflops, rel=0.04)


@pytest.mark.parametrize(
    ("device", "bus_bits", "gbit_per_pin"),
    [
        ("A100-SXM4-80GB", 5120, 3.186),
        ("A100-SXM4-40GB", 5120, 2.43),
        ("H100-80GB-HBM3", 5120, 5.24),
        ("H200", 6144, 6.25),
        ("H20", 6144, 5.2),
        ("V100-SXM2-32GB", 4096, 1.754),
        ("P100-SXM2-16GB", 4096, 1.43),
        ("T4", 256, 10.0),
        ("L4", 192, 12.5),
        ("L40S", 384, 18.0),
        ("GeForce-RTX-4090", 384, 21.0),
        ("GeForce-RTX-3090", 384, 19.5),
        ("GeForce-RTX-2080-Ti", 352, 14.0),
        ("TITAN-RTX", 384, 14.0),
    ],
)
def test_memory_bandwidths_are_gigabytes_and_follow_from_the_bus(
    device, bus_bits, gbit_per_pin
):
    spec = catalogue()[device]
    assert spec.memory_gb_per_s == pytest.approx(bus_bits / 8 * gbit_per_pin, rel=0.02)


@pytest.mark.parametrize(
    ("device", "num_links", "gb_per_s_one_way"),
    [
        ("P100-SXM2-16GB", 4, 20),
        ("V100-SXM2-16GB", 6, 25),
        ("V100-SXM2-32GB", 6, 25),
        ("A100-SXM4-80GB", 12, 25),
        ("H100-80GB-HBM3", 18, 25),
        ("H800", 8, 25),
        ("H20", 18, 25),
        ("B200", 18, 50),
        ("TPU-v2", 4, 496 / 8 / 2),  # half a chip
        ("TPU-v3", 4, 656 / 8 / 2),
        ("TPU-v4", 6, 50),
        ("TPU-v5e", 4, 50),
        ("TPU-v5p", 6, 100),
        ("TPU-v6e", 4, 100),
    ],
)
def test_link_bandwidths_count_one_direction(device, num_links, gb_per_s_one_way):
    one_way = num_links * gb_per_s_one_way
    assert catalogue()[device].intra_node_gb_per_s == pytest.approx(one_way)


@pytest.mark.parametrize("spec", catalogue().values(), ids=lambda spec: spec.name)
def test_every_entry_is_plausible_and_every_figure_has_a_source(spec):
    figures = [*DEVICE_FIGURES]
    figures += ["fp32_tflops"] * (spec.fp32_tflops is not None)
    figures += ["price_per_hour"] * (spec.price_per_hour is not None)
    figures += ["spot_price_per_hour"] * (spec.spot_price_per_hour is not None)
    assert set(spec.sources) == set(figures)
    assert all(spec.sources.values()) and all(getattr(spec, f) > 0 for f in figures)
    assert (spec.fp32_tflops or 0) <= spec.peak_tflops
    assert spec.intra_node_gb_per_s < spec.memory_gb_per_s
    assert spec.network_gbit_per_s / 8 <= 8 * spec.intra_node_gb_per_s
    # reading all memory once takes between 3 ms and half a second
    assert 3e-3 < spec.memory_gib * 1.074 / spec.memory_gb_per_s < 0.5
    if spec.spot_price_per_hour is not None:
        assert spec.spot_price_per_hour < spec.price_per_hour


def test_a_name_belongs_to_one_device():
    words = [word for s in catalogue().values() for word in (s.name, *s.aliases)]
    assert len(words) == len(set(words))
    assert all(canonical_name(s.name) == s.name for s in catalogue().values())
    assert canonical_name("V100-32-SXM2") == "V100-SXM2-32GB"
    assert canonical_name("prototype") == "prototype"


def test_the_catalogue_cannot_be_changed():
    with pytest.raises(TypeError):
        catalogue()["mine"] = catalogue()["H20"]  # pyright: ignore


def test_every_node_of_the_presets_is_described():
    for name in preset_names():
        for each in load_cluster(preset_path(name)).nodes:
            assert device_spec(each).peak_tflops > 0


def test_figures_of_the_node_stand_above_the_catalogue():
    spec = device_spec(node("H100-SXM", peak_tflops=700.0, network_gbit_per_s=100.0))
    assert (spec.peak_tflops, spec.network_gbit_per_s) == (700.0, 100.0)
    assert spec.memory_gb_per_s == catalogue()["H100-80GB-HBM3"].memory_gb_per_s
    assert spec.sources["peak_tflops"] == "the cluster file"
    assert (
        spec.sources["memory_gib"]
        == catalogue()["H100-80GB-HBM3"].sources["memory_gib"]
    )


def test_an_unlisted_device_can_be_described_in_the_cluster_file():
    text = 'name = "x"\n[[node]]\nname = "n"\ndevice = "prototype"\ncount = 2\n'
    text += "".join(f"{key} = {i}\n" for i, key in enumerate(DEVICE_FIGURES, 1))
    spec = device_spec(parse_cluster(text).nodes[0])
    assert [getattr(spec, key) for key in DEVICE_FIGURES] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert spec.name == "prototype"


def test_an_unknown_device_names_close_matches_and_the_keys_to_write():
    with pytest.raises(BadInput) as caught:
        device_spec(node("A100 80GB", peak_tflops=1.0, memory_gib=2.0))
    assert caught.value.got == (
        "node 'n': device 'A100 80GB' is not in the device catalogue and the node "
        "gives no memory_gb_per_s, intra_node_gb_per_s, network_gbit_per_s"
    )
    assert caught.value.allowed == (
        "close matches: A100-SXM4-80GB, A100-80GB-PCIe; or a device with figures of "
        "its own"
    )
    assert caught.value.fix == (
        'write device = "A100-SXM4-80GB", or add to the node: memory_gb_per_s = ..., '
        "intra_node_gb_per_s = ..., network_gbit_per_s = ..."
    )


@pytest.mark.parametrize("device", ["GeForce-RTX-4070", "GeForce-RTX-4080-Laptop"])
def test_a_card_of_another_number_is_no_spelling_of_a_known_one(device: str):
    with pytest.raises(BadInput) as caught:
        device_spec(node(device))
    assert "GeForce-RTX-" in caught.value.allowed
    assert caught.value.fix.startswith("add to the node: peak_tflops = ...")


@pytest.mark.parametrize(
    "device", ["A100-SMX4-40GB", "a100 sxm4 40gb", "H20x", "rtx 3090"]
)
def test_a_spelling_of_a_known_card_is_offered(device: str):
    with pytest.raises(BadInput, match="device = ") as caught:
        device_spec(node(device))
    numbers = [n for n in ("40", "20", "3090") if n in device]
    assert all(n in caught.value.fix.partition(",")[0] for n in numbers)


def test_a_device_like_no_other_lists_all_devices():
    with pytest.raises(BadInput) as caught:
        device_spec(node("zzzz"))
    assert all(name in caught.value.allowed for name in catalogue())
    assert caught.value.fix.startswith("add to the node: peak_tflops = ...")


def test_the_price_is_the_nodes_own_then_spot_then_on_demand():
    listed = catalogue()["A100-SXM4-80GB"]
    assert device_price_per_hour(node("A100-SXM4-80GB")) == listed.price_per_hour
    spot = device_price_per_hour(node("A100-SXM4-80GB", spot=True))
    assert spot == listed.spot_price_per_hour
    own = node("A100-SXM4-80GB", spot=True, price_per_hour=10.0)
    assert device_price_per_hour(own) == 2.5  # a quarter of the node
    no_spot_price = catalogue()["L40S"]
    assert no_spot_price.spot_price_per_hour is None
    bound = device_price_per_hour(node("L40S", spot=True))
    assert bound == no_spot_price.price_per_hour
    assert device_price_per_hour(node("cpu")) is None
    assert device_price_per_hour(node("prototype")) is None


def test_nodes_named_by_an_alias_take_the_devices_of_that_kind():
    toml = 'name = "x"\n[[node]]\nname = "n"\ndevice = "H100-SXM"\ncount = 1\n'
    devices = [Fake("NVIDIA H200"), Fake("NVIDIA H100 80GB HBM3")]
    assigned = assign_devices(parse_cluster(toml), devices, simulate=False)
    assert assigned == {"n": (devices[1],)}
