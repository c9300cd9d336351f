# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.eval RUN_OR_FOLDER --data FILE`, which is `hetjax eval`."""

from hetjax.cli.eval import main

if __name__ == "__main__":
    raise SystemExit(main())
