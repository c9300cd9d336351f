# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.profile PRESET [options]`: time a model's layers on what is here.

Owns exit codes and the last words of errors. Does not own anything else: the options
are `hetjax/training/profile_cli.py`'s, the work is `hetjax/training/profiling.py`'s.
"""

import sys
from collections.abc import Sequence

from hetjax.errors import BadInput
from hetjax.report.progress import working
from hetjax.training.profile_cli import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        config, preset = parse(sys.argv[1:] if arguments is None else arguments)
        with working("starting"):  # JAX takes seconds to import
            from hetjax.models.presets import model_preset
            from hetjax.training.profiling import measure_profile
        measure_profile(config, preset, model_preset(preset.config.model))
        return 0
    except BadInput as error:
        print(f"error\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command measures what is missing")
        return 1


if __name__ == "__main__":
    sys.exit(main())
