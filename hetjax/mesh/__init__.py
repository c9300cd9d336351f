# SPDX-License-Identifier: Apache-2.0
"""Device groups to meshes, axis rules, moves between meshes, meshes of several hosts."""
