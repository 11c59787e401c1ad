"""Renders pages from templates. Everything that a template prints is escaped, with visible control characters.

Recorded text is hostile: it contains markup, terminal escapes and characters that reorder the text. `visible` runs on
every printed value (jinja's `finalize`), so no template can forget it. Only `highlight` makes markup of recorded text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rolltap.proxy.viewer.highlight import CodePiece, arguments_of, highlighted
from rolltap.wording import ago, counted, utc_text

HERE = Path(__file__).parent
ASSETS: Mapping[str, bytes] = {path.name: path.read_bytes() for path in sorted((HERE / "assets").iterdir())}
ASSETS_HASH = hashlib.sha256(b"".join(ASSETS.values())).hexdigest()[:12]
"""Part of the assets' addresses: a browser keeps assets forever, and asks for new ones after an upgrade."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Replaces characters that are invisible or reorder others by signs: ESC by ␛, U+202E by ⟨202E⟩."""
    return _HIDDEN.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨{code:04X}⟩"


def moment(at: float | None) -> str:
    """Formats a time for people, in UTC."""
    return "" if at is None else utc_text(at)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int | None) -> str:
    """Formats an integer with thin spaces between its thousands."""
    return "" if number is None else f"{number:,}".replace(",", "\u202f")


def decimal(number: float | None, digits: int = 2) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def figure(number: float) -> str:
    """Formats a number with three significant digits; a small one with two, so that it differs from 0."""
    if abs(number) >= 100:
        return count(round(number))
    return f"{number:.3g}" if number == 0 or abs(number) >= 0.01 else f"{number:.2g}"


def signed(number: float) -> str:
    """Formats a difference with its sign."""
    return f"{number:+.2f}".replace("-", "\u2212")


def place(number: float, reach: float) -> str:
    """Returns the position of a value on an axis from -100 to 100 that spans `reach` on each side."""
    return f"{number / reach * 100:.1f}"


def share(value: float, reach: tuple[float, float], size: float) -> str:
    """Returns how much of `size` lies between 0, or the lower end of `reach` if that is over 0, and a value."""
    low, high = reach
    return f"{abs(value - max(low, 0.0)) / (high - low) * size:.1f}"


def token_text(text: str) -> str:
    """Returns a token's text on one line."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")


def json_block(value: Any) -> Markup:
    """Returns JSON for a `<script type="application/json">`: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+\Z")


def safe_image(url: str) -> bool:
    """True if the image's pixels are in the record itself. Another address would tell its host of the reader."""
    return _IMAGE.match(url) is not None


_pieces: ContextVar[list[CodePiece]] = ContextVar("pieces")
_PLACE = re.compile("\0([0-9]+)\0")
"""Stands for a piece in a page that is not whole yet. No printed value has a NUL: see `visible`."""


def _piece(piece: CodePiece) -> Markup:
    """The piece's HTML, or a place for it."""
    if piece.is_plain:
        return Markup(escape(piece.text))
    pieces = _pieces.get()
    pieces.append(piece)
    return Markup(f"\0{len(pieces) - 1}\0")


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    return visible(value)


def _environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"ago": ago, "moment": moment, "duration": duration, "count": count, "decimal": decimal}
    filters |= {"figure": figure, "signed": signed, "place": place, "share": share}
    env.filters.update(filters)
    env.filters["counted"] = counted
    env.filters["arguments"] = lambda text: arguments_of(text)
    env.filters["json"] = json_block
    env.filters["path"] = lambda text: quote(text, safe="")
    env.filters["safe_image"] = safe_image
    env.filters["token"] = token_text
    env.filters["word"] = lambda text: re.sub(r"[^a-z]", "", text)
    env.filters["code"] = lambda text, language="": _piece(CodePiece(visible(text), language))
    env.filters["prose"] = lambda text: _piece(CodePiece(visible(text), is_prose=True))
    return env


_ENVIRONMENT = _environment()


def render(template: str, **values: Any) -> str:
    """Renders a page without recorded text."""
    return _ENVIRONMENT.get_template(template).render(assets=f"/view/assets/{ASSETS_HASH}", **values)


async def render_page(template: str, **values: Any) -> str:
    """Renders a page in a thread, and its code in a reader process: other requests go on meanwhile."""
    pieces: list[CodePiece] = []

    def fill() -> str:
        _pieces.set(pieces)
        return render(template, **values)

    page = await asyncio.to_thread(fill)
    html = await highlighted(pieces)
    return _PLACE.sub(lambda place: html[int(place[1])], page)
