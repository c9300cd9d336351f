# SPDX-License-Identifier: Apache-2.0
"""A worker process that first says which variables it was started with."""

import json
import os

print(json.dumps(dict(os.environ)), flush=True)

from hetjax.training.worker import main  # noqa: E402

main()
