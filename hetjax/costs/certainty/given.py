# SPDX-License-Identifier: Apache-2.0
"""Reads a calibration that a user gives: "none", a run's file, or measured sums.

Owns the detection of the file's kind. Does not own the parsing (`calibration.py`,
`costs/measured/nccl_tests.py`) nor the use of the result (`chosen.py`). Needs no JAX,
so that commands can refuse a file at once.
"""

from dataclasses import replace
from pathlib import Path

from hetjax.costs.certainty.calibration import StepCalibration, parse_calibration
from hetjax.costs.measured.nccl_tests import MARK, RingMeasurement, parse_nccl_tests
from hetjax.errors import BadInput
from hetjax.files.parsing import read_file

NONE = "none"  # typed in place of a file


def check_calibration(given: str | Path | None) -> None:
    """Raise BadInput if `given` is neither "none" nor a file that can be used."""
    if given is not None and str(given) != NONE:
        read_given(given)


def read_given(path: str | Path) -> StepCalibration | RingMeasurement:
    """Read either kind of file; a BadInput error starts with the path."""
    found = read_file(path, _parse, what="calibration file")
    if isinstance(found, RingMeasurement):
        return found
    return replace(found, source=str(path))


def _parse(text: str) -> StepCalibration | RingMeasurement:
    if MARK in text:
        return parse_nccl_tests(text)
    try:
        return parse_calibration(text)
    except BadInput as bad:  # its advice is for the file of a run
        raise BadInput(
            got=bad.got,
            allowed="calibration.json of a run, or the whole output of NCCL-tests",
            fix="give RUN/calibration.json, with RUN the directory of a run, or leave "
            "--calibration out",
        ) from bad
