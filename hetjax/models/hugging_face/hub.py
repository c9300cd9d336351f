# SPDX-License-Identifier: Apache-2.0
"""Finds folders of Hugging Face, and fetches them from its hub where needed.

Owns how a folder is distinguished from a name on the hub, and which files of the latter
are fetched. huggingface_hub caches what it has fetched, and respects HF_HOME, HF_TOKEN
and HF_HUB_OFFLINE.
"""

import re
from pathlib import Path

from hetjax.errors import BadInput
from hetjax.files.mirrors import meant_by

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FETCHED = ("*.json", "*.safetensors", "*.jinja")


def local_folder(name: str) -> Path:
    """Return the folder at that path, or fetch the hub's files of that name.

    In a worker, returns the copy of the controller's folder of that name, if it has
    one. Raises BadInput if there is no such folder or name.
    """
    if (here := meant_by(name)) is not None:
        return here
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _NAME.fullmatch(name):
        raise BadInput(
            got=f"{name!r}, which is not a folder here",
            allowed="a folder of Hugging Face, or a name on its hub: OWNER/MODEL",
            fix="give the folder's path",
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise BadInput(
            got=f"{name!r}, which is not a folder here, without huggingface_hub",
            allowed="a folder, or a name on the hub if huggingface_hub is installed",
            fix="pip install 'hetjax[hub]'",
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
    except (OSError, ValueError) as error:  # what huggingface_hub raises
        why = str(error).strip().splitlines()[0]
        raise BadInput(
            got=f"{name!r}: there is no such folder here, and the hub says: {why}",
            allowed="a local folder, or a name on the hub that can be fetched",
            fix="check the name and the network; set HF_TOKEN for models that require "
            "it",
        ) from error
