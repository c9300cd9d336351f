# SPDX-License-Identifier: Apache-2.0
"""A process that says which variables it was started with."""

import json
import os

print(json.dumps(dict(os.environ)), flush=True)
