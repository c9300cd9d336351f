# SPDX-License-Identifier: Apache-2.0
"""A worker process that first prints the variables with which it was started."""

import json
import os

print(json.dumps(dict(os.environ)), flush=True)

from hetjax.training.worker import main  # noqa: E402

main()
