# SPDX-License-Identifier: Apache-2.0
"""Device groups to meshes, axis rules, moves of arrays, meshes of several hosts."""
