# SPDX-License-Identifier: Apache-2.0
"""Sets up a process before JAX starts in it.

Owns simulated devices (several CPU devices in this process), how the C library keeps
memory, and where compiled programs are kept. Does not own which node has which device.
"""

import ctypes
import os
import sys
from pathlib import Path

import jax

# glibc's tunable that requests huge pages, if the kernel leaves that to programs
_HUGE_PAGES = "glibc.malloc.hugetlb"
# glibc's name of a setting -> glibc's number of it, value
_MALLOC = {
    "TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "TOP_PAD_": (-2, 256 << 20),
    "MMAP_MAX_": (-4, 0),
}
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}


def simulate_devices(count: int, *, only_cpu: bool = True) -> None:
    """Make JAX see `count` CPU devices, and accelerators too unless `only_cpu`.

    Has to be the first use of JAX in a process; raises RuntimeError otherwise.
    """
    threads = max(16, 4 * count)  # under 2 per device, transfers can starve and hang
    os.environ.setdefault("PJRT_NPROC", str(threads))
    jax.config.update("jax_num_cpu_devices", count)
    if only_cpu:
        jax.config.update("jax_platforms", "cpu")
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make the C library keep freed memory: no page faults on every fresh buffer.

    By default glibc gives large blocks back at once, and a step that makes many
    buffers pays for mapping them again (a tenth of a small step, measured). Arenas of
    threads give blocks back whatever is set. Still, each thread keeps its arena here:
    with one arena for all, threads of the compiler wait for each other (preset `tiny`
    compiled in 36 instead of 22 s), and steps are no faster.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for number, value in _MALLOC.values():
        mallopt(number, value)


def malloc_environment() -> dict[str, str]:
    """Return variables that make a new process keep freed memory from its start.

    The process also uses huge pages, which only a variable can request: a stage's
    passes take 0.70 instead of 0.72 s, and the first touch of memory costs little. All
    threads share one arena: messages of 64 MiB arrive at 2.5 instead of 1.5 GiB/s, and
    a worker's passes take 0.76 instead of 0.90 s. Only Linux has glibc, so there are no
    variables on other systems.
    """
    if sys.platform != "linux":
        return {}
    found = {f"MALLOC_{name}": str(value) for name, (_, value) in _MALLOC.items()}
    found |= _ONE_ARENA
    others = os.environ.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES in others:
        return found
    tunables = filter(None, [others, f"{_HUGE_PAGES}=1"])
    return found | {"GLIBC_TUNABLES": ":".join(tunables)}


_FOLDER = "compiled"
_MOST_BYTES = 8 << 30  # the least recently used programs go first


def keep_compiled(cache_dir: Path) -> None:
    """Make JAX keep all it compiles in this folder, unless JAX's variable sets another.

    Has to be called before anything is compiled.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / _FOLDER))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
