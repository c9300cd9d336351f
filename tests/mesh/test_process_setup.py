# SPDX-License-Identifier: Apache-2.0
"""The memory of new processes: the heap keeps freed memory and uses huge pages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetjax.mesh.process_setup import malloc_environment

_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# the kernel's report on the heap, after 64 MiB on it were freed
_HEAP = """
import json, pathlib
bytearray(64 << 20)
maps = pathlib.Path("/proc/self/smaps").read_text()
print(json.dumps(maps.partition("[heap]")[2].partition("VmFlags:")[0:3:2]))
"""


def heap(environment: dict[str, str]) -> tuple[int, set[str]]:
    """Return a new process's heap in KiB after freeing 64 MiB, and kernel flags."""
    told = subprocess.run(
        [sys.executable, "-c", _HEAP],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    account, rest = json.loads(told.stdout)
    size = next(line for line in account.splitlines() if line.startswith("Size:"))
    return int(size.split()[1]), set(rest.splitlines()[0].split())


@pytest.mark.skipif(sys.platform != "linux", reason="these are settings of glibc")
def test_a_new_process_keeps_freed_memory_in_huge_pages():
    size_kib, flags = heap(malloc_environment())
    assert size_kib > 64 * 1024
    asks = _MODES.exists() and "[madvise]" in _MODES.read_text()
    assert ("hg" in flags) == asks


def test_other_settings_of_the_c_library_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=5")
    own = "glibc.malloc.hugetlb=1"
    both = f"glibc.malloc.tcache_count=5:{own}"
    assert malloc_environment()["GLIBC_TUNABLES"] == both
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert "GLIBC_TUNABLES" not in malloc_environment()
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert malloc_environment()["GLIBC_TUNABLES"] == own
