# SPDX-License-Identifier: Apache-2.0
"""A page as an HTML parser sees it: balanced, with its words and elements."""

from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "input", "link"}
_RAW = {"script", "style"}


@dataclass(frozen=True, slots=True)
class Element:
    tag: str
    attributes: Mapping[str, str]
    parents: tuple[str, ...]


class Page(HTMLParser):
    """Refuses unclosed elements, and collects the rest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.words, self.raw = list[Element](), list[str](), ""
        self._open: list[str] = []
        self._numbers: list[str] = []  # words of <dl>, between "dl" and "/dl"
        self.feed(html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"twice in <{tag}>: {names}"
        values = {name: value or "" for name, value in attrs}
        self.elements.append(Element(tag, values, tuple(self._open)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "dl":
            self._numbers.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> in {self._open}"
        self._open.pop()
        if tag == "dl":
            self._numbers.append("/dl")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in _RAW:
            self.raw += data
        elif data.strip():
            self.words.append(" ".join(data.split()))
            if "dl" in self._open:
                self._numbers.append(self.words[-1])

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def figures(self) -> dict[str, str]:
        """Return the headline numbers by name."""
        start, end = (self._numbers.index(name) for name in ("dl", "/dl"))
        words = self._numbers[start + 1 : end]
        return dict(zip(words[::2], words[1::2], strict=True))


def assert_needs_nothing_else(html: str) -> None:
    """Check that no other host is addressed and a browser need fetch nothing."""
    page = Page(html)
    for element in page.elements:
        assert (
            not {"src", "href", "srcset", "data", "action"} & element.attributes.keys()
        )
        assert "url(" not in element.attributes.get("style", "")
    assert page.all("link") == page.all("img") == page.all("iframe") == []
    for word in ("http:", "https:", "//www", "@import", "url(", "fetch(", "import("):
        assert word not in page.raw, word
