# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.train PRESET [options]`, which is `hetjax train`."""

import sys

from hetjax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
