# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.launch slurm|ssh FILE.toml -- train ...`, or `hetjax launch`."""

from hetjax.cli.process import command_main

main = command_main("launch")

if __name__ == "__main__":
    raise SystemExit(main())
