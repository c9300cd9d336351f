# SPDX-License-Identifier: Apache-2.0
"""Finds S3 credentials and the region through AWS's own chain.

Owns the use of botocore. It searches the environment, profiles (including those that
log in by SSO, roles or a command), containers and instances, and renews credentials
before they expire. Credentials are not taken from arguments, kept in files or shown in
errors. Does not own their use (`s3.py`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError
from botocore.session import Session

from hetjax.errors import BadInput

_ASKED_AGAIN_S = 300.0  # before botocore's credentials expire
_NOWHERE = "us-east-1"  # what servers without regions expect


@dataclass(frozen=True, kw_only=True, slots=True)
class Login:
    """What signs requests; `credentials` returns the ones that are valid now."""

    region: str
    credentials: Callable[[], Any]


def find_login(url: str) -> Login:
    """Query AWS's credential chain; BadInput if it finds none."""
    try:
        session = Session()
        region = session.get_config_variable("region")
        found = session.get_credentials()
    except BotoCoreError as error:  # its text may come from a user's command
        raise _no_credentials(url, f" ({type(error).__name__})") from error
    if found is None:
        raise _no_credentials(url)

    def credentials() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_ASKED_AGAIN_S),
        }

    region = os.environ.get("AWS_REGION") or region or _NOWHERE
    return Login(region=region, credentials=credentials)


def _no_credentials(url: str, why: str = "") -> BadInput:
    return BadInput(
        got=f"checkpoint store {url}, but no AWS credentials{why}",
        allowed="credentials from the environment, a profile or the instance, on "
        "every machine of the run",
        fix="type `aws configure`, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY",
    )
