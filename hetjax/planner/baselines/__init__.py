# SPDX-License-Identifier: Apache-2.0
"""Other planners, from their papers: each file gives the plans that one would choose.

They see the same costs per layer as our own planner and are judged by the same
simulator. Does not own those costs (`model/terms/terms.py`) nor the evaluation
(`model/evaluator.py`).
"""
