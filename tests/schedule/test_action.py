# SPDX-License-Identifier: Apache-2.0
"""The text form of actions, against hand-written lines and random actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import BadInput
from hetjax.schedule.programs.action import (
    BUFFERS,
    Action,
    Op,
    format_program,
    parse_program,
)

WRITTEN = {
    "r0.s2.F3": Action(Op.F, 0, 2, 3),
    "r0.s2.FB3": Action(Op.FB, 0, 2, 3),
    "r1.s0.E0": Action(Op.E, 1, 0, 0),
    "r0.s2.I12": Action(Op.I, 0, 2, 12),
    "r0.s2.W12": Action(Op.W, 0, 2, 12),
    "r0.s2.SEND_F3>s3": Action(Op.SEND, 0, 2, 3, "y", 3),
    "r0.s3.RECV_F3<s2": Action(Op.RECV, 0, 3, 3, "x", 2),
    "r0.s3.SEND_B3>s2": Action(Op.SEND, 0, 3, 3, "dx", 2),
    "r0.s2.RECV_B3<s3": Action(Op.RECV, 0, 2, 3, "dy", 3),
    "r0.s2.REDUCE[4:9]": Action(Op.REDUCE, 0, 2, group=(4, 9)),
    "r0.s2.REDUCE[embedding.table]": Action(Op.REDUCE, 0, 2, group="embedding.table"),
    "r0.s2.NORM": Action(Op.NORM, 0, 2),
    "r0.s2.UPDATE": Action(Op.UPDATE, 0, 2),
    "r0.s2.FREE_x3": Action(Op.FREE, 0, 2, 3, "x"),
    "r10.s2.FREE_saved0": Action(Op.FREE, 10, 2, 0, "saved"),
}

counts = st.integers(0, 1000)
stages = st.tuples(counts, counts)
paths = st.from_regex(r"\A[a-z_]{1,5}(\.[a-z0-9_]{1,5}){0,3}\Z")
groups = stages | paths
transfers = st.sampled_from(
    [(Op.SEND, "y"), (Op.SEND, "dx"), (Op.RECV, "x"), (Op.RECV, "dy")]
)
actions = st.one_of(
    st.builds(
        Action,
        st.sampled_from([Op.F, Op.B, Op.FB, Op.I, Op.W, Op.E]),
        counts,
        counts,
        counts,
    ),
    st.builds(
        lambda kind, key, m, peer: Action(
            kind[0], key[0], key[1], m, buffer=kind[1], peer=peer
        ),
        transfers,
        stages,
        counts,
        counts,
    ),
    st.builds(lambda key, group: Action(Op.REDUCE, *key, group=group), stages, groups),
    st.builds(Action, st.sampled_from([Op.NORM, Op.UPDATE]), counts, counts),
    st.builds(
        Action, st.just(Op.FREE), counts, counts, counts, st.sampled_from(BUFFERS)
    ),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_each_form_of_text_is_the_action_that_it_names(text: str) -> None:
    assert parse_program(text) == (WRITTEN[text],)
    assert str(WRITTEN[text]) == text


@given(st.lists(actions))
def test_parsing_undoes_printing(program: list[Action]) -> None:
    assert parse_program(format_program(tuple(program))) == tuple(program)


def test_comments_and_blank_lines_are_skipped() -> None:
    text = "# warm-up\n\n  r0.s0.F0   # the first\n\t\nr0.s0.B0\n"
    assert [str(action) for action in parse_program(text)] == ["r0.s0.F0", "r0.s0.B0"]


@pytest.mark.parametrize(
    "line",
    [
        "r0.s2.Q3",
        "r0.s2.F",
        "r0.s2.F03",
        "r0.s2.F3 r0.s2.F4",
        "s2.F3",
        "r0.s2.F3>s3",
        "r0.s2.SEND_F3",
        "r0.s2.SEND_F3<s3",
        "r0.s2.SEND_W3>s3",
        "r0.s2.RECV_F3>s1",
        "r0.s2.REDUCE",
        "r0.s2.REDUCE[4]",
        "r0.s2.REDUCE3[4:9]",
        "r0.s2.NORM3",
        "r0.s2.FREE_z3",
        "r0.s2.FREE_x",
        "r-1.s2.F3",
        "r0.s2.f3",
    ],
)
def test_bad_text_is_refused_with_its_line_and_an_example(line: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_program(f"# a comment\nr0.s0.F0\n{line}\n", "program of node 'a'")
    assert error.value.got == f"program of node 'a', line 3: {line!r}"
    assert "SEND_F3>s1" in error.value.allowed
    assert "for example" in error.value.fix
