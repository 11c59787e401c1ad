"""What the commands print. Recorded text is an agent's or a stranger's, and a terminal obeys what is printed to it.

Control characters come out as pictures of themselves (ESC as U+241B), and so do those that turn the direction of
writing. Square brackets are text: colours of our own are given as a style or as `rich.text.Text`, never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that turn the direction of writing."""

_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *_TURNS], 0xFFFD),
}


def visible(text: str) -> str:
    """`text` with nothing in it that a terminal would obey; line ends and tabs stay."""
    return text.translate(_PICTURES)


def say(text: str, *, err: bool = False, style: str | None = None) -> None:
    """Prints `text`, in a colour where `style` names one and the output is a terminal."""
    typer.secho(visible(text), err=err, fg=style)


class Screen(Console):
    """A rich console that prints text as text, and its lines whole where no terminal shows them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        if not self.is_terminal and all(isinstance(each, str | Text) for each in objects):
            options.setdefault("soft_wrap", True)  # what a file or a pipe takes has no width
        super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
