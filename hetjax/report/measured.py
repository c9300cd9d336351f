# SPDX-License-Identifier: Apache-2.0
"""Shows a measured profile: a table for people, one JSON object for machines.

Owns the columns. Does not own the profile (`costs/measured/layer_profile.py`) nor the
measuring.
"""

from dataclasses import dataclass
from pathlib import Path

from hetjax.costs.measured.layer_profile import Profile, profile_json
from hetjax.plans.table import html_table

TIMES = ("forward", "backward", "update")
_KEYS = ("device", "layer", "tensor", "sequences", "remat")
_HEADER = (*_KEYS, *(f"{name} ms" for name in TIMES))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredProfile:
    """The times of layers and links; `find_plan` can read the file.

    `how_sure` are lines that say how much surer the profile makes predictions.

    >>> profile = Profile(
    ...     model="tiny", seq_len=64, dtype="float32", layers=("head",), measurements=()
    ... )
    >>> print(MeasuredProfile(profile=profile, path=Path("p.json")).title)
    tiny: 64 tokens, float32, per program 0.000 ms
    """

    profile: Profile
    path: Path
    how_sure: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        profile = self.profile
        return (
            f"{profile.model}: {profile.seq_len} tokens, {profile.dtype}, per program "
            f"{1e3 * profile.program_s:.3f} ms"
        )

    def json(self) -> str:
        """Return the text of the file."""
        return profile_json(self.profile)

    def __str__(self) -> str:
        rows = [_HEADER, *_rows(self.profile)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if i >= len(_KEYS) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([self.title, *lines, *_links(self.profile), *self.how_sure])

    def _repr_html_(self) -> str:
        profile = self.profile
        notes = [*_links(profile), *self.how_sure]
        return html_table(_HEADER, _rows(profile), title=self.title, notes=notes)


def _rows(profile: Profile) -> list[tuple[str, ...]]:
    return [
        (
            *(m.device, m.kind, str(m.tensor), str(m.microbatch_size), m.remat),
            *(f"{1e3 * s:.3f}" for s in (m.forward_s, m.backward_s, m.update_s)),
        )
        for m in profile.measurements
    ]


def _links(profile: Profile) -> list[str]:
    return [
        f"{' to '.join(link.between)}: {link.bandwidth_gbit_per_s:.3g} Gbit/s, "
        f"{link.latency_ms:.3f} ms"
        for link in profile.links
    ]
