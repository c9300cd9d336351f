# SPDX-License-Identifier: Apache-2.0
"""The output of NCCL-tests becomes the rate at which sums are priced.

Oracle: the rate and the latency from which a table was made.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.certainty.calibration import calibration_json, parse_calibration
from hetjax.costs.certainty.chosen import calibration_from
from hetjax.costs.certainty.given import check_calibration
from hetjax.costs.certainty.priors import NOISE
from hetjax.costs.measured.nccl_tests import parse_nccl_tests
from hetjax.costs.roofline import ring_hop
from hetjax.errors import BadInput
from hetjax.report.certainty import calibration_line

A100, H100 = "A100-SXM4-80GB", "H100-80GB-HBM3"
RATE, LATENCY_S = 200e9, 30e-6
SIZES = tuple(2**n for n in range(3, 31))


def output(
    num_devices: int = 8,
    num_hosts: int = 1,
    rate: float = RATE,
    latency_s: float = LATENCY_S,
    share: float | None = None,
    device: str = f"NVIDIA {A100}",
    sizes: Sequence[int] = SIZES,
    wrong: str = "0",
) -> str:
    """Return a test's output for messages that take latency + bytes / rate."""
    share = share or 2 * (num_devices - 1) / num_devices
    per_host = num_devices // num_hosts
    lines = [
        f"# nThread 1 nGpus {per_host} minBytes 8 maxBytes 1073741824 step: 2(factor)",
        "#",
        "# Using devices",
        *(
            f"#  Rank {n:2d} Group  0 Pid {900 + n} on host-{n // per_host} device "
            f"{n % per_host:2d} [0x{n:02x}] {device}"
            for n in range(num_devices)
        ),
        "#",
        "#                                          out-of-place          in-place",
        "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  "
        "busbw #wrong",
        "#  (B)  (elements)    (us)  (GB/s)  (GB/s)   (us)  (GB/s)  (GB/s)",
    ]
    for size in sizes:
        seconds = latency_s + share * size / rate
        algorithm = size / seconds / 1e9
        times = f"{seconds * 1e6:.5g} {algorithm:.2f} {share * algorithm:.2f} {wrong}"
        in_place = f"{seconds * 1.2e6:.5g} {algorithm / 1.2:.2f} 0.00 {wrong}"
        lines.append(f"  {size} {size // 4} float sum -1 {times} {in_place}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 66.4834 "]
    return "\n".join(lines) + "\n"


def one(device: str, **figures: Any) -> Cluster:
    return Cluster(
        name="one", nodes=(Node(name="a", device=device, count=8, **figures),)
    )


def tagged(text: str) -> str:
    """Return it as mpirun --tag-output prints it, between NCCL_DEBUG=INFO lines."""
    noise = "host-0:855:866 [2] NCCL INFO Channel 00/24 :    0   1   2   3"
    rest = [f"[1,0]<stdout>:{line}" for line in text.splitlines()]
    return "\n".join(
        x for line in rest for x in (line, noise, f"[1,3]<stdout>:{noise}")
    )


def in_one_block(text: str) -> str:
    """Return the table of a test without in-place times."""
    lines = []
    for line in text.splitlines():
        words = line.split()
        is_row = line.startswith("  ")
        lines.append("  " + " ".join(words[:9]) if is_row else line)
        if "busbw" in line:
            lines[-1] = "# size count type redop root time algbw busbw #wrong"
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        output(),
        output(num_devices=2),
        output(share=7 / 8),  # all_gather, reduce_scatter
        output(wrong="N/A"),
        tagged(output()),
        in_one_block(output()),
        output(sizes=[2**30, 2**20, 2**24]),
    ],
    ids=range(7),
)
def test_rate_and_latency_are_those_of_the_machine(text: str):
    found = parse_nccl_tests(text)
    assert found.bytes_per_s == pytest.approx(RATE, rel=0.005)
    assert found.latency_s == pytest.approx(LATENCY_S, rel=0.02)
    assert found.misfit < 0.01
    assert (found.device, found.num_hosts) == (A100, 1)


def test_small_messages_that_are_sent_otherwise_do_not_count():
    small = output(rate=1e9, sizes=[2**n for n in range(3, 20)]).splitlines()
    large = output(sizes=[2**n for n in range(24, 31)]).splitlines()
    rows = [line for line in small if line.startswith("  ")]
    found = parse_nccl_tests("\n".join([*large, *rows]))
    assert found.bytes_per_s == pytest.approx(RATE, rel=0.01)
    assert found.misfit < 0.01


def test_one_size_is_a_rate_and_no_latency():
    found = parse_nccl_tests(output(sizes=[2**30]))
    share = 2 * 7 / 8
    expected = share * 2**30 / (LATENCY_S + share * 2**30 / RATE)
    assert found.bytes_per_s == pytest.approx(expected, rel=0.005)
    assert found.latency_s == 0.0


@pytest.mark.parametrize(
    ("text", "cluster", "speed"),
    [
        (output(), one(A100), "links"),
        (output(rate=60e9), one(A100, intra_node_gb_per_s=90.0), "links"),
        (output(16, 2, rate=10e9), one(A100, network_gbit_per_s=100.0), "network"),
        # these hosts' cards are faster than the links inside
        (output(16, 2), one(A100, network_gbit_per_s=9_000.0), "links"),
    ],
    ids=["inside", "inside, own figures", "over cards", "over fast cards"],
)
def test_sums_are_priced_at_the_rate_that_was_measured(
    text: str, cluster: Cluster, speed: str, tmp_path: Path
):
    file = tmp_path / "nccl.txt"
    file.write_text(text)
    check_calibration(file)
    seen = calibration_from(file, cluster, {})
    (slope,) = seen.observations[0].elasticities
    assert slope == (A100, speed)
    spec = device_spec(seen.applied(cluster).nodes[0])
    priced = ring_hop(spec).bytes_per_s
    if speed == "network":
        priced = spec.network_gbit_per_s * 1e9 / 8
    assert priced == pytest.approx(parse_nccl_tests(text).bytes_per_s, rel=0.02)
    line = f"calibration: sums between {A100}, {file}"
    assert calibration_line(seen) == line
    # no step was measured: all else is known as before
    assert seen.kinds() == frozenset() and seen.num_steps == 0
    assert seen.beliefs(cluster).noise == seen.beliefs(one("L4")).noise == NOISE
    assert parse_calibration(calibration_json(seen)).observations == seen.observations


def test_devices_that_neither_cluster_nor_catalogue_know_are_refused(tmp_path: Path):
    file = tmp_path / "nccl.txt"
    file.write_text(output(device="NVIDIA X9000"))
    with pytest.raises(BadInput, match="X9000"):
        calibration_from(file, one(A100), {})
    file.write_text(output(device="NVIDIA H100 80GB HBM3"))
    (seen,) = calibration_from(file, one(A100), {}).observations
    assert [*seen.elasticities] == [(H100, "links")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("busbw", "no line '# Rank 0"),
        (output().replace("# Using", "# Rank"), None),
        (output().replace(f"[0x03] NVIDIA {A100}", "[0x03] NVIDIA L4"), "L4"),
        (output() + output(), "ranks 0, 1"),
        (output(num_devices=1, share=1.0), "1 ranks"),
        (output(sizes=[]), "a table without times"),
        (output(wrong="12"), "12 wrong results"),
        (output(share=1.0), "busbw / algbw = 1 with 8 ranks"),
        (output(rate=1.0, latency_s=0.0), "a rate of 0"),
        (output().replace(" 8 2 float", " 8 2 float sum"), None),
        (output().replace("  1073741824 ", "  -1 "), "size = '-1'"),
        (output().replace("  1073741824 ", "  nan "), "size = 'nan'"),
        (output() + "# Collective test starting: alltoall_perf\n", "alltoall_perf"),
        (output() + "\n" * 100_001, "lines"),
        (output().replace("Rank  3", f"Rank {'3' * 5000}"), "ranks 0, 1, 2, 4"),
    ],
    ids=range(15),
)
def test_odd_output_is_refused_in_three_parts(text: str, told: str | None):
    if told is None:  # meaningless lines are skipped
        assert parse_nccl_tests(text).bytes_per_s == pytest.approx(RATE, rel=0.005)
        return
    with pytest.raises(BadInput) as refused:
        parse_nccl_tests(text)
    assert told in refused.value.got
    assert refused.value.allowed and "all_reduce_perf" in refused.value.fix
