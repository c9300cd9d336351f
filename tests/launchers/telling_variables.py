# SPDX-License-Identifier: Apache-2.0
"""A process that prints the variables with which it was started."""

import json
import os

print(json.dumps(dict(os.environ)), flush=True)
