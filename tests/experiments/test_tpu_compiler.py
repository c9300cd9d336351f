# SPDX-License-Identifier: Apache-2.0
"""Programs of small stages, compiled for TPUs that this machine does not have.

Needs the extra `aot`, whose compiler is 0.7 GB; `.ci/run` installs it for this file.
One process compiles all programs of a target, as starting a compiler takes seconds.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from experiments.compile.__main__ import Compiler
from experiments.compile.cells import Cell, Part, Place, Program

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason="without the TPU's compiler: pip install -e '.[aot]'",
)


@pytest.fixture(scope="module", params=["v5e", "v6e"])
def compiler(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.stop()


@pytest.mark.parametrize(
    ("program", "place", "part", "donated", "hidden"),
    [
        # the sums of 4 parameters; their gradients need not wait for the input's
        ("backward", "inner", "mlp", 4, 1),
        ("fused", "last", "mlp", 7, 1),  # 2 more of the head, and the loss
        ("pack", "inner", "blocks", 0, 0),
        ("update", "inner", "blocks", 29, 0),  # 9 masters, 18 moments, 2 counts
        ("copies", "inner", "blocks", 0, 0),
        ("logits", "last", "mlp", 0, 0),
        ("weight digests", "inner", "blocks", 0, 0),
    ],
)
def test_a_small_stage_compiles_without_fault(
    compiler: Compiler,
    program: Program,
    place: Place,
    part: Part,
    donated: int,
    hidden: int,
):
    cell = Cell(
        target=compiler.target,
        program=program,
        model="tiny",
        mesh=(2, 2),
        remat="selective",
        place=place,
        part=part,
    )
    found = compiler.compile(cell)
    assert found["failures"] == []
    assert found["donated"] == found["aliased"] == donated
    assert found["hidden_collectives"] >= hidden
