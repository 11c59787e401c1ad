"""The text of a reply, as the client gets it: as sampled, up to the first stop string.

A block that is no call is text like any other. The only characters that are left out belong to the format: line breaks
next to thinking or to a call, and white space that stands alone there. Texts between which calls stood are joined by
one line break.
"""

from __future__ import annotations

from rolltap.proxy.continuation.stop_strings import StopStrings


class ReplyText:
    """Takes text in sampled order; each method returns what can be sent. `stopped` is the stop string that was found.

    A run is the text between two calls. Line breaks at its end are held until it is known whether a call follows, and
    white space at its beginning until other characters do.
    """

    def __init__(self, stops: StopStrings, *, after_thinking: bool = False) -> None:
        self.stopped: str | None = None
        self._stops = stops
        self._follows = after_thinking  # the run follows thinking or a call
        self._blank = True  # the run has only white space so far
        self._held = ""
        self._is_sent = False
        self._tail = ""  # the end of what was sent, where a stop string may have begun

    def thinks(self) -> None:
        """The reply has thinking before its text, and white space before that."""
        self._follows, self._held = True, ""

    def add(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        if self._blank:
            if not self._held.strip():
                return ""
            self._begin_run()
        if self._stop_found():
            return self._send(self._held)
        size = len(self._held.rstrip("\n"))
        if self._stops:
            size = min(size, len(self._held) - self._stops.possible(self._tail + self._held))
        return self._send(self._held[: max(0, size)])

    def interrupt(self) -> str:
        """A call stands here."""
        text = "" if self._blank or self.stopped is not None else self._send(self._held.rstrip("\n"))
        self._held, self._blank, self._follows = "", True, True
        return text

    def end(self) -> str:
        """The reply ends here."""
        if self._blank and not self._follows and self.stopped is None and self._held:
            self._begin_run()
            self._stop_found()
        return "" if self._blank else self._send(self._held)

    def _begin_run(self) -> None:
        self._blank = False
        if self._follows:
            self._held = self._held.lstrip("\n")
        if self._is_sent:
            self._held = f"\n{self._held}"

    def _stop_found(self) -> bool:
        """Cuts the held text at the first stop string."""
        at, self.stopped = self._stops.first(self._tail + self._held)
        if self.stopped is not None:
            self._held = self._held[: max(0, at - len(self._tail))]
        return self.stopped is not None

    def _send(self, text: str) -> str:
        self._held = self._held[len(text) :]
        self._is_sent = self._is_sent or bool(text)
        self._tail = (
            (self._tail + text)[max(0, len(self._tail) + len(text) - self._stops.longest) :] if text else self._tail
        )
        return text
