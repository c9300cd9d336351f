# SPDX-License-Identifier: Apache-2.0
"""A fake probe of cards: what each machine of the tests has."""

import os

from hetjax.cluster.local_devices import LocalDevice, devices_json

CARDS = {
    "fast": ["NVIDIA A100-SXM4-80GB"] * 2,
    "old": ["Tesla T4"],
    "127.0.0.2": ["NVIDIA L4", "Tesla T4"],
}


def cards_of(machine: str) -> list[LocalDevice]:
    return [
        LocalDevice(
            platform="cuda",
            device_kind=kind,
            handle=f"GPU-{machine}-{i}",
            memory_bytes=(80 if "A100" in kind else 16) << 30,
        )
        for i, kind in enumerate(CARDS.get(machine, ()))
    ]


if __name__ == "__main__":
    here = os.environ.get("SSH_CONNECTION", "x x ? 22").split()[2]
    print("libraries print, too")
    print(devices_json(cards_of(os.environ.get("SLURMD_NODENAME", here))))
