# SPDX-License-Identifier: Apache-2.0
"""Who looks on at a run: nothing that an observer does changes it."""
