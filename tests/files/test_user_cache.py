# SPDX-License-Identifier: Apache-2.0
"""The folder of files that are kept between runs, against the XDG specification."""

from pathlib import Path

import pytest

from hetjax.files.user_cache import expanded, user_cache


@pytest.mark.parametrize(
    ("variable", "folder", "expected"),
    [
        ("/scratch/me", "~/.cache/hetjax", "/scratch/me/hetjax"),
        ("/scratch/me", "~/.cache", "/scratch/me"),
        ("/scratch/me", "~/text", "/own/text"),
        ("/scratch/me", "/data/.cache/hetjax", "/data/.cache/hetjax"),
        ("/scratch/me", "text", "text"),
        ("", "~/.cache/hetjax", "/own/.cache/hetjax"),
        ("relative", "~/.cache/hetjax", "/own/.cache/hetjax"),  # must be ignored
        (None, "~/.cache/hetjax", "/own/.cache/hetjax"),
    ],
)
def test_a_folder_below_the_cache_goes_where_the_user_keeps_caches(
    variable: str | None,
    folder: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HOME", "/own")
    monkeypatch.delenv("XDG_CACHE_HOME")
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert expanded(Path(folder)) == Path(expected)
    assert user_cache("x") == expanded(Path("~/.cache/hetjax")) / "x"
