# SPDX-License-Identifier: Apache-2.0
"""The table that users read."""

from hetjax.plans.plan_files import parse_plan

PLAN = """
{"version": 1, "model": "tiny", "seq_len": 128, "global_batch": 16, "schedule": "1f1b",
 "replicas": [
  {"num_microbatches": 4, "microbatch_size": 2, "stages": [
   {"node": "a100-0", "devices": [0, 1], "mesh": {"tensor": 2}, "layers": [0, 4],
    "remat": "full"},
   {"node": "v100-0", "devices": [0], "layers": [4, 6]}]},
  {"num_microbatches": 8, "microbatch_size": 1, "stages": [
   {"node": "h20-0", "devices": [2], "layers": [0, 6]}]}]}
"""

TABLE = """\
tiny: 16 sequences of 128 tokens per step, schedule 1f1b
replica  stage  node    devices  data x tensor  layers  remat  launch-ahead  \
microbatches
0        0      a100-0  0,1      1 x 2          0..3    full   2             4 x 2
         1      v100-0  0        1 x 1          4..5    none   1
1        0      h20-0   2        1 x 1          0..5    none   1             8 x 1
"""


SAID = """\
tiny: 16 sequences of 128 tokens per step, schedule 1f1b
replica  stage  node    devices  data x tensor  layers  remat  precision  \
launch-ahead  microbatches
0        0      a100-0  0,1      1 x 2          0..3    full              2           \
  4 x 2
         1      v100-0  0        1 x 1          4..5    none   float16    1
1        0      h20-0   2        1 x 1          0..5    none              1           \
  8 x 1
"""


def test_the_table_is_the_golden_one():
    assert str(parse_plan(PLAN)) == TABLE


def test_precisions_are_shown_where_some_stage_says_its_own():
    said = PLAN.replace('"layers": [4, 6]', '"layers": [4, 6], "precision": "float16"')
    assert str(parse_plan(said)) == SAID
