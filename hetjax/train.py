# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.train PRESET [options]`, which is `hetjax train`."""

from hetjax.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
