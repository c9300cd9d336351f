# SPDX-License-Identifier: Apache-2.0
"""A fake probe of a machine: node `old` has another JAX and another disk.

Each has one card, whatever Slurm says.
"""

import json
import os

from hetjax.diagnosis.on_machine import versions_here

if __name__ == "__main__":
    is_old = os.environ.get("SLURMD_NODENAME") == "old"
    told = {
        "findings": [],
        "versions": versions_here() | ({"jax": "0.1"} if is_old else {}),
        "memory_gib": 8.0,
        "cards": 1,
        "sees_run_dir": not is_old,
        "writes_run_dir": True,
    }
    print("libraries print, too")
    print("hetjax machine: " + json.dumps(told))
