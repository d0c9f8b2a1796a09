"""Stop strings: an answer ends before the first of them, also when it is shown as it comes."""

from __future__ import annotations

from collections.abc import Collection


class StopStrings:
    """Passes text on until one of `stops` is complete, and never shows the beginning of one.

    Of several that are complete at the same character the longest counts. What is passed on does not depend on how the
    text was cut into pieces.

    Attributes:
        found: the stop string that ended the text, None so far.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=1) - 1  # of what may have to be held back
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown now that `text` has come; nothing more once a stop string is found."""
        if self.found is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text  # as nearly always
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self._stops]
        complete = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        if complete:
            _, start, self.found = min(complete)
            self._held = ""
            return text[:start]
        shown = len(text) - self._beginning_at_the_end_of(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_the_end_of(self, text: str) -> int:
        """The length of the longest beginning of a stop string that `text`, which holds no whole one, ends with."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length] in self._firsts and any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
