# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.simulate PLAN [options]`, which is `hetjax simulate`."""

from hetjax.cli.simulate import main

if __name__ == "__main__":
    raise SystemExit(main())
