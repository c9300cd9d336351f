# SPDX-License-Identifier: Apache-2.0
"""The public functions that commands wrap; `import hetjax` finds them by name."""
