# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.sample RUN_OR_FOLDER --prompt TEXT`, which is `hetjax sample`."""

from hetjax.cli.sample import main

if __name__ == "__main__":
    raise SystemExit(main())
