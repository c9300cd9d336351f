# SPDX-License-Identifier: Apache-2.0
"""`profile`: each distinct layer once, a file that can be read again and extended."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import pytest

from hetjax.api.profiling import measure_model
from hetjax.cli.profile import parse
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    parse_profile,
    read_profile,
    write_profile,
)
from hetjax.models.decoders import llama_model
from hetjax.models.model import Model
from hetjax.plans.plan import StageMesh
from hetjax.profile import main
from hetjax.profiling import measuring
from hetjax.profiling.config import ProfileConfig
from hetjax.profiling.layer_bench import Case
from hetjax.report.measured import MeasuredProfile
from hetjax.simulate import main as simulate
from hetjax.training.settings.presets import PRESETS
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    ONE_REPLICA,
    SIX,
    but,
    small_preset,
)

KINDS = ("A100-SXM4-80GB", "V100-SXM2-32GB", "H20")
NODES = ("a100-0", "v100-0", "h20-0")


class FakeBench:
    """Takes a second for everything; records the cases."""

    asked: list[Case] = []
    fails: dict[int, BaseException] = {}  # by number of the case
    is_small = False  # has no memory for two replicas

    def __init__(self, case: Case, *arguments: Any, **options: Any) -> None:
        if options["num_replicas"] > 1:  # the update of what replicas share
            if FakeBench.is_small:
                raise MemoryError
            return
        FakeBench.asked.append(case)
        error = FakeBench.fails.get(len(FakeBench.asked))
        if error is not None:
            raise error
        self.case, self.halves = case, options["halves"]

    def time_once(self) -> dict[str, float]:
        return {}

    def update_s(self, repetitions: Any, program_s: float) -> float:
        return 4.0

    def measurement(self, repetitions: Any, program_s: float) -> Measurement:
        half = 0.5 if self.halves else None
        return Measurement(
            device=self.case.device,
            kind=self.case.kind,
            tensor=self.case.tensor,
            microbatch_size=self.case.microbatch_size,
            remat=self.case.remat,
            forward_s=1.0,
            backward_s=1.0,
            update_s=1.0,
            input_gradient_s=half,
            weight_gradient_s=half,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    def fake_link(source: Any, target: Any, between: tuple[str, str]):
        return LinkMeasurement(
            between=between, bandwidth_gbit_per_s=8.0, latency_ms=0.5
        )

    monkeypatch.setattr(measuring, "LayerBench", FakeBench)
    monkeypatch.setattr(measuring, "measure_link", fake_link)
    FakeBench.asked, FakeBench.fails = [], {}
    return FakeBench


def config(path: Path, **changes: Any) -> ProfileConfig:
    default = ProfileConfig(
        cluster=SIX,
        simulate=True,
        seq_len=16,
        microbatch_sizes=(1,),
        tensor=(1,),
        remat=("none",),
        dtype="float32",
        output=path / "profile.json",
    )
    return replace(default, **changes)


def measured(path: Path, model: Model = MODEL, **changes: Any) -> Profile:
    return measure_model(config(path, **changes), small_preset(path), model)


@pytest.mark.usefixtures("quick_compiling")
def test_every_distinct_layer_is_measured_and_the_file_reads_back(tmp_path: Path):
    profile = measured(tmp_path)
    assert read_profile(tmp_path / "profile.json") == profile
    assert profile.layers == ("embedding", "block", "block", "head")
    found = [(m.device, m.kind) for m in profile.measurements]
    distinct = ("embedding", "block", "head")
    assert found == [(device, kind) for device in KINDS for kind in distinct]
    for m in profile.measurements:
        assert m.forward_s > 0 and m.backward_s > 0 and m.update_s > 0
        assert m.shared_update_s is not None and m.shared_update_s > 0
    assert profile.program_s > 0
    assert [link.between for link in profile.links] == list(permutations(NODES, 2))


def test_twice_the_blocks_need_no_more_measurements(
    tmp_path: Path, fake: type[FakeBench]
):
    measured(tmp_path)
    few = len(fake.asked)
    (tmp_path / "profile.json").unlink()
    measured(tmp_path, llama_model(replace(MODEL_CONFIG, num_blocks=4)))
    assert few == 3 and len(fake.asked) == 2 * few


def test_every_combination_is_measured_once_where_devices_suffice(
    tmp_path: Path, fake: type[FakeBench]
):
    ways: dict[str, Any] = {"microbatch_sizes": (1, 2, 2), "tensor": (1, 2)}
    profile = measured(tmp_path, remat=("none", "full"), **ways)
    # 3 layers x 2 sizes x 2 remats; V100 is one device, too few for tensor 2
    counts = {
        kind: sum(m.device == kind for m in profile.measurements) for kind in KINDS
    }
    assert counts == {"A100-SXM4-80GB": 24, "V100-SXM2-32GB": 12, "H20": 24}
    # all are simulated on the same CPU, which is timed once
    assert len(fake.asked) == 24


def test_what_the_file_has_is_kept_and_only_the_rest_is_measured(
    tmp_path: Path, fake: type[FakeBench], capsys: pytest.CaptureFixture[str]
):
    first = measured(tmp_path)
    assert len(fake.asked) == 3
    second = measured(tmp_path, remat=("none", "full"))
    assert [case.remat for case in fake.asked[3:]] == ["full"] * 3
    assert second.measurements[:9] == first.measurements
    assert (second.links, second.program_s) == (first.links, first.program_s)
    assert "9 measurements are kept, 9 are missing" in capsys.readouterr().out


def test_a_device_under_another_name_is_the_same_device(
    tmp_path: Path, fake: type[FakeBench]
):
    text = SIX.read_text()
    assert KINDS[0] in text
    (tmp_path / "alias.toml").write_text(text.replace(KINDS[0], "A100-80-SXM"))
    measured(tmp_path)
    again = measured(tmp_path, cluster=tmp_path / "alias.toml")
    assert len(fake.asked) == 3
    assert {m.device for m in again.measurements} == set(KINDS)


def test_with_json_the_profile_is_all_of_standard_output(
    tmp_path: Path, fake: type[FakeBench], capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "profile.json"
    assert main(["tiny", "--output", str(path), "--json"]) == 0
    out, told = capsys.readouterr()
    assert parse_profile(out) == read_profile(path)
    assert "profile written to" in told


def test_without_memory_for_two_replicas_only_their_update_is_missing(
    tmp_path: Path, fake: type[FakeBench], monkeypatch: pytest.MonkeyPatch
):
    first = measured(tmp_path)
    assert all(m.shared_update_s == 4.0 for m in first.measurements)
    (tmp_path / "profile.json").unlink()
    monkeypatch.setattr(fake, "is_small", True)
    second = measured(tmp_path)
    assert [m.update_s for m in second.measurements] == [1.0] * 9
    assert all(m.shared_update_s is None for m in second.measurements)


def test_halves_are_added_to_measurements_without_them(
    tmp_path: Path, fake: type[FakeBench]
):
    measured(tmp_path)
    profile = measured(tmp_path, halves=True)
    assert len(profile.measurements) == 9
    assert all(m.input_gradient_s == 0.5 for m in profile.measurements)
    measured(tmp_path)
    assert len(fake.asked) == 6


def test_an_interrupted_measuring_goes_on_where_it_was(
    tmp_path: Path, fake: type[FakeBench]
):
    fake.fails = {3: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path)
    kept = read_profile(tmp_path / "profile.json").measurements
    assert [m.kind for m in kept] == ["embedding", "block"]
    assert len(measured(tmp_path).measurements) == 9


def test_a_layer_that_does_not_fit_is_left_out_and_told(
    tmp_path: Path, fake: type[FakeBench], capsys: pytest.CaptureFixture[str]
):
    fake.fails = {3: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")}
    profile = measured(tmp_path)
    assert {m.kind for m in profile.measurements} == {"embedding", "block"}
    assert "head on A100-SXM4-80GB" in (out := capsys.readouterr().out)
    assert "left out, the device's memory is too small" in out


def test_the_table_shows_milliseconds_and_links(tmp_path: Path, fake: type[FakeBench]):
    table = MeasuredProfile(profile=measured(tmp_path), path=tmp_path)
    lines = str(table).splitlines()
    assert lines[0].startswith("small: 16 tokens, float32, per program ")
    head = "device layer tensor sequences remat forward ms backward ms update ms"
    assert lines[1].split() == head.split()
    row = "V100-SXM2-32GB head 1 1 none 1000.000 1000.000 1000.000"
    assert lines[7].split() == row.split()
    assert lines[11] == "a100-0 to v100-0: 8 Gbit/s, 0.500 ms"


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "no preset to profile"),
        (["small"], "preset 'small'"),
        (["--seq-len", "8"], "in place of a preset's name, which comes first"),
        (["tiny", "--seqlen", "8"], "did you mean '--seq-len'?"),
        (["tiny", "--tensor", "x"], "--tensor with a whole number from 0, or several"),
        (
            ["tiny", "--remat", "some"],
            "none, selective or full, or several",
        ),
        (["tiny", "--tensor", "3"], "allowed: a tensor degree that divides"),
        (["tiny", "--microbatch-sizes", "1,0"], "microbatch_sizes with 0"),
        (["tiny", "--microbatch-sizes", str(10**12)], "from 1 to 65536"),
        (["tiny", "--microbatch-sizes", "9" * 5000], "a whole number from 0"),
        (["tiny", "--output", "x" * 5000], "give a shorter --output"),
        (["tiny", "--seq-len", "999"], "1 <= seq_len <= 128"),
        (["tiny", "--output", "no/such/folder.json"], "mkdir -p /"),
        (["tiny", "--cluster", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_input_is_refused_in_three_parts(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    for part in ("got: ", "allowed: ", "fix: "):
        assert part in error


def test_a_profile_of_another_model_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "profile.json"
    other = Profile(
        model="other", seq_len=64, dtype="float32", layers=("head",), measurements=()
    )
    write_profile(path, other)
    assert main(["tiny", "--output", str(path)]) == 2
    error = capsys.readouterr().err
    assert "model = 'other', but 'tiny' is to be measured" in error
    assert read_profile(path) == other


def test_a_profile_is_in_one_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "profile.json"
    assert main(["tiny", "--dtype", "best", "--output", str(path)]) == 2
    # A100 and L4, V100
    assert "compute best in bfloat16 and in float16" in capsys.readouterr().err
    assert not path.exists()


def test_the_defaults_are_those_of_the_preset_and_of_its_plan():
    name, found = parse(["tiny", "--remat", "none"])
    assert (found.seq_len, found.dtype, found.simulate) == (64, "float32", True)
    assert found.tensor == (1,) and found.remat == ("none",)
    assert found.microbatch_sizes == (1, 2, 4, 8)  # its plan has microbatches of 8
    assert name == "tiny"


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m"])
def test_a_preset_is_simulated_with_the_profile_that_its_defaults_measure(
    name: str,
    tmp_path: Path,
    fake: type[FakeBench],
    capsys: pytest.CaptureFixture[str],
):
    path, more = str(tmp_path / "p.json"), []
    if name != "tiny":  # which has its own cluster
        node = Node(name="a", device="A100-80-SXM", count=4)
        cluster = cluster_toml(Cluster(name="c", nodes=(node,)))
        (tmp_path / "c.toml").write_text(cluster)
        more = ["--cluster", str(tmp_path / "c.toml")]
        assert main([name, "--output", path, "--simulate", *more]) == 0
    else:
        assert main([name, "--output", path]) == 0
    capsys.readouterr()
    assert simulate([name, "--profile", path, "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["times_from"].startswith(f"measured, {path}")
    assert "estimated" not in told["times_from"]
    assert all(stage["forward_s"] >= 1.0 for stage in told["stages"])


def test_the_defaults_cover_what_the_presets_plan_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = ONE_REPLICA.replicas[0].stages[:2]
    stages = (
        replace(first, remat="selective"),
        replace(second, mesh=StageMesh(data=2)),
        ONE_REPLICA.replicas[0].stages[2],
    )
    replica = replace(ONE_REPLICA.replicas[0], microbatch_size=10, stages=stages)
    own = replace(ONE_REPLICA, global_batch=30, replicas=(replica,))
    chosen = small_preset(tmp_path, own)
    monkeypatch.setitem(PRESETS, "small", but(chosen, microbatch_size=8))
    _, found = parse(["small"])
    assert found.microbatch_sizes == (1, 2, 4, 5, 8, 10)
    assert found.remat == ("none", "full", "selective")
    assert found.tensor == (1,)


def test_help_names_presets_and_options(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "gpt2-124m" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["tiny", "--help"])
    assert ended.value.code == 0
    assert "--microbatch-sizes" in capsys.readouterr().out
