"""What kept acknowledgements prove about a record, and what they do not (trust.md 1.1)."""

from pathlib import Path

import msgspec
import pytest

from neurons.ack_checks import check_acks, read_acks
from neurons.checks import History, read_history
from neurons.roles.books import ack_name
from subnet.adapters.auth import KeypairSigner
from subnet.errors import StartupRefused
from subnet.frames import digest
from subnet.receipts import KeptAck, ack_bytes, canonical
from subnet.types import NO_DIGEST, Digest, Epoch, Hotkey
from tests.unit.recorded import A, B, Book, quiet_epoch

OWNER = KeypairSigner.from_uri("//owner", deterministic=True)
COMMITTED = 4
"""Receipts of every commitment in these records."""


def history(book: Book) -> History:
    found, whole = read_history(book.segments, owner=OWNER.hotkey)
    assert whole.holds
    return found


def ack(
    hotkey: Hotkey = A, *, num_receipts: int = COMMITTED, head: Digest = NO_DIGEST, epoch: int = 0, run_id: str = "r"
) -> KeptAck:
    signed = ack_bytes(run_id, epoch=Epoch(epoch), hotkey=hotkey, num_receipts=num_receipts, head=head)
    return KeptAck(
        run_id=run_id,
        epoch=Epoch(epoch),
        hotkey=hotkey,
        num_receipts=num_receipts,
        head=head,
        signature=OWNER.sign(signed),
    )


def test_what_was_acknowledged_and_is_on_record_holds() -> None:
    found = check_acks(history(quiet_epoch(Book(), 0)), [ack(), ack(B), ack(num_receipts=2)], OWNER.verify)
    assert (found.holds, found.detail) == (True, "3 acknowledgements covered")


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (ack(num_receipts=5), "5 receipts acknowledged, 4 on record"),
        (ack(head=digest(b"another")), "4 receipts acknowledged, under another head than on record"),
        (ack(run_id="x"), "but by run x, not by this one"),
        (msgspec.structs.replace(ack(), num_receipts=3), "but not signed by this run's owner"),
    ],
)
def test_an_omission_is_named_and_a_forgery_proves_nothing(kept: KeptAck, text: str) -> None:
    found = check_acks(history(quiet_epoch(Book(), 0)), [ack(B), kept], OWNER.verify)
    assert found.holds is False
    assert found.detail.startswith(f"epoch 0, {A}: ") and text in found.detail


def test_who_never_committed_may_have_stopped_by_itself() -> None:
    found = check_acks(history(quiet_epoch(Book(), 0)), [ack(epoch=7)], OWNER.verify)
    assert found.holds is None
    assert found.detail == "0 acknowledgements covered; 1 of epochs without a commitment of that miner's on record"


def test_acks_are_read_from_a_file_or_a_miners_directory(tmp_path: Path) -> None:
    for epoch in (1, 0):
        (tmp_path / ack_name(Epoch(epoch))).write_bytes(canonical(ack(epoch=epoch)))
    assert [one.epoch for one in read_acks(tmp_path)] == [0, 1]
    assert read_acks(tmp_path / ack_name(Epoch(1))) == [ack(epoch=1)]


def test_what_is_no_acknowledgement_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupRefused, match="holds no acknowledgements"):
        read_acks(tmp_path)
    with pytest.raises(StartupRefused, match="cannot be read"):
        read_acks(tmp_path / "nothing.json")
    (tmp_path / "ack-000000.json").write_bytes(b"{}")
    with pytest.raises(StartupRefused, match="is no acknowledgement"):
        read_acks(tmp_path)
