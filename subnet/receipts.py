"""Receipt chains, Merkle roots, and the bytes that leases, acknowledgements, verdicts and flags are signed over (trust.md 1)."""

from collections.abc import Iterable, Sequence

import blake3
import msgspec

from subnet.types import Digest, Epoch, Hotkey, Lease, LossFlag, Receipt, Record, Verdict

_encoder = msgspec.json.Encoder(order="deterministic")


def canonical(record: object) -> bytes:
    """The one JSON spelling of a record: fields as declared, dict keys sorted, no spaces. What is signed or hashed is this."""
    return _encoder.encode(record)


def _hash(*parts: bytes) -> Digest:
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return Digest(hasher.hexdigest())


def first_head(run_id: str, epoch: Epoch, hotkey: Hotkey) -> Digest:
    """Head of the empty receipt chain of one miner's epoch."""
    return _hash(b"receipts", run_id.encode(), str(epoch).encode(), hotkey.encode())


def next_head(head: Digest, receipt: Receipt) -> Digest:
    """Head after `receipt`."""
    return _hash(head.encode(), canonical(receipt))


def extend(head: Digest, receipts: Iterable[Receipt]) -> Digest:
    """Head after all of `receipts`, in order."""
    for receipt in receipts:
        head = next_head(head, receipt)
    return head


def merkle_root(leaves: Sequence[bytes]) -> Digest:
    """Root over `leaves` in the order given; leaf and node hashes have different prefixes, an odd node moves up alone."""
    level = [_hash(b"leaf", leaf) for leaf in leaves]
    if not level:
        return _hash(b"empty")
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [_hash(b"node", *(node.encode() for node in pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def lease_bytes(lease: Lease) -> bytes:
    """What the orchestrator signs for a lease."""
    return b"strata/lease/1\n" + canonical(msgspec.structs.replace(lease, signature=""))


def ack_bytes(run_id: str, *, epoch: Epoch, hotkey: Hotkey, num_receipts: int, head: Digest) -> bytes:
    """What the orchestrator signs when it has recorded a miner's chain up to `head`."""
    return b"strata/ack/1\n" + canonical([run_id, epoch, hotkey, num_receipts, head])


class KeptAck(Record, frozen=True):
    """An acknowledgement as a miner keeps it: the orchestrator's signature under `ack_bytes` of the other fields."""

    run_id: str
    epoch: Epoch
    hotkey: Hotkey
    num_receipts: int
    head: Digest
    signature: str


def verdict_bytes(verdict: Verdict) -> bytes:
    """What a validator signs for a verdict."""
    return b"strata/verdict/1\n" + canonical(msgspec.structs.replace(verdict, signature=""))


def flag_bytes(flag: LossFlag) -> bytes:
    """What a validator signs for a flag."""
    return b"strata/flag/1\n" + canonical(msgspec.structs.replace(flag, signature=""))
