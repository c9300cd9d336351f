# SPDX-License-Identifier: Apache-2.0
"""Other planners, from their papers: each file gives the plans of one planner.

They use the same costs per layer as our planner, and the same simulator evaluates them.
Does not own those costs (`model/terms/terms.py`) nor the evaluation
(`model/evaluator.py`).
"""
