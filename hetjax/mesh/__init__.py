# SPDX-License-Identifier: Apache-2.0
"""Meshes of device groups, axis rules, moves of arrays, meshes of several hosts."""
