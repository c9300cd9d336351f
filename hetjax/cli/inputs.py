# SPDX-License-Identifier: Apache-2.0
"""Files that commands are told to read.

Owns refusing those that cannot be read before anything is imported that takes seconds.
Does not own what is in them, nor what must hold between them.
"""

from pathlib import Path

from hetjax.cluster.files import load_cluster
from hetjax.costs.measured.profile_files import read_profile
from hetjax.data.corpus import text_files
from hetjax.plans.files import read_plan


def check_inputs(
    *,
    cluster: Path | None = None,
    plan: Path | None = None,
    profile: Path | None = None,
    text: Path | None = None,
) -> None:
    """Raise BadInput for the first of these files that cannot be read."""
    if cluster is not None:
        load_cluster(cluster)
    if profile is not None:
        read_profile(profile)
    if plan is not None:
        read_plan(plan)
    if text is not None and not text.is_dir():
        text_files(text)
