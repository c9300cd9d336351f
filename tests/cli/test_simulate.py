# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.simulate`: numbers against closed forms, files, exit codes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    write_profile,
)
from hetjax.costs.plan_costs import with_measured_links
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.plans.plan import Plan, Replica
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.simulate import main
from hetjax.training.settings.presets import PRESETS
from tests.training.small import MODEL_CONFIG, TWO_REPLICAS, but, small_preset, stage

# links so fast that they do not affect the times below
CLUSTER = Cluster(
    name="c",
    nodes=(
        Node(name="east-0", device="H20", count=2, zone="east"),
        Node(name="west-0", device="V100-SXM2-32GB", count=2, zone="west"),
    ),
    links=(Link(between=("east", "west"), bandwidth_gbit_per_s=1e9),),
)
PLAN = Plan(
    model="small",
    seq_len=16,
    global_batch=8,
    replicas=(
        Replica(
            num_microbatches=8,
            microbatch_size=1,
            stages=(
                stage("east-0", (0,), (0, 2), 2),
                stage("west-0", (0,), (2, 4), 1),
            ),
        ),
    ),
)


def measurements(device: str) -> list[Measurement]:
    """Return a second forward, two backward and half an update in each half."""
    seconds = {"embedding": 0.25, "block": 0.75, "head": 0.25}
    return [
        Measurement(
            device=device,
            kind=kind,
            tensor=1,
            microbatch_size=1,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            update_s=forward_s / 2,
        )
        for kind, forward_s in seconds.items()
    ]


PROFILE = Profile(
    model="small",
    seq_len=16,
    dtype="float32",
    layers=("embedding", "block", "block", "head"),
    measurements=(*measurements("H20"), *measurements("V100-SXM2-32GB")),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a plan, a cluster and a profile of preset `small`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    (tmp_path / "preset").mkdir()
    monkeypatch.setitem(PRESETS, "small", small_preset(tmp_path / "preset"))
    write_plan(tmp_path / "plan.json", PLAN)
    write_profile(tmp_path / "profile.json", PROFILE)
    (tmp_path / "cluster.toml").write_text(cluster_toml(CLUSTER))
    return tmp_path


GIVEN = ("plan.json", "--cluster", "cluster.toml", "--profile", "profile.json")


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(arguments) == code
    out, text = capsys.readouterr()
    parts = [line.partition(":")[0] for line in text.splitlines()]
    assert (parts, out) == (["hetjax", "got", "allowed", "fix"], ""), text
    return text


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return json.loads(out)


def test_equal_stages_take_the_closed_form_of_1f1b(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told = simulated(capsys, *GIVEN)
    # (S - 1 + M)(F + B) + update, bubble (S - 1) / (S - 1 + M) except for the update
    assert told["step_time_s"] == pytest.approx(9 * 3 + 0.5, rel=1e-3)
    assert told["tokens_per_s"] == pytest.approx(8 * 16 / 27.5, rel=1e-3)
    assert told["bubble_share"] == pytest.approx(3 / 27.5, rel=1e-3)
    first, second = told["stages"]
    assert (first["node"], first["layers"], first["launch_ahead"]) == (
        "east-0",
        [0, 2],
        2,
    )
    assert (second["forward_s"], second["backward_s"]) == (1.0, 2.0)
    assert second["update_s"] == 0.5
    assert set(told["devices"]) == {"east-0/0", "west-0/0"}
    for device in told["devices"].values():
        assert device["busy_s"] == pytest.approx(8 * 3 + 0.5)
        total = device["busy_s"] + device["waiting_s"] + device["idle_s"]
        assert total == pytest.approx(told["step_time_s"])
        assert 0 < device["peak_memory_bytes"] < device["memory_bytes"]


def test_the_tables_tell_stages_devices_and_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(GIVEN) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 8 sequences of 16 tokens per step, schedule 1f1b"
    assert lines[1] == "times: measured, profile.json, float32"
    [row] = [line for line in lines if line.startswith("0        0  ")]
    assert row.split()[2:9] == [
        "east-0",
        "0",
        "0..1",
        "none",
        "2",
        "1,000.0",
        "2,000.0",
    ]
    assert "GiB" in row
    [shares] = [line for line in lines if line.startswith("west-0/0")]
    assert shares.split()[1:3] == ["r0.s1", "89.1%"]
    assert lines[-4] == "step time 27,500.2 ms, 5 tokens/s, bubble 10.9%"
    # all but the update; no provider's price of an H20 is known
    assert lines[-3] == "lower bound 27,000.0 ms (gap 1.9%)"
    assert lines[-2].startswith("how sure: 90% of such steps take ")
    assert "a profile" in lines[-2]
    assert lines[-1].startswith("how sure is memory: ")


def test_the_memory_that_is_printed_with_its_interval_is_that_of_the_least_sure_device(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    devices = simulated(capsys, *GIVEN)["devices"]
    for device in devices.values():
        low, high = device["peak_memory_interval_bytes"]
        assert 0 < low < high
        assert low < device["peak_memory_bytes"]
        assert device["fits"] > 0.99  # a 226th: no device is nearly full
    fullest = max(
        devices,
        key=lambda name: (
            devices[name]["peak_memory_bytes"] / devices[name]["memory_bytes"]
        ),
    )
    assert main(GIVEN) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    low, high = devices[fullest]["peak_memory_interval_bytes"]
    assert line == (
        f"how sure is memory: {fullest} uses {low / 2**20:.4g} to {high / 2**20:.4g} "
        "MiB (90%) and fits with a probability of 99%; 226 stages compiled for GPUs"
    )


def test_another_schedule_is_simulated_and_kept_as_a_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told = simulated(capsys, *GIVEN, "--schedule", "gpipe", "--output", "g.json")
    plan = read_plan(folder / "g.json")
    assert told["schedule"] == plan.schedule == "gpipe"
    assert [s.launch_ahead for _, _, s in plan.stages()] == [8, 8]
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == told["step_time_s"]
    assert plan.predicted.lower_bound_s == told["lower_bound_s"]
    assert plan.predicted.gap == told["gap"]
    peaks = {name: d["peak_memory_bytes"] for name, d in told["devices"].items()}
    assert plan.predicted.peak_memory_bytes == peaks
    assert (
        peaks["east-0/0"]
        > simulated(capsys, *GIVEN)["devices"]["east-0/0"]["peak_memory_bytes"]
    )
    again = simulated(capsys, "g.json", *GIVEN[1:])
    assert again["step_time_s"] == told["step_time_s"]


def test_a_searched_order_stays_under_its_own_schedule(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    asked = "--schedule", "searched", "--output", "s.json"
    told = simulated(capsys, *GIVEN, *asked)
    plan = read_plan(folder / "s.json")
    assert plan.programs
    again = simulated(capsys, "s.json", *GIVEN[1:], "--schedule", plan.schedule)
    assert again["step_time_s"] == told["step_time_s"]


def test_a_slow_link_gets_larger_launch_aheads(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    slow = Link(between=("east", "west"), bandwidth_gbit_per_s=1e9, latency_ms=1400)
    (folder / "slow.toml").write_text(cluster_toml(replace(CLUSTER, links=(slow,))))
    given = ("plan.json", "--cluster", "slow.toml", "--profile", "profile.json")
    plain = simulated(capsys, *given)
    fitted = simulated(capsys, *given, "--schedule", "h1f1b")
    assert fitted["schedule"] == "h1f1b"
    assert [s["launch_ahead"] for s in fitted["stages"]] == [3, 1]  # 2 + ceil(2 c / t)
    assert fitted["step_time_s"] < plain["step_time_s"] - 4


def test_a_trace_and_a_picture_are_written_on_demand(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*GIVEN, "--trace", "t.json", "--plot", "p.svg"]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert lanes == [
        "east-0/0",
        "east-0/0 r0.s0 > s1",
        "west-0/0",
        "west-0/0 r0.s1 > s0",
    ]
    fused = [e for e in events if e.get("cat") == "FB"]
    assert [e["dur"] for e in fused] == [pytest.approx(3e6)] * 8
    assert "<svg" in (folder / "p.svg").read_text()


def test_a_preset_is_simulated_with_estimated_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told = simulated(capsys, "small")
    assert told["times_from"] == "estimated from the device catalogue, float32"
    assert len(told["stages"]) == len(TWO_REPLICAS.stages())
    assert all(s["forward_s"] > 0 for s in told["stages"])
    assert set(told["devices"]) == {"h20-0/0", "h20-0/1", "a100-0/0", "a100-0/1"}


def test_devices_that_the_profile_lacks_are_estimated_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    _to("profile.json", "H20", "L4")(folder)
    told = simulated(capsys, *GIVEN)
    times_from = "measured, profile.json, float32; H20 not in it, estimated in float32"
    assert told["times_from"] == times_from
    assert told["stages"][1]["forward_s"] == 1.0
    assert told["stages"][0]["forward_s"] < 0.01


def test_the_dtype_is_the_presets_unless_another_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    own = simulated(capsys, "small")
    half = simulated(capsys, "small", "--dtype", "bfloat16")
    plan = simulated(capsys, *GIVEN[:3])
    assert half["times_from"].endswith("catalogue, bfloat16")
    best = simulated(capsys, *GIVEN[:3], "--dtype", "best")
    assert plan["times_from"].endswith("catalogue, float32")  # as in training
    assert best["times_from"].endswith("catalogue, bfloat16 and float16")  # H20, V100

    def most(told: dict) -> int:
        return max(d["peak_memory_bytes"] for d in told["devices"].values())

    assert most(half) != most(own)


def test_memory_is_that_of_the_presets_optimizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def peak(name: str) -> dict[str, int]:
        chosen = small_preset(folder / "preset")
        rule = replace(chosen.config.optimizer, name=name)
        monkeypatch.setitem(PRESETS, "small", but(chosen, optimizer=rule))
        devices = simulated(capsys, "small")["devices"]
        return {name: d["peak_memory_bytes"] for name, d in devices.items()}

    adam, lion = peak("adamw"), peak("lion")
    # lion has one moment of four bytes, adam has two; all else is equal
    layer_params = 16 * 3 * 32 + 4 * 16 * 16 + 2 * 16
    (held,) = [r.stages[0] for r in TWO_REPLICAS.replicas if len(r.stages) == 1]
    less = adam[f"{held.node}/0"] - lion[f"{held.node}/0"]
    blocks_bytes = 2 * 4 * layer_params / 2  # two blocks on two devices
    assert blocks_bytes < less < blocks_bytes + 2 * 4 * 320 * 16


def test_a_step_costs_what_its_nodes_cost(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    # two nodes of two devices, one of them used on each: nodes are rented whole
    edit = _to("cluster.toml", "count = 2", "count = 2\nprice_per_hour = 4.0")
    edit(folder)
    told = simulated(capsys, *GIVEN, "--output", "p.json")
    tokens_per_hour = 3600 * 8 * 16 / told["step_time_s"]
    usd = 2 * 4.0 / tokens_per_hour * 1e6
    assert told["usd_per_million_tokens"] == pytest.approx(usd)
    predicted = read_plan(folder / "p.json").predicted
    assert predicted is not None
    assert predicted.usd_per_million_tokens == told["usd_per_million_tokens"]
    assert main(GIVEN) == 0
    assert f"{usd:.3g} USD per million tokens" in capsys.readouterr().out


def test_backwards_that_were_not_measured_in_halves_are_told_where_they_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    told = simulated(capsys, *GIVEN, "--schedule", "zero-bubble")
    assert told["times_from"].endswith(
        "; B split into equal halves, profile --halves measures them"
    )
    assert told["lower_bound_s"] is told["gap"] is None
    assert "halves" not in simulated(capsys, *GIVEN)["times_from"]
    halves = [
        replace(m, input_gradient_s=m.forward_s, weight_gradient_s=m.forward_s)
        for m in PROFILE.measurements
    ]
    write_profile(folder / "profile.json", replace(PROFILE, measurements=tuple(halves)))
    told = simulated(capsys, *GIVEN, "--schedule", "zero-bubble")
    assert "halves" not in told["times_from"]


def _scaled(factor: float) -> Profile:
    measured = [
        replace(m, forward_s=factor * m.forward_s, backward_s=factor * m.backward_s)
        for m in PROFILE.measurements
    ]
    return replace(PROFILE, measurements=tuple(measured))


def _to(path: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return edit


def _nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "more", "words"),
    [
        (_to("cluster.toml", "H20", "H2O"), [], ["device 'H2O'", "catalogue"]),
        (
            _to("cluster.toml", "bandwidth_gbit_per_s = 1000000000.0", ""),
            [],
            ["no key 'bandwidth_gbit_per_s'", "cluster.toml"],
        ),
        (
            _to("cluster.toml", "= 1000000000.0", "= -5.0"),
            [],
            ["bandwidth_gbit_per_s = -5.0", "1e-06 <= bandwidth"],
        ),
        (
            lambda folder: (folder / "cluster.toml").write_text(
                cluster_toml(replace(CLUSTER, links=()))
            ),
            [],
            ["no link to any other zone", "east-0", "west-0", "[[link]]"],
        ),
        (
            _to("profile.json", '"model": "small"', '"model": "other"'),
            [],
            ["profile of model 'other'", "hetjax.profile small"],
        ),
        (
            _to("profile.json", '"microbatch_size": 1', '"microbatch_size": 2'),
            [],
            ["'embedding' on 'H20'", "1 sequences", "hetjax.profile"],
        ),
        (
            lambda folder: write_profile(
                folder / "profile.json",
                replace(PROFILE, measurements=tuple(measurements("L4"))),
            ),
            [],
            ["a profile of L4", "H20, V100-SXM2-32GB", "hetjax.profile small"],
        ),
        (_to("plan.json", "east-0", "north-0"), [], ["north-0", "plan.json"]),
        (_nothing, ["--schedule", "1f2b"], ["'1f2b'", "zero-bubble", "'1f1b'?"]),
        (_nothing, ["--model", "smal"], ["'smal'", "did you mean small?"]),
        (_nothing, ["--model", "tiny"], ["leaves out layers 4 to 5"]),
        (_nothing, ["--plot", "p.jpg"], ["'p.jpg'", ".svg"]),
        (_nothing, ["--trace", "no/t.json"], ["--trace no/t.json", "mkdir -p no"]),
        (
            _nothing,
            ["--scedule", "1f1b"],
            ["'--scedule'", "did you mean '--schedule'?"],
        ),
        (_nothing, ["--trace"], ["got: --trace"]),
        (_nothing, ["--dtype", "fp16"], ["--dtype fp16", "float16"]),
        (
            _to("plan.json", '"layers"', '"precision": "float16", "layers"'),
            ["--dtype", "float32"],
            ["--dtype float32 with replicas[0].stages[0].precision", "leave --dtype"],
        ),
        (
            _to("plan.json", '"layers"', '"attention": "xla", "layers"'),
            ["--attention", "chunked"],
            ["--attention chunked with replicas[0].stages[0].attention", "leave --att"],
        ),
        (
            _nothing,
            ["--dtype", "bfloat16"],
            [
                "--dtype bfloat16, but the profile was measured in float32",
                "leave --dtype",
            ],
        ),
        (
            _to("profile.json", '"dtype": "float32"', '"dtype": "int8"'),
            [],
            ["dtype = 'int8'", "float32, bfloat16, float16"],
        ),
        (
            lambda folder: write_profile(folder / "profile.json", _scaled(0.0)),
            [],
            ["0 s for F and B of replicas[0].stages[0]", "1e-12"],
        ),
        (
            _to("profile.json", '"forward_s": 0.25', '"forward_s": 1e308'),
            [],
            ["measurements[0].forward_s = 1e+308", "<= 1e+06"],
        ),
        (
            _to("cluster.toml", "= 1000000000.0", "= 1e-300"),
            [],
            ["bandwidth_gbit_per_s = 1e-300", "1e-06 <= bandwidth_gbit_per_s"],
        ),
        (
            _to("cluster.toml", "count = 2", "count = 2\nprice_per_hour = 1e308"),
            [],
            ["price_per_hour = 1e+308", "<= 1e+06"],
        ),
        (_nothing, ["--trace", "x" * 5000 + "/t.json"], ["an existing folder"]),
    ],
)
def test_bad_input_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    more: list[str],
    words: list[str],
):
    spoil(folder)
    before = sorted(folder.rglob("*"))
    text = refused(capsys, 2, *GIVEN, *more)
    assert all(word in text for word in words), text
    assert sorted(folder.rglob("*")) == before


def test_a_plan_that_is_not_there_and_none_at_all_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = refused(capsys, 2, "smal")
    assert "neither a file nor a preset" in text and "did you mean 'small'?" in text
    assert "hetjax.simulate tiny" in refused(capsys, 2)
    text = refused(capsys, 2, "x" * 5000)
    assert "neither a file nor a preset" in text and len(text) < 500


def test_a_plan_over_memory_is_refused_with_device_and_bytes(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    edit = _to("cluster.toml", 'device = "H20"', 'device = "H20"\nmemory_gib = 0.0001')
    edit(folder)
    text = refused(capsys, 3, *GIVEN, "--output", "never.json")
    assert "device 'east-0/0' needs" in text
    assert f"at most the {round(0.9 * 0.0001 * 2**30)} bytes" in text
    assert not (folder / "never.json").exists()


def test_a_file_that_cannot_be_written_is_told_after_the_tables(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "taken").mkdir()
    assert main([*GIVEN, "--trace", "taken"]) == 2
    out, text = capsys.readouterr()
    assert "step time" in out
    assert "got: taken: Is a directory" in text and "another path" in text


def test_measured_links_take_the_place_of_the_clusters():
    def link(*ends: str, speed: float) -> LinkMeasurement:
        return LinkMeasurement(
            between=(ends[0], ends[1]), bandwidth_gbit_per_s=speed, latency_ms=0.5
        )

    links = (
        link("east-0", "west-0", speed=40.0),
        link("west-0", "east-0", speed=30.0),
        link("east-0", "elsewhere", speed=1.0),
        link("east-0", "east-0", speed=1.0),
    )
    changed = with_measured_links(CLUSTER, replace(PROFILE, links=links))
    slower = Link(
        between=("west-0", "east-0"), bandwidth_gbit_per_s=30.0, latency_ms=0.5
    )
    assert changed.links == (*CLUSTER.links, slower)


def test_the_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m hetjax.simulate tiny" in text
    assert "--schedule" in text and "zero-bubble" in text and "ui.perfetto.dev" in text
    assert "3 the plan needs more memory" in text
