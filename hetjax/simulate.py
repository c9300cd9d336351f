# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.simulate PLAN [options]`: predict a step before it runs.

Owns exit codes and the last words of errors. Does not own anything else: options and
work are `hetjax/cli/simulate.py`'s.
"""

import sys
from collections.abc import Sequence

from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.report.progress import working


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        with working("starting"):  # JAX takes seconds to import
            from hetjax.cli.simulate import simulate_command
        simulate_command(sys.argv[1:] if arguments is None else arguments)
    except (BadInput, NoFeasiblePlan) as error:
        print(f"error\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
