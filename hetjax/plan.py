# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.plan [PRESET] [options]`, which is `hetjax plan`."""

import sys

from hetjax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
