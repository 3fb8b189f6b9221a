"""What a process says when it ends. Service units read these numbers (deploy/), so a code never changes its meaning."""

import enum

from subnet.errors import (
    DamagedState,
    InvalidConfig,
    InvariantBroken,
    NotFound,
    OtherVersion,
    ProtocolViolation,
    Refused,
    StartupRefused,
    StrataError,
    Superseded,
    TransientFailure,
)


class ExitCode(enum.IntEnum):
    """One code for each case that a person or a supervisor treats differently; 2 is a mistyped command."""

    OK = 0
    CHECK_FAILED = 1
    INVALID_CONFIG = 64
    NO_WALLET = 65
    HOTKEY_ENCRYPTED = 66
    NOT_REGISTERED = 67
    NO_SUCH_NETUID = 68
    PORT_TAKEN = 69
    UNEXPECTED = 70
    CHAIN_UNREACHABLE = 71
    NO_RUN = 72
    FOREIGN_DIRECTORY = 73
    DAMAGED_STATE = 74
    UNAVAILABLE = 75
    VERSION_MISMATCH = 76
    REFUSED = 77
    SECOND_PROCESS = 78
    PRUNED = 79
    INVARIANT_BROKEN = 80
    FORCED = 81
    DISK_FULL = 82
    SUPERSEDED = 83
    INTERRUPTED = 130


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "finished, or stopped by SIGTERM or Ctrl-C in time",
    ExitCode.CHECK_FAILED: "the command ran, and what it checked does not hold (localnet, audit)",
    ExitCode.INVALID_CONFIG: "configuration: unknown key, wrong type, out of range",
    ExitCode.NO_WALLET: "no such wallet or hotkey on this machine, or a file that is not one",
    ExitCode.HOTKEY_ENCRYPTED: "the hotkey is encrypted and its password is not at hand, or wrong",
    ExitCode.NOT_REGISTERED: "the hotkey is not registered on this subnet",
    ExitCode.NO_SUCH_NETUID: "the chain has no subnet with this netuid",
    ExitCode.PORT_TAKEN: "another process listens on the port",
    ExitCode.UNEXPECTED: "a fault of Strata itself; the log has the traceback",
    ExitCode.CHAIN_UNREACHABLE: "the chain did not answer",
    ExitCode.NO_RUN: "the subnet has no Strata run",
    ExitCode.FOREIGN_DIRECTORY: "the data directory belongs to another run",
    ExitCode.DAMAGED_STATE: "the state on disk or in the state store is half-written or damaged",
    ExitCode.UNAVAILABLE: "a peer or a store did not answer in time; starting again may help",
    ExitCode.VERSION_MISMATCH: "this software speaks another protocol version than the run, or reads another stored state",
    ExitCode.REFUSED: "the orchestrator understood and said no",
    ExitCode.SECOND_PROCESS: "another process works with this hotkey",
    ExitCode.PRUNED: "the hotkey lost its place on the subnet while running",
    ExitCode.INVARIANT_BROKEN: "the record contradicts itself; nothing more was written",
    ExitCode.FORCED: "did not stop in time, or was told twice; work may be lost",
    ExitCode.DISK_FULL: "the disk is full or cannot be written; starting again may help once there is room",
    ExitCode.SUPERSEDED: "another orchestrator leads this run now; started again, this one stands by for it",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C or SIGTERM before there was anything to judge (localnet)",
}

RESTART_IS_USELESS = (
    ExitCode.INVALID_CONFIG,
    ExitCode.NO_WALLET,
    ExitCode.HOTKEY_ENCRYPTED,
    ExitCode.NOT_REGISTERED,
    ExitCode.NO_SUCH_NETUID,
    ExitCode.NO_RUN,
    ExitCode.PORT_TAKEN,
    ExitCode.FOREIGN_DIRECTORY,
    ExitCode.DAMAGED_STATE,
    ExitCode.VERSION_MISMATCH,
    ExitCode.REFUSED,
    ExitCode.SECOND_PROCESS,
    ExitCode.PRUNED,
    ExitCode.INVARIANT_BROKEN,
)
"""Codes after which a supervisor leaves the process down: a person has to act first (users.md 34, 35)."""

_BY_KIND: tuple[tuple[type[StrataError], ExitCode], ...] = (
    (InvalidConfig, ExitCode.INVALID_CONFIG),
    (InvariantBroken, ExitCode.INVARIANT_BROKEN),
    (Superseded, ExitCode.SUPERSEDED),
    (DamagedState, ExitCode.DAMAGED_STATE),
    (OtherVersion, ExitCode.VERSION_MISMATCH),
    (Refused, ExitCode.REFUSED),
    (TransientFailure, ExitCode.UNAVAILABLE),
    (NotFound, ExitCode.UNAVAILABLE),
    (ProtocolViolation, ExitCode.VERSION_MISMATCH),
)


def exit_code_of(error: StrataError) -> int:
    """The code a process ends with when `error` is why."""
    if isinstance(error, StartupRefused):
        return error.exit_code
    for kind, code in _BY_KIND:
        if isinstance(error, kind):
            return code
    return ExitCode.UNEXPECTED


def exit_code_table() -> str:
    """The codes as lines of text, for --help and the guides."""
    return "\n".join(f"{code.value:>3}  {MEANINGS[code]}" for code in ExitCode)
