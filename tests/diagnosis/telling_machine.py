# SPDX-License-Identifier: Apache-2.0
"""A fake probe of a machine: node `old` has another JAX and another disk."""

import json
import os

from hetjax.diagnosis.on_machine import versions_here

if __name__ == "__main__":
    is_old = os.environ.get("SLURMD_NODENAME") == "old"
    told = {
        "findings": [],
        "versions": versions_here() | ({"jax": "0.1"} if is_old else {}),
        "memory_gib": 8.0,
        "sees_run_dir": not is_old,
    }
    print("libraries print, too")
    print("hetjax machine: " + json.dumps(told))
