"""Which peers cannot be dialled, and when to try again: the more often in vain, the later (DESIGN D84)."""

from dataclasses import dataclass

from subnet.types import Hotkey

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Away:
    """`look_s` is when the next look is due."""

    pause_s: float
    look_s: float


class Reach:
    """What the last pushes to each peer came to. Times are unix seconds, given by the caller."""

    def __init__(self) -> None:
        self._away: dict[Hotkey, _Away] = {}

    def is_open(self, peer: Hotkey) -> bool:
        """Whether a frame for this peer is pushed, as far as is known."""
        return peer not in self._away

    def is_look_due(self, peer: Hotkey, *, now: float) -> bool:
        """Whether to see if a peer can be dialled again; True once, for whoever asks first."""
        away = self._away.get(peer)
        if away is None or now < away.look_s:
            return False
        away.look_s = now + away.pause_s
        return True

    def failed(self, peer: Hotkey, *, now: float) -> None:
        """Nothing answers at this peer. Frames that were under way together count as one failure."""
        away = self._away.get(peer)
        if away is None:
            self._away[peer] = _Away(FIRST_PAUSE_S, now + FIRST_PAUSE_S)

    def failed_again(self, peer: Hotkey, *, now: float) -> None:
        """A look was in vain."""
        away = self._away.get(peer)
        if away is not None:
            away.pause_s = min(LONGEST_PAUSE_S, 2 * away.pause_s)
            away.look_s = now + away.pause_s

    def answered(self, peer: Hotkey) -> None:
        """A peer answered, whatever it said."""
        self._away.pop(peer, None)
