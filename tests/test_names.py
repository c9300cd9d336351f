# SPDX-License-Identifier: Apache-2.0
"""Which names are allowed, and that none leads out of its folder."""

import os
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetjax.names import LONGEST_WORKER, UnsafeName, inside, is_node, is_worker

_OUT = ["..", ".", "", "/", "/etc/passwd", "a\0b", "\n", "a" * 300, "out", "loop"]
_PARTS = st.sampled_from([*_OUT, "a", "b.c", "state", "..a", "step_00000001"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a link that leads out of it, one that does not, and a circle."""
    top = tmp_path_factory.mktemp("names")
    (top / "folder" / "a").mkdir(parents=True)
    (top / "elsewhere").mkdir()
    (top / "folder" / "out").symlink_to(top / "elsewhere")
    (top / "folder" / "state").symlink_to("a")
    (top / "folder" / "loop").symlink_to("loop")
    return top / "folder"


@given(parts=st.lists(_PARTS, min_size=1, max_size=4))
def test_a_path_lies_within_its_folder_or_is_refused(folder: Path, parts: list[str]):
    try:
        found = inside(folder, "/".join(parts))
    except UnsafeName:
        assert not set(_OUT).isdisjoint(parts)
        return
    real = os.path.realpath(found)
    assert real.startswith(os.path.realpath(folder) + os.sep), found
    assert set(_OUT[:-2]).isdisjoint(parts), found


@pytest.mark.parametrize("name", [None, 3, b"a", ["a"], "\udc80"])
def test_what_is_no_text_that_a_file_can_be_called_is_refused(folder: Path, name):
    with pytest.raises(UnsafeName):
        inside(folder, name)


@example(name="COMMIT")  # taken: in a store it lies beside a step's workers
@given(
    name=st.text(string.ascii_letters + string.digits + "._-/@ \0\n\u0661", max_size=70)
)
def test_a_name_of_a_node_is_one_that_the_rule_spells(name: str):
    letters = string.ascii_letters + string.digits
    fits = 1 <= len(name) <= 63 and name[0] in letters
    fits = fits and all(letter in letters + "._-" for letter in name)
    assert is_node(name) == (fits and name != "COMMIT")
    assert is_node(name) <= is_worker(name)
    hosts = ("/0", "@0", "/65535", "/01", "/", "/x", "/0/0", "/123456", "/\u0661")
    allowed = {host for host in hosts if is_worker(name + host)}
    assert allowed == ({"/0", "@0", "/65535"} if is_node(name) else set())


def test_the_longest_worker_has_the_longest_name():
    longest = "a" * 63 + "/65535"
    assert is_worker(longest) and len(longest) == LONGEST_WORKER
