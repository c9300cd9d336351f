# SPDX-License-Identifier: Apache-2.0
"""Plan files: golden text, round trips, optional parts, every error."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Prediction, Replica, Stage, StageMesh
from hetjax.plans.plan_files import parse_plan, plan_json, read_plan, write_plan
from tests.plans.strategies import any_plans

PLAN = Plan(
    model="tiny",
    seq_len=128,
    global_batch=16,
    schedule="1f1b",
    replicas=(
        Replica(
            num_microbatches=4,
            microbatch_size=2,
            stages=(
                Stage(
                    node="a100-0",
                    devices=(0, 1),
                    mesh=StageMesh(data=1, tensor=2),
                    layers=(0, 3),
                    remat="selective",
                    launch_ahead=2,
                ),
                Stage(
                    node="v100-0",
                    devices=(0,),
                    layers=(3, 6),
                    launch_ahead=1,
                    precision="float16",
                    attention="chunked",
                    offload="optimizer",
                ),
            ),
        ),
        Replica(
            num_microbatches=8,
            microbatch_size=1,
            stages=(Stage(node="h20-0", devices=(2,), layers=(0, 6), launch_ahead=1),),
        ),
    ),
    programs={"v100-0": "RECV x\nF 0\n"},
    predicted=Prediction(step_time_s=0.5, peak_memory_bytes={"a100-0/0": 1024}),
)

GOLDEN = """\
{
  "version": 1,
  "model": "tiny",
  "seq_len": 128,
  "global_batch": 16,
  "schedule": "1f1b",
  "replicas": [
    {
      "num_microbatches": 4,
      "microbatch_size": 2,
      "stages": [
        {"node": "a100-0", "devices": [0, 1], "mesh": {"data": 1, "tensor": 2}, \
"layers": [0, 3], "remat": "selective", "launch_ahead": 2},
        {"node": "v100-0", "devices": [0], "mesh": {"data": 1, "tensor": 1}, \
"layers": [3, 6], "remat": "none", "launch_ahead": 1, "precision": "float16", \
"attention": "chunked", "offload": "optimizer"}
      ]
    },
    {
      "num_microbatches": 8,
      "microbatch_size": 1,
      "stages": [
        {"node": "h20-0", "devices": [2], "mesh": {"data": 1, "tensor": 1}, \
"layers": [0, 6], "remat": "none", "launch_ahead": 1}
      ]
    }
  ],
  "programs": {
    "v100-0": "RECV x\\nF 0\\n"
  },
  "predicted": {
    "step_time_s": 0.5,
    "peak_memory_bytes": {
      "a100-0/0": 1024
    }
  }
}
"""

HAND_WRITTEN = """
{"version": 1, "model": "tiny", "seq_len": 8, "global_batch": 2, "schedule": "1f1b",
 "replicas": [{"num_microbatches": 2, "microbatch_size": 1, "stages": [
   {"node": "a", "devices": [0], "layers": [0, 1]},
   {"node": "a", "devices": [1], "layers": [1, 2]},
   {"node": "b", "devices": [0], "layers": [2, 5]}]}]}
"""


def test_the_json_text_is_the_golden_one():
    assert plan_json(PLAN) == GOLDEN
    assert parse_plan(GOLDEN) == PLAN


@given(plan=any_plans)
def test_a_plan_reads_back_as_it_was_written(plan: Plan):
    text = plan_json(plan)
    assert parse_plan(text) == plan
    assert text.isascii()


@given(plan=any_plans)
def test_the_text_is_the_same_json_as_any_other_writing_of_it(plan: Plan):
    raw = json.loads(plan_json(plan))
    assert parse_plan(json.dumps(raw, indent=1)) == plan
    assert list(raw)[:6] == [
        "version",
        "model",
        "seq_len",
        "global_batch",
        "schedule",
        "replicas",
    ]


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", [2, 2, 1]), ("gpipe", [2, 2, 2])]
)
def test_what_a_hand_writer_leaves_out_has_defaults(schedule, expected):
    plan = parse_plan(HAND_WRITTEN.replace("1f1b", schedule))
    stages = plan.replicas[0].stages
    assert [stage.launch_ahead for stage in stages] == expected
    assert {stage.mesh for stage in stages} == {StageMesh(data=1, tensor=1)}
    assert {stage.remat for stage in stages} == {"none"}
    assert (plan.programs, plan.predicted) == ({}, None)


def test_writing_replaces_the_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(path, replace(PLAN, model="older"))
    write_plan(path, PLAN)
    assert read_plan(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_writing_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    broken = replace(PLAN, predicted=Prediction(step_time_s=float("nan")))
    with pytest.raises(ValueError):
        write_plan(path, broken)
    assert read_plan(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


STAGE = "replicas[0].stages[1]"


@pytest.mark.parametrize(
    ("old", "new", "got", "allowed", "fix"),
    [
        (
            '"seq_len": 8,',
            '"seq_len" 8,',
            "broken JSON: Expecting ':' delimiter at line 2 column 43",
            "JSON: one object with version, model, replicas, ...",
            "correct the file there",
        ),
        (
            '"version": 1, ',
            '"version": 2, ',
            "version = 2",
            "version 1",
            'write "version": 1, or use the hetjax version that wrote it',
        ),
        (
            '"version": 1, ',
            "",
            "the file has no key 'version'",
            "'version' is required and is an integer",
            "add 'version' to the file",
        ),
        (
            '"seq_len": 8, ',
            '"seq_len": 8, "sequence": 9, ',
            "unknown key 'sequence'",
            "keys of the file: version, model, seq_len, global_batch, schedule, "
            "replicas, fingerprint, packed, programs, predicted",
            "did you mean 'seq_len'?",
        ),
        (
            '"seq_len": 8, ',
            '"seq_len": 8, "seq_len": 9, ',
            "broken JSON: key 'seq_len' 2 times in one object",
            "JSON: one object with version, model, replicas, ...",
            "correct the file there",
        ),
        (
            '"devices": [1]',
            '"device": [1]',
            f"unknown key '{STAGE}.device'",
            f"keys of {STAGE}: node, devices, layers, mesh, remat, launch_ahead, "
            "precision, attention, offload",
            "did you mean 'devices'?",
        ),
        (
            '"devices": [1], ',
            "",
            f"{STAGE} has no key 'devices'",
            "'devices' is required and is a list",
            f"add 'devices' to {STAGE}",
        ),
        (
            '"devices": [1]',
            '"devices": [1, 1.5]',
            f"{STAGE}.devices[1] = 1.5",
            f"{STAGE}.devices[1] is an integer",
            f"write {STAGE}.devices[1] as an integer",
        ),
        (
            '"layers": [1, 2]',
            '"layers": [1]',
            f"{STAGE}.layers = [1]",
            "two integers: the first layer and the one after the last",
            f"write {STAGE}.layers as [0, 13]",
        ),
        (
            '"layers": [1, 2]',
            '"layers": [1, 2], "mesh": {"tensr": 2}',
            f"unknown key '{STAGE}.mesh.tensr'",
            f"keys of {STAGE}.mesh: data, tensor",
            "did you mean 'tensor'?",
        ),
        (
            '"layers": [1, 2]',
            '"layers": [1, 2], "mesh": [1, 2]',
            f"{STAGE}.mesh = [1, 2]",
            f"{STAGE}.mesh is a table",
            f"write {STAGE}.mesh as a table",
        ),
        (
            '"layers": [1, 2]',
            '"layers": [1, 2], "launch_ahead": "two"',
            f"{STAGE}.launch_ahead = 'two'",
            f"{STAGE}.launch_ahead is an integer",
            f"write {STAGE}.launch_ahead as an integer",
        ),
        (
            '"microbatch_size": 1, ',
            "",
            "replicas[0] has no key 'microbatch_size'",
            "'microbatch_size' is required and is an integer",
            "add 'microbatch_size' to replicas[0]",
        ),
        (
            '"seq_len": 8, ',
            '"seq_len": 8, "programs": {"a": 3}, ',
            "programs.a = 3",
            "programs.a is a string",
            "write programs.a as a string",
        ),
        (
            '"seq_len": 8, ',
            '"seq_len": 8, "predicted": {"gap": NaN}, ',
            "predicted.gap = nan",
            "predicted.gap is a number",
            "write predicted.gap as a number",
        ),
    ],
)
def test_a_bad_plan_text_is_told_in_three_parts(old, new, got, allowed, fix):
    assert HAND_WRITTEN.count(old) == 1
    with pytest.raises(BadInput) as caught:
        parse_plan(HAND_WRITTEN.replace(old, new))
    assert caught.value.got == got
    assert caught.value.allowed == allowed
    assert caught.value.fix == fix


@pytest.mark.parametrize("name", ["..", "a/0", "a\0", "", "a" * 64])
def test_a_plan_names_no_node_that_no_cluster_could_have(name: str):
    shown = json.dumps(name)
    stage = HAND_WRITTEN.replace('"node": "b"', f'"node": {shown}')
    programs = HAND_WRITTEN.replace(
        '"seq_len"', f'"programs": {{{shown}: ""}}, "seq_len"'
    )
    for text in (stage, programs):
        assert text != HAND_WRITTEN
        with pytest.raises(BadInput, match="a letter or digit, then up to 62 more"):
            parse_plan(text)


def test_a_file_that_is_no_object_or_nests_too_deep_is_bad_input():
    with pytest.raises(BadInput, match=r"the file = \[1\]"):
        parse_plan("[1]")
    with pytest.raises(BadInput, match="nested deeper"):
        parse_plan("[" * 100_000)


def test_errors_of_a_file_start_with_its_path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(BadInput, match="mine.json': broken JSON"):
        read_plan(path)
    with pytest.raises(BadInput, match="gone.json': No such file or directory"):
        read_plan(tmp_path / "gone.json")
