# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.export RUN_DIR --to FOLDER`, which is `hetjax export`."""

from hetjax.cli.process import command_main

main = command_main("export")

if __name__ == "__main__":
    raise SystemExit(main())
