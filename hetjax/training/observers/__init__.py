# SPDX-License-Identifier: Apache-2.0
"""The observers of a run: nothing that an observer does changes the run."""
