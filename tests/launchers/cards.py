# SPDX-License-Identifier: Apache-2.0
"""A machine with two unlike cards: a fake of the command that reports them."""

from pathlib import Path

import pytest

UUIDS = "GPU-3090aaaa-0000-0000-0000-000000000000", "GPU-4090bbbb-0000-0000-0000-1"
UNLIKE = f"""{UUIDS[0]}, NVIDIA GeForce RTX 3090, 24576, [N/A], 8.6, 550.54.15
{UUIDS[1]}, NVIDIA GeForce RTX 4090, 24564, [N/A], 8.9, 550.54.15
"""


def put_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, told: str = UNLIKE):
    """Let `nvidia-smi` report these cards to all processes until the test ends."""
    folder.mkdir()
    (folder / "told.csv").write_text(told)
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nexec cat {folder}/told.csv\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
