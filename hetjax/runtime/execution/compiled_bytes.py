# SPDX-License-Identifier: Apache-2.0
"""What the compiler says of the memory of one program.

Owns how the figures of a backend are read. Does not own what is done with them
(`costs/measured/compiled.py`).
"""

from typing import Any, cast

import jax

from hetjax.runtime.execution.programs import Compiled


def temp_bytes(program: Compiled) -> int | None:
    """Bytes that the program needs while it runs, if the compiler says how many.

    A TPU's compiler tells the heap and once more what of it is lost between buffers,
    which is the heap less what these hold. That is no more than lives at once: so the
    mean of the two is the heap, at most.
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
    """The most bytes that live at once beside what is given and made, in any memory."""
    said = cast(Any, program).memory_analysis()
    made = said.output_size_in_bytes - said.alias_size_in_bytes
    return said.peak_memory_in_bytes - said.argument_size_in_bytes - made


def made_bytes(program: Compiled) -> int | None:
    """What it needs with the bytes of what it gives, on each device."""
    needed, compiled = temp_bytes(program), cast(Any, program)
    if needed is None:
        return None
    return needed + compiled.memory_analysis().output_size_in_bytes


def _is_for_tpu(program: jax.stages.Compiled) -> bool:
    ways = jax.tree.leaves((program.input_shardings, program.output_shardings))
    devices = [device for way in ways[:1] for device in way.device_set]
    return any(device.platform == "tpu" for device in devices)
