# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.profile PRESET [options]`, which is `hetjax profile`."""

from hetjax.cli.profile import main

if __name__ == "__main__":
    raise SystemExit(main())
