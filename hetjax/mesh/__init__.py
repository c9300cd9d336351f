# SPDX-License-Identifier: Apache-2.0
"""Device groups to meshes, axis rules, reshard pieces, transports, reduction."""
