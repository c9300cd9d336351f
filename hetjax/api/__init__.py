# SPDX-License-Identifier: Apache-2.0
"""The public functions, which commands wrap; `import hetjax` finds them by name."""
