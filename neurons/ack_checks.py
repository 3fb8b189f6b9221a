"""What a miner's kept acknowledgements prove about the record: receipts that were taken and are not there (trust.md 1.1)."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from neurons.checks import Finding, History, Verify
from neurons.exit_codes import ExitCode
from subnet.errors import StartupRefused
from subnet.receipts import KeptAck, ack_bytes

NAME = "receipts that the orchestrator acknowledged are on record"


def read_acks(path: Path) -> list[KeptAck]:
    """Acknowledgements in a file, or in a directory of a miner's; sorted by epoch. Raises StartupRefused."""
    files = sorted(path.glob("**/ack-*.json")) if path.is_dir() else [path]
    if not files:
        raise StartupRefused(
            f"{path} holds no acknowledgements: a miner keeps them as ack-EPOCH.json in work/ of its data directory.",
            ExitCode.INVALID_CONFIG,
        )
    acks = []
    for file in files:
        try:
            acks.append(msgspec.json.decode(file.read_bytes(), type=KeptAck))
        except OSError as error:
            raise StartupRefused(f"{file} cannot be read: {error.strerror}.", ExitCode.INVALID_CONFIG) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StartupRefused(f"{file} is no acknowledgement: {error}.", ExitCode.INVALID_CONFIG) from error
    return sorted(acks, key=lambda ack: (ack.epoch, ack.hotkey, ack.num_receipts))


def check_acks(history: History, acks: Iterable[KeptAck], verify: Verify) -> Finding:
    """Every commitment on record covers what the orchestrator signed that it had of the miner's receipts.

    A miner that was acknowledged and has no commitment at all may have stopped before it committed: that is counted and said,
    for nobody but the miner knows.
    """
    num_covered = num_open = 0
    for ack in acks:
        wrong = _wrong(history, ack, verify)
        if wrong:
            detail = f"epoch {ack.epoch}, {ack.hotkey}: {ack.num_receipts} receipts acknowledged, {wrong}"
            return Finding(name=NAME, holds=False, detail=detail)
        account = history.record.accounts.epochs.get(ack.epoch)
        is_covered = account is not None and ack.hotkey in account.committed
        num_covered, num_open = num_covered + is_covered, num_open + (not is_covered)
    left = f"; {num_open} of epochs without a commitment of that miner's on record" if num_open else ""
    return Finding(
        name=NAME, holds=True if num_covered else None, detail=f"{num_covered} acknowledgements covered{left}"
    )


def _wrong(history: History, ack: KeptAck, verify: Verify) -> str:
    """What is wrong about one, in words; empty when nothing is."""
    created = history.record.accounts.created
    if created is None or ack.run_id != created.run_id:
        return f"but by run {ack.run_id}, not by this one"
    signed = ack_bytes(ack.run_id, epoch=ack.epoch, hotkey=ack.hotkey, num_receipts=ack.num_receipts, head=ack.head)
    if not verify(history.owner, signed, ack.signature):
        return "but not signed by this run's owner: it proves nothing"
    account = history.record.accounts.epochs.get(ack.epoch)
    committed = account.committed.get(ack.hotkey) if account is not None else None
    if committed is None:
        return ""
    if committed.num_receipts < ack.num_receipts:
        return f"{committed.num_receipts} on record"
    heads = {committed.num_receipts: committed.head} | {one.num_receipts: one.head for one in committed.checkpoints}
    if heads.get(ack.num_receipts, ack.head) != ack.head:
        return "under another head than on record"
    return ""
