"""Sealed segments of the record as objects: JSON lines, every head recomputed on the way in."""

from collections.abc import Iterable, Iterator

import msgspec

from subnet.errors import InvariantBroken
from subnet.orchestration.ledger import Entry, Segment, entry_head
from subnet.receipts import canonical
from subnet.types import Digest


def segment_key(run_id: str, index: int) -> str:
    """Where a sealed segment of the ledger lies."""
    return f"runs/{run_id}/ledger/{index:06d}"


class _Opening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a segment object."""

    segment: int
    previous_head: Digest
    num_entries: int


_opening_decoder = msgspec.json.Decoder(_Opening)
_entry_decoder = msgspec.json.Decoder(Entry)


def encode_segment(segment: Segment) -> bytes:
    """JSON lines: an opening, then one line for each entry."""
    opening = _Opening(segment=segment.index, previous_head=segment.previous_head, num_entries=len(segment.entries))
    return b"\n".join([canonical(opening), *(canonical(entry) for entry in segment.entries)]) + b"\n"


def decode_segment(data: bytes, *, index: int, previous_head: Digest, first_seq: int) -> Segment:
    """Segment `index`, every head recomputed. Raises InvariantBroken naming the first entry that does not hold."""
    lines = data.split(b"\n")
    if len(lines) < 2 or lines[-1] != b"":
        raise InvariantBroken(f"segment {index}: cut off in the middle of a line")
    try:
        opening = _opening_decoder.decode(lines[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvariantBroken(f"segment {index}: opening line does not decode: {error}") from error
    expected = _Opening(segment=index, previous_head=previous_head, num_entries=len(lines) - 2)
    if opening != expected:
        raise InvariantBroken(f"segment {index}: opening line is {opening}, expected {expected}")
    entries = tuple(_checked(lines[1:-1], index=index, head=previous_head, seq=first_seq))
    return Segment(
        index=index, previous_head=previous_head, entries=entries, head=entries[-1].head if entries else previous_head
    )


def _checked(lines: Iterable[bytes], *, index: int, head: Digest, seq: int) -> Iterator[Entry]:
    for line in lines:
        try:
            entry = _entry_decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvariantBroken(f"segment {index}, event {seq}: does not decode: {error}") from error
        kind = type(entry.fact).__name__
        if entry.seq != seq or canonical(entry) != line:
            raise InvariantBroken(f"segment {index}, event {seq} ({kind}): not spelled as it was recorded")
        head = entry_head(head, seq=seq, at_s=entry.at_s, fact=entry.fact)
        if head != entry.head:
            raise InvariantBroken(f"segment {index}, event {seq} ({kind}): altered, its head does not follow")
        yield entry
        seq += 1
