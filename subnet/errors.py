"""Exceptions raised on purpose, one for each way a caller can react."""


class StrataError(Exception):
    """Root of every error this project raises on purpose; its text is fit to show to a person."""


class InvalidConfig(StrataError):
    """A configuration that must not start: unknown key, wrong type, value out of range."""


class ProtocolViolation(StrataError):
    """A peer broke the protocol: bad bytes, bad signature, bad order. It costs the peer, never us."""


class Refused(StrataError):
    """The other side understood the request and said no; `code` names the rule, the text the remedy."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class TransientFailure(StrataError):
    """A time-out, a dropped connection, a full buffer: the same call may succeed later."""


class Backpressure(TransientFailure):
    """The receiver is alive but its buffer is full; try again shortly."""


class NotFound(StrataError):
    """An object, block or record that does not exist (any more)."""


class InvariantBroken(StrataError):
    """One of the invariants of the record does not hold; the process must stop rather than go on."""


class Superseded(StrataError):
    """Another process has this one's part by now; nothing more is written. Started again, this one waits for its turn."""


class DamagedState(StrataError):
    """What this software keeps for itself does not read as it was written; the text says what to restore."""


class OtherVersion(StrataError):
    """State that another version of this software wrote; the text says which one reads it."""


class StartupRefused(StrataError):
    """A role cannot start; the text says what is wrong and what to type. `exit_code` tells cases apart."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
