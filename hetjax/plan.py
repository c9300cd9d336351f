# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.plan [PRESET] [options]`: find the best plan for a cluster.

Owns exit codes and the last words of errors. Does not own anything else: options and
files are `hetjax/cli/plan.py`'s, searches `hetjax/planner/search/comparison.py`'s.
"""

import sys
from collections.abc import Sequence

from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.report.progress import working


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        with working("starting"):  # JAX takes seconds to import
            from hetjax.cli.plan import plan_command
        plan_command(sys.argv[1:] if arguments is None else arguments)
    except (BadInput, NoFeasiblePlan) as error:
        print(f"error\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
