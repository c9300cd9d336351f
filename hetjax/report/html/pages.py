# SPDX-License-Identifier: Apache-2.0
"""Makes pages of HTML that need nothing else: no network, no files beside them.

Owns rendering a page from templates, and a notebook's output from a page. The template
engine escapes all text. Does not own what is on a page (`plan_page.py`, `run_page.py`)
nor how it looks (`templates/`).
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from hetjax.report.colours import CURVES, MEMORY, TIME

if TYPE_CHECKING:
    from jinja2 import Environment


def page(template: str, **values: Any) -> str:
    """Return the page that a template makes of these values."""
    return _environment().get_template(template).render(values)


def framed(content: str) -> str:
    """Return a page for a notebook, in a frame that isolates the page's style."""
    return page("frame.html", content=content)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hetjax.report.html"),
        autoescape=True,
        undefined=StrictUndefined,  # a missing value is our mistake: raise
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"part_colours": MEMORY | TIME, "curve_colours": CURVES}
    return environment
