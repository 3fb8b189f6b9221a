"""What a challenged miner presents: the receipts of one segment and the payloads they name (trust.md 1.3)."""

import msgspec

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.model.partition import is_first, is_last
from subnet.types import Digest, Direction, Receipt, Record


class Evidence(Record, frozen=True):
    """Receipts in order, and every payload that cannot be had from the corpus or from a receipt itself."""

    receipts: tuple[Receipt, ...]
    payloads: dict[Digest, bytes]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Evidence)


def payloads_named(config: RunConfig, receipt: Receipt) -> tuple[Digest, ...]:
    """Digests of the payloads that `receipt` needs beside it.

    Stage 0's ids come from the corpus and the last stage's loss from the receipt; neither sends a payload there.
    """
    has_input = has_output = False
    if receipt.direction is Direction.FORWARD:
        has_input, has_output = not is_first(config, receipt.stage), not is_last(config, receipt.stage)
    elif receipt.direction is Direction.BACKWARD:
        has_input, has_output = not is_last(config, receipt.stage), not is_first(config, receipt.stage)
    return (receipt.input_digest,) * has_input + (receipt.output_digest,) * has_output


def encode_evidence(evidence: Evidence) -> bytes:
    """Canonical msgpack."""
    return _encoder.encode(evidence)


def decode_evidence(data: bytes, *, limit_bytes: int) -> Evidence:
    """Strict inverse; a receipt names every payload (the replay checks their digests). Raises ProtocolViolation."""
    if len(data) > limit_bytes:
        raise ProtocolViolation(f"evidence of {len(data)} bytes, limit {limit_bytes}")
    try:
        evidence = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"evidence does not decode: {error}") from error
    named = {receipt.input_digest for receipt in evidence.receipts}
    named |= {receipt.output_digest for receipt in evidence.receipts}
    odd = sorted(evidence.payloads.keys() - named)
    if odd:
        raise ProtocolViolation(f"evidence holds a payload {odd[0][:16]} that no receipt names")
    return evidence
