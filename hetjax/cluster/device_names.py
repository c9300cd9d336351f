# SPDX-License-Identifier: Apache-2.0
"""Matches names of devices as people write them with the names in a list.

A name is a set of words: "A100 80GB PCIe" is a100, 80 and pcie. It may mean every entry
that has these words, and perhaps more words, but no other variant of the card (a Ti, a
laptop's). Owns this one rule. Does not own the list (`catalogue.py`).
"""

import re
from collections.abc import Iterable, Mapping

_BRANDS = {"nvidia", "amd", "geforce", "tesla", "radeon", "instinct", "google", "gpu"}
_FILLERS = {"gb", "gib", "generation", "edition", "vram"}
_SERIES = re.compile(r"\b(rtx|gtx|rx|titan|tpu)(?=[\da-z])")  # RTX4090
_SUFFIXES = re.compile(r"(?<=\d)(ti|super)(?=\b|super)")  # 4070TiSUPER
_SIZE = re.compile(r"(\d+)(?:gb|gib|g)")
_SOCKET = re.compile(r"sxm\d?")  # SXM4 equals SXM: the chip determines the number
_VARIANTS = {"ti", "super", "laptop", "mobile", "max", "d", "mig", "nvl"}


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, whatever its spelling.

    >>> sorted(words_of("NVIDIA A100 80GB PCIe")), sorted(words_of("a100-pcie-80g"))
    (['80', 'a100', 'pcie'], ['80', 'a100', 'pcie'])
    """
    text = name.lower().replace("pci-e", "pcie").replace("pci express", "pcie")
    text = _SUFFIXES.sub(r" \1 ", _SERIES.sub(r"\1 ", text))
    found = re.findall(r"[a-z0-9]+", text)
    return frozenset(map(_plain, found)) - _BRANDS - _FILLERS


def meant(name: str, spellings: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the entries that a name may mean, judged by their `spellings`."""
    said = words_of(name)
    return [
        entry
        for entry, spelled in spellings.items()
        if said and any(_may_mean(said, words_of(spelling)) for spelling in spelled)
    ]


def _may_mean(said: frozenset[str], entry: frozenset[str]) -> bool:
    return said <= entry and not (entry - said) & _VARIANTS


def _plain(word: str) -> str:
    if size := _SIZE.fullmatch(word):
        return size[1]
    return "sxm" if _SOCKET.fullmatch(word) else word
