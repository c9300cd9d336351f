# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.eval RUN_OR_FOLDER --data FILE`, which is `hetjax eval`."""

from hetjax.cli.process import command_main

main = command_main("eval")

if __name__ == "__main__":
    raise SystemExit(main())
