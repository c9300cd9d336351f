# SPDX-License-Identifier: Apache-2.0
"""Runs a worker process that knows the models of the experiments."""

from experiments.islands import models as models
from hetjax.training.worker import main

if __name__ == "__main__":
    main()
