# SPDX-License-Identifier: Apache-2.0
"""Reads the compiler's figures for the memory of one program.

Owns the interpretation of each backend's figures. Does not own their use
(`costs/measured/compiled.py`).
"""

from typing import Any, cast

import jax

from hetjax.runtime.execution.programs import Compiled


def temp_bytes(program: Compiled) -> int | None:
    """Return the temporary bytes of a program, or None if the compiler does not say.

    A TPU's compiler reports the heap plus its fragmentation (the heap less the bytes in
    its buffers). Buffers hold at most `live_bytes`. So the mean of the reported figure
    and `live_bytes` is at least the heap.
    """
    compiled: Any = program
    said = compiled.memory_analysis()
    if said is None:
        return None
    size = said.temp_size_in_bytes
    if not _is_for_tpu(compiled):
        return size
    return min(size, (size + live_bytes(program)) // 2)


def live_bytes(program: Compiled) -> int:
    """Return the most bytes that live at once beside inputs and outputs, anywhere."""
    said = cast(Any, program).memory_analysis()
    made = said.output_size_in_bytes - said.alias_size_in_bytes
    return said.peak_memory_in_bytes - said.argument_size_in_bytes - made


def made_bytes(program: Compiled) -> int | None:
    """Return the temporary bytes and the bytes of the outputs, on each device."""
    needed, compiled = temp_bytes(program), cast(Any, program)
    if needed is None:
        return None
    return needed + compiled.memory_analysis().output_size_in_bytes


def _is_for_tpu(program: jax.stages.Compiled) -> bool:
    ways = jax.tree.leaves((program.input_shardings, program.output_shardings))
    devices = [device for way in ways[:1] for device in way.device_set]
    return any(device.platform == "tpu" for device in devices)
