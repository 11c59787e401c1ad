"""Dataset formats for trajectories, one file per format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rolltap.errors import DatasetError
from rolltap.extras import lookup
from rolltap.reconstructor.exporters.atif import Atif
from rolltap.reconstructor.exporters.base import Exporter
from rolltap.reconstructor.exporters.harbor import Harbor
from rolltap.reconstructor.exporters.nemo_gym import NemoGym
from rolltap.reconstructor.exporters.preference import Kto, Preference
from rolltap.reconstructor.exporters.sft import Sft, SftTokens
from rolltap.reconstructor.exporters.sharegpt import ShareGpt
from rolltap.reconstructor.exporters.skyrl import SkyRlRl, SkyRlSft
from rolltap.reconstructor.exporters.slime import Slime
from rolltap.reconstructor.exporters.trajectories import Trajectories
from rolltap.reconstructor.exporters.transitions import Transitions
from rolltap.reconstructor.exporters.trl_grpo import TrlGrpo
from rolltap.reconstructor.exporters.verifiers import Verifiers
from rolltap.reconstructor.exporters.verl import VerlRl

EXPORTERS: Mapping[str, Callable[..., Exporter]] = {
    Trajectories.name: Trajectories,
    Sft.name: Sft,
    SftTokens.name: SftTokens,
    Preference.name: Preference,
    Kto.name: Kto,
    VerlRl.name: VerlRl,
    ShareGpt.name: ShareGpt,
    Atif.name: Atif,
    Transitions.name: Transitions,
    Harbor.name: Harbor,
    Verifiers.name: Verifiers,
    NemoGym.name: NemoGym,
    TrlGrpo.name: TrlGrpo,
    Slime.name: Slime,
    SkyRlSft.name: SkyRlSft,
    SkyRlRl.name: SkyRlRl,
}

ENTRY_POINTS = "rolltap.exporters"


def exporter_named(name: str, options: Mapping[str, str] | None = None) -> Exporter:
    """Returns the exporter of a built-in or installed format, with its options.

    Raises `DatasetError` if the format or an option is unknown; the message lists the known ones.
    """
    make: Any = lookup("format", name, EXPORTERS, ENTRY_POINTS, DatasetError)
    known = {item.name: type(item.default) for item in fields(make)}
    values: dict[str, Any] = {}
    for option, text in (options or {}).items():
        if option not in known:
            raise DatasetError(f"{name} has no option {option!r}; known: {', '.join(sorted(known)) or 'none'}")
        try:
            values[option] = known[option](text)
        except ValueError:
            raise DatasetError(f"--option {option}: expected a {known[option].__name__}, not {text!r}") from None
    return make(**values)
