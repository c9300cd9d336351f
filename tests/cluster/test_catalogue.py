# SPDX-License-Identifier: Apache-2.0
"""The catalogue's figures against the chips' clocks, units and links."""

import re
from dataclasses import replace

import pytest

from hetjax.cluster.catalogue import (
    candidates,
    canonical_name,
    catalogue,
    check_devices,
    device_spec,
)
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import (
    load_cluster,
    parse_cluster,
    preset_names,
    preset_path,
)
from hetjax.cluster.discovery import assign_devices, device_name
from hetjax.cluster.prices import device_price_per_hour
from hetjax.errors import BadInput


class Fake:
    """The attributes of a `jax.Device` that are read."""

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
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 120GB", "GH200-480GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144G-HBM3e"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),  # a driver without the word NVIDIA
        ("NVIDIA A40", "A40"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A16", "A16"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A2", "A2"),
        ("NVIDIA L40", "L40"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIE-32GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("Tesla V100-SXM3-32GB", "V100-SXM2-32GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("Tesla P40", "P40"),
        ("Tesla P4", "P4"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "RTX-PRO-6000-Blackwell-Workstation-Edition",
        ),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada-Generation"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX-5000-Ada-Generation"),
        ("NVIDIA RTX 4500 Ada Generation", "RTX-4500-Ada-Generation"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX A5500", "RTX-A5500"),
        ("NVIDIA RTX A5000", "RTX-A5000"),
        ("NVIDIA RTX A4500", "RTX-A4500"),
        ("NVIDIA RTX A4000", "RTX-A4000"),
        ("Quadro RTX 8000", "Quadro-RTX-8000"),
        ("Quadro RTX 6000", "Quadro-RTX-6000"),
        ("Quadro RTX 5000", "Quadro-RTX-5000"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("NVIDIA TITAN Xp", "TITAN-Xp"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ("NVIDIA GeForce RTX 5080", "GeForce-RTX-5080"),
        ("NVIDIA GeForce RTX 5070 Ti", "GeForce-RTX-5070-Ti"),
        ("NVIDIA GeForce RTX 5070", "GeForce-RTX-5070"),
        ("NVIDIA GeForce RTX 5060 Ti", "GeForce-RTX-5060-Ti"),
        ("NVIDIA GeForce RTX 5060", "GeForce-RTX-5060"),
        ("NVIDIA GeForce RTX 4080 SUPER", "GeForce-RTX-4080-SUPER"),
        ("NVIDIA GeForce RTX 4080", "GeForce-RTX-4080"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "GeForce-RTX-4070-Ti-SUPER"),
        ("NVIDIA GeForce RTX 4070 Ti", "GeForce-RTX-4070-Ti"),
        ("NVIDIA GeForce RTX 4070 SUPER", "GeForce-RTX-4070-SUPER"),
        ("NVIDIA GeForce RTX 4070", "GeForce-RTX-4070"),
        ("NVIDIA GeForce RTX 4060 Ti", "GeForce-RTX-4060-Ti"),
        ("NVIDIA GeForce RTX 4060", "GeForce-RTX-4060"),
        ("NVIDIA GeForce RTX 3090 Ti", "GeForce-RTX-3090-Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", "GeForce-RTX-3080-Ti"),
        ("NVIDIA GeForce RTX 3080", "GeForce-RTX-3080"),
        ("NVIDIA GeForce RTX 3070 Ti", "GeForce-RTX-3070-Ti"),
        ("NVIDIA GeForce RTX 3070", "GeForce-RTX-3070"),
        ("NVIDIA GeForce RTX 3060 Ti", "GeForce-RTX-3060-Ti"),
        ("NVIDIA GeForce RTX 3060", "GeForce-RTX-3060"),
        ("NVIDIA GeForce RTX 2080 SUPER", "GeForce-RTX-2080-SUPER"),
        ("NVIDIA GeForce RTX 2080", "GeForce-RTX-2080"),
        ("NVIDIA GeForce RTX 2070 SUPER", "GeForce-RTX-2070-SUPER"),
        ("NVIDIA GeForce RTX 2070", "GeForce-RTX-2070"),
        ("NVIDIA GeForce RTX 2060 SUPER", "GeForce-RTX-2060-SUPER"),
        ("NVIDIA GeForce RTX 2060", "GeForce-RTX-2060"),
        ("NVIDIA GeForce GTX 1660 Ti", "GeForce-GTX-1660-Ti"),
        ("NVIDIA GeForce GTX 1660 SUPER", "GeForce-GTX-1660-SUPER"),
        ("NVIDIA GeForce GTX 1660", "GeForce-GTX-1660"),
        ("NVIDIA GeForce GTX 1650", "GeForce-GTX-1650"),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce-GTX-1080-Ti"),
        ("NVIDIA GeForce GTX 1080", "GeForce-GTX-1080"),
        ("GeForce GTX 1070", "GeForce-GTX-1070"),
        ("AMD Instinct MI355X", "Instinct-MI355X"),
        ("AMD Instinct MI350X", "Instinct-MI350X"),
        ("AMD Instinct MI325X", "Instinct-MI325X"),
        ("AMD Instinct MI300X", "Instinct-MI300X"),
        ("AMD Instinct MI250X", "Instinct-MI250X"),
        ("AMD Instinct MI250X/MI250", "Instinct-MI250X"),
        ("AMD Instinct MI250X / MI250", "Instinct-MI250X"),
        ("AMD Instinct MI210", "Instinct-MI210"),
        ("AMD Instinct MI100", "Instinct-MI100"),
        ("AMD Radeon RX 7900 XTX", "Radeon-RX-7900-XTX"),
        ("AMD Radeon RX 7900 XT", "Radeon-RX-7900-XT"),
        ("AMD Radeon PRO W7900", "Radeon-PRO-W7900"),
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
        # GeForce cards run at half rate if sums are fp32
        ("GeForce-RTX-4090", 128, 512, 2.52),
        ("GeForce-RTX-3090", 82, 512, 1.695),
        ("GeForce-RTX-2080-Ti", 68, 512, 1.545),
        ("TITAN-RTX", 72, 1024, 1.77),
        ("GeForce-RTX-5090", 170, 512, 2.407),
        ("GeForce-RTX-5080", 84, 512, 2.617),
        ("GeForce-RTX-5070-Ti", 70, 512, 2.452),
        ("GeForce-RTX-5070", 48, 512, 2.512),
        ("GeForce-RTX-5060-Ti", 36, 512, 2.572),
        ("GeForce-RTX-5060", 30, 512, 2.497),
        ("GeForce-RTX-4080-SUPER", 80, 512, 2.55),
        ("GeForce-RTX-4080", 76, 512, 2.505),
        ("GeForce-RTX-4070-Ti-SUPER", 66, 512, 2.61),
        ("GeForce-RTX-4070-Ti", 60, 512, 2.61),
        ("GeForce-RTX-4070-SUPER", 56, 512, 2.475),
        ("GeForce-RTX-4070", 46, 512, 2.475),
        ("GeForce-RTX-4060-Ti", 34, 512, 2.535),
        ("GeForce-RTX-4060", 24, 512, 2.46),
        ("GeForce-RTX-3090-Ti", 84, 512, 1.86),
        ("GeForce-RTX-3080-Ti", 80, 512, 1.665),
        ("GeForce-RTX-3080", 68, 512, 1.71),
        ("GeForce-RTX-3070-Ti", 48, 512, 1.77),
        ("GeForce-RTX-3070", 46, 512, 1.725),
        ("GeForce-RTX-3060-Ti", 38, 512, 1.665),
        ("GeForce-RTX-3060", 28, 512, 1.777),
        ("GeForce-RTX-2080-SUPER", 48, 512, 1.815),
        ("GeForce-RTX-2080", 46, 512, 1.71),
        ("GeForce-RTX-2070-SUPER", 40, 512, 1.77),
        ("GeForce-RTX-2070", 36, 512, 1.62),
        ("GeForce-RTX-2060-SUPER", 34, 512, 1.65),
        ("GeForce-RTX-2060", 30, 512, 1.68),
        ("GeForce-GTX-1660-Ti", 24, 128, 1.77),
        ("GeForce-GTX-1660-SUPER", 22, 128, 1.785),
        ("GeForce-GTX-1650", 14, 128, 1.665),
        ("GeForce-GTX-1080-Ti", 28, 256, 1.582),
        ("GeForce-GTX-1080", 20, 256, 1.733),
        ("GeForce-GTX-1070", 15, 256, 1.683),
        ("TITAN-Xp", 30, 256, 1.582),
        ("TITAN-V", 80, 1024, 1.335),
        ("RTX-6000-Ada-Generation", 142, 1024, 2.505),
        ("RTX-5000-Ada-Generation", 100, 1024, 2.55),
        ("RTX-4500-Ada-Generation", 60, 1024, 2.58),
        ("RTX-A6000", 84, 1024, 1.8),
        ("RTX-A5500", 80, 1024, 1.665),
        ("RTX-A5000", 64, 1024, 1.695),
        ("RTX-A4500", 56, 1024, 1.65),
        ("RTX-A4000", 48, 1024, 1.56),
        ("Quadro-RTX-8000", 72, 1024, 1.77),
        ("Quadro-RTX-5000", 48, 1024, 1.815),
        ("A40", 84, 1024, 1.74),
        ("A30", 56, 2048, 1.44),
        ("A10", 72, 1024, 1.695),
        ("L40", 142, 512, 2.49),
        ("V100-PCIE-16GB", 80, 1024, 1.38),
        ("P100-PCIE-16GB", 56, 256, 1.303),
        ("P40", 30, 256, 1.531),
        # compute units
        ("Instinct-MI355X", 256, 4096, 2.4),
        ("Instinct-MI350X", 256, 4096, 2.2),
        ("Instinct-MI300X", 304, 2048, 2.1),
        ("Instinct-MI250X", 110, 1024, 1.7),
        ("Instinct-MI250", 104, 1024, 1.7),
        ("Instinct-MI210", 104, 1024, 1.7),
        ("Instinct-MI100", 120, 512, 1.502),
        ("Radeon-RX-7900-XTX", 96, 512, 2.5),
        ("Radeon-RX-7900-XT", 84, 512, 2.4),
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
        ("GeForce-RTX-5090", 512, 28.0),
        ("GeForce-RTX-5080", 256, 30.0),
        ("GeForce-RTX-5070-Ti", 256, 28.0),
        ("GeForce-RTX-5070", 192, 28.0),
        ("GeForce-RTX-5060-Ti", 128, 28.0),
        ("GeForce-RTX-4080-SUPER", 256, 23.0),
        ("GeForce-RTX-4080", 256, 22.4),
        ("GeForce-RTX-4070-Ti-SUPER", 256, 21.0),
        ("GeForce-RTX-4070-Ti", 192, 21.0),
        ("GeForce-RTX-4060-Ti", 128, 18.0),
        ("GeForce-RTX-4060", 128, 17.0),
        ("GeForce-RTX-3090-Ti", 384, 21.0),
        ("GeForce-RTX-3080-Ti", 384, 19.0),
        ("GeForce-RTX-3080", 320, 19.0),
        ("GeForce-RTX-3070-Ti", 256, 19.0),
        ("GeForce-RTX-3070", 256, 14.0),
        ("GeForce-RTX-3060", 192, 15.0),
        ("GeForce-RTX-2080-SUPER", 256, 15.5),
        ("GeForce-RTX-2060", 192, 14.0),
        ("GeForce-GTX-1660-Ti", 192, 12.0),
        ("GeForce-GTX-1660-SUPER", 192, 14.0),
        ("GeForce-GTX-1660", 192, 8.0),
        ("GeForce-GTX-1650", 128, 8.0),
        ("GeForce-GTX-1080-Ti", 352, 11.0),
        ("GeForce-GTX-1080", 256, 10.0),
        ("RTX-6000-Ada-Generation", 384, 20.0),
        ("RTX-A6000", 384, 16.0),
        ("RTX-A4000", 256, 14.0),
        ("A40", 384, 14.5),
        ("A10", 384, 12.5),
        ("A30", 3072, 2.43),
        ("Instinct-MI300X", 8192, 5.2),
        ("Instinct-MI250X", 4096, 3.2),
        ("Instinct-MI100", 4096, 2.4),
        ("Radeon-RX-7900-XTX", 384, 20.0),
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
    figures += ["watts"] * (spec.watts is not None)
    assert set(spec.sources) == set(figures)
    assert all(spec.sources.values()) and all(getattr(spec, f) > 0 for f in figures)
    assert (spec.fp32_tflops or 0) <= spec.peak_tflops
    assert spec.intra_node_gb_per_s < spec.memory_gb_per_s
    assert spec.network_gbit_per_s / 8 <= 8 * spec.intra_node_gb_per_s
    # reading all memory once takes between 3 ms and half a second
    assert 3e-3 < spec.memory_gib * 1.074 / spec.memory_gb_per_s < 0.5
    if spec.spot_price_per_hour is not None:
        assert spec.spot_price_per_hour < spec.price_per_hour
    assert spec.watts is None or 40 <= spec.watts <= 1500


def test_sources_of_spot_prices_say_of_when_they_are():
    for spec in catalogue().values():
        if spec.spot_price_per_hour is not None:
            assert re.search(r"\b20\d\d\b", spec.sources["spot_price_per_hour"]), spec


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
        device_spec(node("A100-SMX4-40GB", peak_tflops=1.0, memory_gib=2.0))
    assert caught.value.got == (
        "node 'n': device 'A100-SMX4-40GB' is not in the device catalogue and the node "
        "gives no memory_gb_per_s, intra_node_gb_per_s, network_gbit_per_s"
    )
    assert caught.value.allowed.startswith("close matches: A100-SXM4-40GB")
    assert caught.value.fix == (
        'write device = "A100-SXM4-40GB", or add to the node: memory_gb_per_s = ..., '
        "intra_node_gb_per_s = ..., network_gbit_per_s = ...; on a machine that has "
        "it, hetjax doctor --probe measures and prints them"
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "GeForce-RTX-4090"),
        ("4090", "GeForce-RTX-4090"),
        ("V100-PCIe-32GB", "V100-PCIE-32GB"),
        ("A100 80GB PCIe", "A100-80GB-PCIe"),
        ("a100 pci-e 80 gb", "A100-80GB-PCIe"),
        ("a100-sxm-40g", "A100-SXM4-40GB"),
        ("H100 SXM", "H100-80GB-HBM3"),
        ("rtx4070tisuper", "GeForce-RTX-4070-Ti-SUPER"),
        ("RTX 4070", "GeForce-RTX-4070"),
        ("1080ti", "GeForce-GTX-1080-Ti"),
        ("nvidia l40s", "L40S"),
        ("MI300X", "Instinct-MI300X"),
        ("7900 xtx", "Radeon-RX-7900-XTX"),
        ("tpu v5e", "TPU-v5e"),
    ],
)
def test_names_as_people_write_them_are_found(written: str, name: str):
    assert canonical_name(written) == device_spec(node(written)).name == name


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "cpu"])
def test_no_spelling_of_an_entry_is_taken_for_another(name: str):
    """In any case, with spaces or underscores, a brand before it, a word left out."""
    for spelling in (name, *catalogue()[name].aliases):
        words = re.split("[- ]", spelling)
        shorter = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
        whole = [spelling.lower(), " ".join(words), "_".join(words).upper()]
        for written in (*whole, f"NVIDIA {spelling}", *shorter):
            found = canonical_name(written)
            if found not in (name, written):  # as for V100-SXM3 without its memory
                assert written in shorter and found in _holding(written), written
        assert all(name in {canonical_name(w), *candidates(w)} for w in whole)


def _holding(written: str) -> set[str]:
    """Return the entries with a spelling that has all words of `written`."""
    said = set(written.lower().split())
    spelled = {n: (n, *spec.aliases) for n, spec in catalogue().items()}
    return {
        name
        for name, names in spelled.items()
        if any(said <= set(re.split("[- ]", each.lower())) for each in names)
    }


@pytest.mark.parametrize(
    ("written", "may_be"),
    [
        ("A100 80GB", ["A100-SXM4-80GB", "A100-80GB-PCIe"]),
        ("H100 80GB", ["H100-80GB-HBM3", "H100-PCIe"]),
        ("V100 32GB", ["V100-SXM2-32GB", "V100-PCIE-32GB"]),
        ("P100 16GB", ["P100-SXM2-16GB", "P100-PCIE-16GB"]),
        ("GH200", ["GH200-480GB", "GH200-144G-HBM3e"]),
    ],
)
def test_a_name_that_may_mean_several_lists_them(written: str, may_be: list[str]):
    with pytest.raises(BadInput, match=f"may be any of {len(may_be)} dev") as caught:
        device_spec(node(written))
    assert caught.value.allowed.startswith(", ".join(may_be) + ";")
    advised = caught.value.fix.partition('"')[2].partition('"')[0]
    assert device_spec(node(advised)).name in may_be


def test_all_unknown_names_of_a_cluster_are_told_at_once():
    nodes = [replace(node(d), name=d.lower()) for d in ("RTX-9999", "T4", "A100")]
    with pytest.raises(BadInput) as caught:
        check_devices(Cluster(name="c", nodes=tuple(nodes)))
    assert "'RTX-9999'" in caught.value.got and "'A100'" in caught.value.got
    assert "'T4'" not in caught.value.got


@pytest.mark.parametrize(
    "device",
    [
        "GeForce-RTX-4075",
        "GeForce-RTX-4080-Laptop-GPU",  # fewer units, less memory
        "GeForce-RTX-4090-D",
        "GeForce-RTX-3080-12GB",
        "GeForce-RTX-2060-Ti",
        "A100-SXM4-40GB-MIG-1g.5gb",  # a slice of a card
    ],
)
def test_another_number_or_suffix_is_no_spelling_of_a_known_card(device: str):
    with pytest.raises(BadInput) as caught:
        device_spec(node(device))
    assert caught.value.allowed.startswith("close matches: ")
    assert caught.value.fix.startswith("add to the node: peak_tflops = ...")


@pytest.mark.parametrize("device", ["A100-SMX4-40GB", "H20x"])
def test_a_spelling_of_a_known_card_is_offered(device: str):
    with pytest.raises(BadInput, match="device = ") as caught:
        device_spec(node(device))
    numbers = [n for n in ("40", "20", "3090") if n in device]
    assert all(n in caught.value.fix.partition(",")[0] for n in numbers)


@pytest.mark.parametrize(
    ("device", "named"),
    [
        ("A100", "A100-SXM4-40GB"),
        ("a100 sxm4", "A100-SXM4-40GB"),
        ("V100", "V100-SXM2-16GB"),
        ("rtx 6000", "Quadro-RTX-6000"),
    ],
)
def test_no_advice_names_a_card_with_more_memory_than_the_one_meant(device, named):
    """No entry whose name has these words has less memory than the named one."""
    with pytest.raises(BadInput) as caught:
        device_spec(node(device))
    assert caught.value.fix.startswith(f'write device = "{named}", or ')
    words = device.lower().split()
    meant = [
        spec
        for spec in catalogue().values()
        if all(word in spec.name.lower() for word in words) and "Ada" not in spec.name
    ]
    assert len(meant) > 1
    assert catalogue()[named].memory_gib == min(spec.memory_gib for spec in meant)


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
