# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.train PRESET [options]`: train, or go on with a run.

Owns exit codes and the last words of errors. Does not own anything else: the options
are `hetjax/cli/train_options.py`'s, the run is `hetjax/training/run.py`'s.
"""

import sys
from collections.abc import Sequence

from hetjax.cli.train_options import parse
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.report.progress import working
from hetjax.training.ending import Failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        config, preset = parse(sys.argv[1:] if arguments is None else arguments)
        with working("starting"):  # JAX takes seconds to import
            from hetjax.models.presets import model_preset
            from hetjax.training.run import run
        return run(config, preset, model_preset(config.model))
    except (BadInput, NoFeasiblePlan, Failed) as error:
        print(f"error\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint")
        return 1


if __name__ == "__main__":
    sys.exit(main())
