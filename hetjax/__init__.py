# SPDX-License-Identifier: Apache-2.0
"""hetjax: train one model on unlike accelerators."""

import os

# Before JAX is imported, which reads it once: its compiler's errors come as exceptions,
# too, and the rest of what it prints ("Very slow compile?", processor features of kept
# programs) is nothing that a user can act on. 0 shows all of it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
