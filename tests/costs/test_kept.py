# SPDX-License-Identifier: Apache-2.0
"""Later runs with the same devices find what runs taught; other runs do not.

Oracle: the measured times that the test keeps.
"""

import json
import platform
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.certainty import kept
from hetjax.costs.certainty.beliefs import Observation
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.certainty.chosen import calibration_from
from hetjax.costs.certainty.elasticities import LINK, SOFTWARE
from hetjax.costs.certainty.kept import (
    MOST_ALIKE,
    keep,
    kept_file,
    read_kept,
)

A100, V100 = "A100-SXM4-80GB", "V100-SXM2-16GB"
FAST = Node(name="fast", device=A100, count=2)
SLOW = Node(name="slow", device=V100, count=2)
WAY = Link(between=("fast", "slow"), bandwidth_gbit_per_s=10.0)
PAIR = Cluster(name="pair", nodes=(FAST, SLOW), links=(WAY,))
BOTH = {"fast": "bfloat16", "slow": "float16"}


def step(measured_s: float = 2.0, kind: str = A100, **shares: float) -> Observation:
    given = {(kind, name): share for name, share in shares.items()}
    return Observation(
        measured_s=measured_s,
        predicted_s=1.0,
        noise=0.03,
        elasticities={SOFTWARE: 1.0, **(given or {(kind, "products"): 0.5})},
    )


OF_PAIR = replace(step(), elasticities={**step().elasticities, (V100, "memory"): 0.3})


def alone(node: Node, **changes: object) -> Cluster:
    return Cluster(name="alone", nodes=(replace(node, **changes),))


def on(device: str, **figures: float) -> Cluster:
    return alone(FAST, device=device, **figures)


def found(cluster: Cluster, precision: str = "bfloat16") -> list[float]:
    """Return the measured times that count for all nodes of a cluster."""
    of_node = dict.fromkeys((node.name for node in cluster.nodes), precision)
    return [o.measured_s for o in read_kept(cluster, of_node).observations]


def test_a_step_counts_for_the_kinds_that_it_was_on():
    assert read_kept(PAIR, BOTH) is UNCALIBRATED
    keep([OF_PAIR], PAIR, BOTH)
    again = read_kept(PAIR, BOTH)
    assert again.source == str(kept_file()) and again.kinds() == {A100, V100}
    assert [o.elasticities for o in again.observations] == [OF_PAIR.elasticities]
    assert found(on(A100)) == [2.0]  # a machine with another name
    assert found(on("A100 SXM 80GB")) == [2.0]
    assert found(alone(SLOW), "float16") == [2.0]
    assert found(on("L4")) == []


def test_the_work_in_a_step_is_kept_with_it():
    work = replace(step(1.5), what="work")
    keep([work, OF_PAIR], PAIR, BOTH)
    assert found(PAIR, "bfloat16") == []  # one of them ran in another precision
    again = read_kept(PAIR, BOTH)
    assert [(o.what, o.measured_s) for o in again.observations] == [
        ("work", 1.5),
        ("step", 2.0),
    ]
    assert again.num_steps == 1
    assert found(on(A100)) == [1.5, 2.0]


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [
        (on(A100), "float32"),
        (on(A100, peak_tflops=100.0), "bfloat16"),
        (on(A100, intra_node_gb_per_s=10.0), "bfloat16"),
        # one of two kinds computes in another precision
        (Cluster(name="pair", nodes=(FAST, SLOW)), "bfloat16"),
    ],
)
def test_other_precisions_and_figures_learn_nothing(cluster: Cluster, precision: str):
    keep([OF_PAIR], PAIR, BOTH)
    assert found(cluster, precision) == []
    assert found(on(A100, memory_gib=70.0)) == [2.0]  # memory is no speed


def test_another_release_of_jax_learns_nothing(monkeypatch: pytest.MonkeyPatch):
    keep([step()], on(A100), {"fast": "bfloat16"})
    with monkeypatch.context() as patched:
        patched.setattr(jax, "__version__", "0.99.0")
        assert found(on(A100)) == []
    assert found(on(A100)) == [2.0]


def test_a_cpu_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    keep([step(kind="cpu")], on("cpu"), {"fast": "float32"})
    assert found(on("cpu"), "float32") == [2.0]
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert found(on("cpu"), "float32") == []


def test_a_link_is_known_again_between_the_same_nodes_only():
    way = ("fast-slow", LINK)
    slow_way = replace(OF_PAIR, elasticities={**OF_PAIR.elasticities, way: 0.4})
    keep([slow_way], PAIR, BOTH)
    (again,) = read_kept(PAIR, BOTH).observations
    assert again.elasticities == slow_way.elasticities
    others = (
        replace(PAIR, nodes=(replace(FAST, count=4), SLOW)),
        replace(PAIR, links=(replace(WAY, bandwidth_gbit_per_s=100.0),)),
    )
    for other in others:
        (elsewhere,) = read_kept(other, BOTH).observations
        shares = elsewhere.elasticities
        assert way not in shares and shares[A100, "products"] == 0.5
        assert sorted(shares.values()) == sorted(slow_way.elasticities.values())
    assert "fast" not in kept_file().read_text()  # names of machines stay out of it


def test_steps_of_earlier_runs_are_trusted_less_than_those_of_the_run():
    ran = replace(step(), plan="a")
    keep([ran], on(A100), {"fast": "bfloat16"})
    earlier = read_kept(on(A100), {"fast": "bfloat16"})
    own = StepCalibration((ran,))
    factors = [
        seen.beliefs(on(A100), plan="a").interval(1.0, ran.elasticities).factor
        for seen in (own, earlier, UNCALIBRATED)
    ]
    assert factors == sorted(factors)
    assert max(factors[0] / factors[1], factors[1] / factors[2]) < 0.95


def test_steps_that_a_profile_predicted_are_not_kept():
    keep([step(layers=0.9)], on(A100), {"fast": "bfloat16"})
    assert not kept_file().exists()


def test_who_runs_most_crowds_nobody_out():
    keep([step(7.0, "L4")], on("L4"), {"fast": "bfloat16"})
    for n in range(MOST_ALIKE + 3):
        keep([step(1.0 + n)], on(A100), {"fast": "bfloat16"})
    assert found(on("L4")) == [7.0]
    assert found(on(A100)) == [1.0 + n for n in range(3, MOST_ALIKE + 3)]


def test_runs_that_end_together_all_keep_what_they_learnt():
    times = [1.0 + n for n in range(MOST_ALIKE)]

    def end(measured_s: float) -> None:
        keep([step(measured_s)], on(A100), {"fast": "bfloat16"})

    with ThreadPoolExecutor(8) as runs:
        list(runs.map(end, times))
    assert sorted(found(on(A100))) == times


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no JSON": lambda text: "\x00" * 30,
    "a list": lambda text: "[]",
    "another version": lambda text: text.replace('"version": 1', '"version": 9'),
    "too many": lambda text: json.dumps(
        {"version": 1, "steps": json.loads(text)["steps"] * 600}
    ),
    "not finite": lambda text: text.replace("2.0", "1e999"),
    "a time that is none": lambda text: text.replace("2.0", "-2.0"),
    "an unknown speed": lambda text: text.replace('"products"', '"magic"'),
    "no precision": lambda text: text.replace('"bfloat16 ', '["bfloat16 '),
    "precisions of another kind": lambda text: text.replace(
        '"ran_as": {', '"ran_as": {"x": 3, '
    ),
    "too large": lambda text: text + " " * (8 << 20),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_said_once_and_written_anew(how: str):
    keep([step()], on(A100), {"fast": "bfloat16"})
    whole = kept_file().read_text()
    damaged = DAMAGES[how](whole)
    assert damaged != whole
    kept_file().write_text(damaged)
    kept._say_once.cache_clear()
    with pytest.warns(UserWarning, match="steps of earlier runs") as told:
        assert found(on(A100)) == []
    assert len(told) == 1 and str(kept_file()) in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(on(A100)) == []
        keep([step(3.0)], on(A100), {"fast": "bfloat16"})
        assert found(on(A100)) == [3.0]


def test_a_folder_in_the_place_of_the_file_is_as_none():
    kept_file().mkdir(parents=True)
    kept._say_once.cache_clear()
    with pytest.warns(UserWarning, match="a folder"):
        assert found(on(A100)) == []
    with pytest.raises(OSError):
        keep([step()], on(A100), {"fast": "bfloat16"})


def test_a_file_or_none_can_be_given_in_its_place(tmp_path: Path):
    keep([step()], on(A100), {"fast": "bfloat16"})
    of_node = {"fast": "bfloat16"}
    assert calibration_from("none", on(A100), of_node) is UNCALIBRATED
    assert len(calibration_from(None, on(A100), of_node).observations) == 1
    file = tmp_path / "calibration.json"
    file.write_text('{"version": 1, "steps": []}')
    assert calibration_from(file, on(A100), of_node).source == str(file)


@pytest.mark.parametrize("told", ["", "relative/cache"])
def test_without_a_folder_that_is_told_it_is_in_the_home(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", told)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "hetjax" / "calibration"
    assert kept_file() == folder / f"jax-{jax.__version__}.json"
