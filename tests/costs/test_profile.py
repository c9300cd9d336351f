# SPDX-License-Identifier: Apache-2.0
"""Profile files, and look-ups in them."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Node
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    check_profile,
    measured,
    parse_profile,
    profile_json,
    read_profile,
    write_profile,
)
from hetjax.costs.stage_times import profiled_times
from hetjax.errors import BadInput
from hetjax.plans.plan import Remat, Stage, StageMesh

GOLDEN = """\
{
  "version": 1,
  "model": "tiny",
  "seq_len": 128,
  "dtype": "float32",
  "layers": ["embedding", "block", "block", "head"],
  "program_s": 0.001,
  "measurements": [
    {"device": "cpu", "kind": "block", "tensor": 1, "data": 1, "microbatch_size": 2, \
"remat": "none", "forward_s": 0.25, "backward_s": 0.5, "update_s": 0.125},
    {"device": "cpu", "kind": "block", "tensor": 2, "data": 2, "microbatch_size": 2, \
"remat": "full", "forward_s": 0.25, "backward_s": 0.75, "update_s": 0.0625, \
"input_gradient_s": 0.5, "weight_gradient_s": 0.25, "workspace_bytes": 4096, \
"shared_update_s": 0.375}
  ],
  "links": [
    {"between": ["a", "b"], "bandwidth_gbit_per_s": 8.0, "latency_ms": 0.5}
  ]
}
"""


def block(size: int = 2, **values: Any) -> Measurement:
    given: dict[str, Any] = {
        "device": "cpu",
        "kind": "block",
        "tensor": 1,
        "microbatch_size": size,
        "forward_s": 0.25,
        "backward_s": 0.5,
        "update_s": 0.125,
    }
    return Measurement(**(given | values))


def profile_of(*measurements: Measurement, **values: Any) -> Profile:
    given: dict[str, Any] = {
        "model": "tiny",
        "seq_len": 128,
        "dtype": "float32",
        "layers": ("embedding", "block", "block", "head"),
    }
    return Profile(measurements=measurements, **(given | values))


def golden_profile() -> Profile:
    halves = block(
        tensor=2,
        data=2,
        remat="full",
        backward_s=0.75,
        update_s=0.0625,
        input_gradient_s=0.5,
        weight_gradient_s=0.25,
        workspace_bytes=4096,
        shared_update_s=0.375,
    )
    link = LinkMeasurement(between=("a", "b"), bandwidth_gbit_per_s=8.0, latency_ms=0.5)
    return profile_of(block(), halves, links=(link,), program_s=0.001)


def test_a_profile_reads_from_and_writes_as_the_golden_text() -> None:
    assert parse_profile(GOLDEN) == golden_profile()
    assert profile_json(golden_profile()) == GOLDEN


def test_a_profile_without_links_or_program_time_needs_no_such_keys() -> None:
    raw = json.loads(GOLDEN)
    del raw["links"], raw["program_s"], raw["measurements"][0]["data"]
    del raw["measurements"][0]["remat"]
    expected = replace(golden_profile(), links=(), program_s=0.0)
    assert parse_profile(json.dumps(raw)) == expected


def test_a_written_file_reads_back_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, golden_profile())
    assert read_profile(path) == golden_profile()
    assert list(tmp_path.iterdir()) == [path]


seconds = st.floats(min_value=0.0, max_value=1e6)


@st.composite
def measurements(draw: st.DrawFn) -> tuple[Measurement, ...]:
    keys = st.tuples(
        st.sampled_from(["cpu", "H20"]),
        st.sampled_from(["embedding", "block", "head"]),
        st.integers(1, 8),
        st.integers(1, 4),
        st.integers(1, 64),
        st.sampled_from(["none", "selective", "full"]),
    )
    made = []
    for device, kind, tensor, data, size, remat in draw(st.sets(keys, max_size=5)):
        halves = draw(st.booleans())
        made.append(
            Measurement(
                device=device,
                kind=kind,
                tensor=tensor,
                data=data,
                microbatch_size=size,
                remat=remat,
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                update_s=draw(seconds),
                input_gradient_s=draw(seconds) if halves else None,
                weight_gradient_s=draw(seconds) if halves else None,
                workspace_bytes=draw(st.none() | st.integers(0, 2**40)),
                shared_update_s=draw(st.none() | seconds),
            )
        )
    return tuple(made)


@given(measurements(), seconds)
def test_any_profile_reads_back_as_it_was_written(
    made: tuple[Measurement, ...], program_s: float
) -> None:
    profile = profile_of(*made, program_s=program_s)
    assert parse_profile(profile_json(profile)) == profile


def changed(**values: Any) -> str:
    """Return the golden text with some keys of its first measurement changed."""
    raw = json.loads(GOLDEN)
    raw["measurements"][0] |= values
    return json.dumps(raw)


def at_top(**values: Any) -> str:
    return json.dumps(json.loads(GOLDEN) | values)


@pytest.mark.parametrize(
    ("text", "got", "fix"),
    [
        ("{", "broken JSON", "python -m hetjax.profile"),
        ("[]", "the file = []", "write the file as a table"),
        (at_top(version=2, new=1), "version = 2", "measure again"),
        (at_top(version=True), "version = True", "measure again"),
        (at_top(modle="x"), "unknown key 'modle'", "did you mean 'model'?"),
        (at_top(seq_len=0), "seq_len = 0", "correct seq_len"),
        (at_top(dtype="float61"), "dtype = 'float61'", "did you mean 'float16'?"),
        (at_top(dtype="int8"), "dtype = 'int8'", "use one of float32, bfloat16"),
        (at_top(layers=["block", 3]), "layers[1] = 3", "as a string"),
        (at_top(program_s=-1), "program_s = -1", "correct program_s"),
        (changed(forward_s=-0.5), "measurements[0].forward_s = -0.5", "correct"),
        (changed(forward_s="fast"), "measurements[0].forward_s = 'fast'", "a number"),
        (changed(workspace_bytes=-1), "workspace_bytes = -1", "correct"),
        (changed(microbatch_size=0), "microbatch_size = 0", "correct"),
        (changed(tensor=True), "tensor = True", "as an integer"),
        (changed(remat="sometimes"), "remat = 'sometimes'", "none"),
        (changed(kind="blok"), "kind = 'blok'", "did you mean 'block'?"),
        (
            changed(input_gradient_s=0.1),
            "only one half of the backward pass",
            "other half",
        ),
        (
            changed(tensor=2, data=2, remat="full"),
            "2 measurements of 'cpu' 'block' tensor 2 data 2 size 2 remat 'full'",
            "remove",
        ),
        (
            at_top(links=[asdict(golden_profile().links[0]) | {"between": ["a"]}]),
            "links[0].between with 1 names",
            '"between"',
        ),
        (
            at_top(
                links=[asdict(golden_profile().links[0]) | {"bandwidth_gbit_per_s": 0}]
            ),
            "links[0].bandwidth_gbit_per_s = 0",
            "correct links[0].bandwidth_gbit_per_s",
        ),
    ],
)
def test_a_wrong_profile_is_refused_with_its_place_and_a_fix(
    text: str, got: str, fix: str
) -> None:
    with pytest.raises(BadInput) as caught:
        parse_profile(text)
    assert got in caught.value.got
    assert fix in caught.value.fix


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(BadInput, match="broken.json"):
        read_profile(path)
    with pytest.raises(BadInput, match="missing.json"):
        read_profile(tmp_path / "missing.json")


def test_a_profile_of_another_model_is_refused_with_both_named() -> None:
    profile = golden_profile()
    check_profile(profile, "tiny", 128, 4)
    for model, seq_len, num_layers in (
        ("gpt2", 128, 4),
        ("tiny", 64, 4),
        ("tiny", 128, 5),
    ):
        with pytest.raises(BadInput) as caught:
            check_profile(profile, model, seq_len, num_layers)
        assert "'tiny', sequence length 128, 4 layers" in caught.value.got
        assert f"{model!r}, sequence length {seq_len}" in caught.value.allowed
        assert f"python -m hetjax.profile {model}" in caught.value.fix


@given(
    st.integers(1, 16),
    st.floats(0, 10),
    st.floats(0, 1),
    st.lists(st.integers(1, 32), min_size=1, max_size=4, unique=True),
)
def test_affine_times_are_found_between_measured_sizes(
    size: int, fixed_s: float, sequence_s: float, sizes: list[int]
) -> None:
    rows = [
        block(n, forward_s=fixed_s + n * sequence_s, workspace_bytes=1000 * n)
        for n in sizes
    ]
    profile = profile_of(*rows)
    wanted: dict[str, Any] = {"device": "cpu", "kind": "block", "tensor": 1}
    if not min(sizes) <= size <= max(sizes):
        with pytest.raises(BadInput, match=f"{min(sizes)} to {max(sizes)} sequences"):
            measured(profile, microbatch_size=size, **wanted)
        return
    found = measured(profile, microbatch_size=size, **wanted)
    assert found.forward_s == pytest.approx(fixed_s + size * sequence_s)
    assert found.workspace_bytes == 1000 * size
    assert found.input_gradient_s is None
    assert found.microbatch_size == size


@pytest.mark.parametrize(
    ("device", "kind", "tensor", "remat"),
    [
        ("H20", "block", 1, "none"),
        ("cpu", "head", 1, "none"),
        ("cpu", "block", 4, "none"),
        ("cpu", "block", 1, "full"),
    ],
)
def test_what_was_not_measured_is_refused_with_what_was(
    device: str, kind: str, tensor: int, remat: Remat
) -> None:
    with pytest.raises(BadInput) as caught:
        measured(
            profile_of(block()),
            device=device,
            kind=kind,
            tensor=tensor,
            remat=remat,
            microbatch_size=2,
        )
    assert f"no '{kind}' on '{device}' with tensor {tensor}" in caught.value.got
    assert "cpu" in caught.value.allowed and "block" in caught.value.allowed
    options = f"--microbatch-sizes 2 --tensor {tensor} --remat {remat}"
    assert f"python -m hetjax.profile tiny {options}" in caught.value.fix


def test_two_names_of_one_device_measured_alike_are_a_repeat() -> None:
    names = ("A100-80-SXM", "A100-SXM4-80GB")
    with pytest.raises(BadInput, match="2 measurements of 'A100-SXM4-80GB'"):
        profile_json(profile_of(*(block(device=name) for name in names)))


def test_an_unmeasured_data_degree_takes_the_times_of_one_rank() -> None:
    profile = profile_of(block(), block(data=2, update_s=0.0625))
    found = [
        measured(
            profile, device="cpu", kind="block", tensor=1, microbatch_size=2, data=data
        ).update_s
        for data in (1, 2, 4)
    ]
    assert found == [0.125, 0.0625, 0.125]


def test_a_stage_takes_the_sum_of_its_layers_and_one_program() -> None:
    halves = block(1, input_gradient_s=0.375, weight_gradient_s=0.25)
    head = block(1, kind="head", forward_s=1.0, backward_s=3.0, update_s=2.0)
    stage = Stage(
        node="cpu-0",
        devices=(0, 1),
        mesh=StageMesh(data=2),
        layers=(1, 4),
        launch_ahead=1,
    )
    times = profiled_times(
        profile_of(halves, head, program_s=0.01),
        stage,
        node=Node(name="cpu-0", device="cpu", count=2),
        microbatch_size=2,
    )
    assert times.forward_s == pytest.approx(0.25 + 0.25 + 1.0 + 0.01)
    assert times.backward_s == pytest.approx(0.5 + 0.5 + 3.0 + 0.01)
    assert times.fused_s == pytest.approx(1.5 + 4.0 + 0.01)
    assert times.input_gradient_s == pytest.approx(0.75 + 1.5 + 0.01)
    assert times.weight_gradient_s == pytest.approx(0.5 + 1.5 + 0.01)
    assert times.update_s == pytest.approx(0.25 + 2.0 + 0.01)
