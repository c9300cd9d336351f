# SPDX-License-Identifier: Apache-2.0
"""Readers of the trackers' files, by their published formats."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2
from wandb.proto import wandb_internal_pb2

# whose members pyright cannot see
Event: Any = getattr(event_pb2, "Event")  # noqa: B009
START = getattr(event_pb2, "SessionLog").START  # noqa: B009
Record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009

_BLOCK = 32_768
_WHOLE = 1


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value as TensorBoard shows them, after its purges."""
    found: dict[str, dict[int, float]] = {}
    for event in _events(folder):
        if event.session_log.status == START:
            for steps in found.values():
                for step in [step for step in steps if step >= event.step]:
                    del steps[step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def _events(folder: Path) -> Iterator[Any]:
    """Yield the events of TFRecord files: length, its checksum, event, its checksum."""
    for path in sorted(folder.iterdir()):  # TensorBoard's order
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of the only offline run in a folder.

    The file is a LevelDB log after 7 bytes.
    """
    (path,) = folder.glob("offline-run-*/run-*.wandb")
    data, at, found = path.read_bytes(), 7, list[Any]()
    whole = b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:  # no room for a header: the block's rest is empty
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, 4):  # or the last part
            found.append(Record.FromString(whole))
            whole = b""
    return found
