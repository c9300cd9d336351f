# SPDX-License-Identifier: Apache-2.0
"""Our memory of stages against what the compilers of three backends say.

python -m experiments.compiled_memory --output FILE --backend gpu [--limit N]
python -m experiments.compiled_memory --judge FILE [--report FILE]
"""

import argparse
from pathlib import Path

from experiments.compile.targets import TARGETS
from experiments.compiled_memory.cells import HOST, backend_of
from experiments.compiled_memory.compiling import available, run


def main() -> None:
    """Compile, or judge."""
    parser = argparse.ArgumentParser(description="Hold memory against compilers")
    parser.add_argument("--output", type=Path, help="rows are appended to this file")
    parser.add_argument("--backend", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--targets", nargs="+", default=[HOST, *TARGETS])
    parser.add_argument("--limit", type=int, default=60, help="cells of the backend")
    given = parser.parse_args()
    own = [t for t in given.targets if backend_of(t) == given.backend]
    run(given.output, given.backend, list(filter(available, own)), given.limit)


if __name__ == "__main__":
    main()
