"""Tokens become text piece by piece: nothing is shown that a later token may still change, nor a part of a stop text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[int]], str]
"""Text of token ids; an unfinished character reads as U+FFFD at the end."""

UNFINISHED = "�"
_LONGEST_CHARACTER = 4
"""Tokens that one character can take, at most: its bytes. One that is unfinished has not more than all but one of them."""


@dataclass(slots=True)
class TextStream:
    """The text of one choice. `stop` ends it before the first of these texts."""

    decode: Decode
    stop: tuple[str, ...] = ()
    is_stopped: bool = False
    _ids: list[int] = field(default_factory=list)
    _context: int = 0
    """Index from which ids are decoded: some tokenizers write a word's first token by what stands before it, and what bytes that
    are no text come out as depends on the byte that began them."""
    _shown: int = 0
    """Index of the first id whose text has not been given out."""
    _held: str = ""
    """Text that may be the beginning of a stop text."""

    def push(self, token: int) -> str:
        """Text that is certain now; empty while a character is unfinished or a stop text may have begun."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        certain = len(self._ids)
        if self.decode(self._ids[self._context :]).endswith(UNFINISHED):
            certain -= _LONGEST_CHARACTER - 1
        if certain <= self._shown:
            return ""
        before = self.decode(self._ids[self._context : self._shown])
        whole = self.decode(self._ids[self._context : certain])
        self._context, self._shown = max(0, certain - _LONGEST_CHARACTER), certain
        return self._filter(whole[len(before) :])

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.is_stopped:
            return ""
        before = self.decode(self._ids[self._context : self._shown])
        rest = self._filter(self.decode(self._ids[self._context :])[len(before) :])
        self._shown = len(self._ids)
        held, self._held = ("", "") if self.is_stopped else (self._held, "")
        return rest + held

    def _filter(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
