# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.doctor [options]`, which is `hetjax doctor`."""

from hetjax.cli.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
