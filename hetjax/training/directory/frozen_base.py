# SPDX-License-Identifier: Apache-2.0
"""Recognises the weights that a run keeps frozen, by a digest of their files.

A run saves only what it trains. It reads frozen weights again at each start, and so do
`eval`, `sample` and `export`. Other weights in the same folder would change the model
without notice. Owns the digest and the refusal of other weights. Does not own reading
weights (`models/hugging_face/`).
"""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.models.hugging_face.adapter_config import base_folder
from hetjax.models.hugging_face.hub import local_folder
from hetjax.training.directory.identity import BASE
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.run_settings import saves_all_weights

# of a file: a digest of all weights would take as long as reading them
_NUM_SAMPLES, _SAMPLE_BYTES = 1_024, 64 << 10


def base_hashes(config: RunConfig) -> dict[str, str]:
    """Return the digest of the files with the run's frozen weights, by name.

    It covers each file's name and size, and samples of its content: training changes
    weights everywhere. Empty if the run saves all its weights, or draws them from its
    seed. Raises BadInput if the folder is missing.
    """
    if config.init is None or saves_all_weights(config):
        return {}
    digest = sha256()
    folder = local_folder(config.init)
    for each in dict.fromkeys((folder, base_folder(folder))):
        for path in sorted(each.glob("*.safetensors")):
            _add(digest, path)
    return {BASE: digest.hexdigest()}


def _add(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name} {size}\n".encode())
        step = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
        for at in range(0, size, step):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))


def check_base(was: str | None, now: Mapping[str, str], config: RunConfig) -> None:
    """Raise BadInput if the run began with other frozen weights.

    `was` is their digest at its first start, None if that is unknown; `now` is the
    result of `base_hashes`.
    """
    if was is None or now.get(BASE, was) == was:
        return
    raise BadInput(
        got=f"weights in {config.init} that differ from those that the run in "
        f"{str(config.run_dir)!r} keeps frozen",
        allowed="the weights that the run began with",
        fix=f"restore {config.init}, or begin another run: --run-dir",
    )
