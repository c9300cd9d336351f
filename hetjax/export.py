# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.export RUN_DIR --to FOLDER`, which is `hetjax export`."""

from hetjax.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
