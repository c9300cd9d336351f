# SPDX-License-Identifier: Apache-2.0
"""What a worker does beside its requests is waited for, and raises there."""

import threading

import pytest

from hetjax.runtime.worker.background import Background


def test_it_goes_on_beside_until_it_is_waited_for():
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.append(1)

    beside = Background(work, "beside")
    begun.wait()
    assert not done
    go_on.set()
    beside.wait()
    assert done == [1]


def test_what_goes_wrong_is_raised_where_it_is_waited_for():
    def work() -> None:
        raise ValueError("no such program")

    beside = Background(work, "beside")
    with pytest.raises(ValueError, match="no such program"):
        beside.wait()
