# SPDX-License-Identifier: Apache-2.0
"""The clock of a race: an hour of training, run through in seconds.

Owns how simulated time follows from the time of somebody who watches, and how far each
lane is by then. Does not own the lanes (`race.py`) nor how they look (`race_view.py`).
"""

RACE_S = 3600.0  # simulated seconds from the start of a race to its end


def simulated_s(watched_s: float, race_takes_s: float) -> float:
    """Return how much training is over when somebody has watched for so long.

    >>> simulated_s(2.0, race_takes_s=8.0)
    900.0
    """
    if watched_s >= race_takes_s:
        return RACE_S
    return RACE_S * watched_s / race_takes_s


def trained_tokens(tokens_per_s: float, after_s: float) -> float:
    """Return the tokens of a lane after so many simulated seconds."""
    return tokens_per_s * after_s


def filled(tokens_per_s: float, best_per_s: float, after_s: float) -> float:
    """Return how full a lane is, from 0 to 1: what the fastest has at the end is 1.

    >>> filled(50.0, best_per_s=200.0, after_s=1800.0)
    0.125
    """
    if best_per_s == 0:  # nobody has a plan
        return 0.0
    return trained_tokens(tokens_per_s, after_s) / trained_tokens(best_per_s, RACE_S)
