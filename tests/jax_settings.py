# SPDX-License-Identifier: Apache-2.0
"""JAX settings of all tests, in pytest and in the processes that tests start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax._src import compilation_cache

from hetjax.mesh.process_setup import simulate_devices

NUM_DEVICES = 16
# one LLVM module per program: the tests' programs are too small to split
FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
# JAX 0.10's plain emitters compile three times as fast; later releases have only these
_EMITTERS = "xla_cpu_use_fusion_emitters" if jax.__version_info__ < (0, 11) else None
QUICK = {_EMITTERS: False} if _EMITTERS else {}
_RELEASED = {_EMITTERS: True} if _EMITTERS else {}


def strict_simulation() -> None:
    """Simulate 16 CPU devices, with the strictest JAX; call this before JAX is used."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    os.environ["JAX_PLATFORMS"] = "cpu"  # even if an accelerator exists
    simulate_devices(NUM_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling dominates


def keep_compiled(folder: Path) -> None:
    """Share a folder of compiled programs with the processes that tests start.

    Its size has no limit: to keep one, JAX reads the folder at each new entry, under a
    lock, which took longer than compiling. A half-written entry fails to decompress,
    and the program is compiled.
    """
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    _add_checksums()


def _add_checksums() -> None:
    """Give entries a checksum of their bytes: zstandard omits it by default, and a
    flipped bit then unpacks to another program."""
    library = compilation_cache.zstandard  # pyright: ignore
    if library is not None:
        compilation_cache.zstandard = SimpleNamespace(  # pyright: ignore
            ZstdCompressor=partial(library.ZstdCompressor, write_checksum=True),
            ZstdDecompressor=library.ZstdDecompressor,
        )


def quick_flags() -> list[str]:
    """Return the flags that make all compiling of a process quick."""
    return [f"--{name}={value}" for name, value in QUICK.items()]


def compile_quickly() -> None:
    """Compile ahead of time in a third of the time; rounding differs."""
    jax.stages.Lowered.compile = _with(QUICK)


@contextmanager
def as_released() -> Iterator[None]:
    """Compile ahead of time as users do, between quick compilations."""
    before = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = _with(_RELEASED)
    try:
        yield
    finally:
        jax.stages.Lowered.compile = before


_compile = jax.stages.Lowered.compile


def _with(options: dict[str, bool]) -> Any:
    def compile_(self: Any, compiler_options: Any = None, **others: Any) -> Any:
        return _compile(self, options | (compiler_options or {}), **others)

    return compile_
