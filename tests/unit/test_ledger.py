"""The public record: whatever is altered in it is found, at the event where it was altered."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.errors import InvariantBroken
from subnet.frames import digest
from subnet.orchestration.ledger import (
    GENESIS_HEAD,
    AnyFact,
    Credited,
    Enlisted,
    Ledger,
    LossRecorded,
    SampleDropped,
    Segment,
)
from subnet.orchestration.segments import decode_segment, encode_segment
from subnet.types import Digest, Epoch, Hotkey, SampleId, StageIndex

FACTS: tuple[AnyFact, ...] = (
    Enlisted(validator=Hotkey("v1")),
    Credited(epoch=Epoch(0), sample=SampleId(3), stage=StageIndex(1), hotkey=Hotkey("m1")),
    LossRecorded(epoch=Epoch(0), sample=SampleId(3), loss=1.25),
    SampleDropped(epoch=Epoch(0), sample=SampleId(4), reason='é \\ " unusual'),
)


def sealed(num_segments: int = 1) -> tuple[Ledger, list[Segment]]:
    ledger, segments = Ledger(), []
    for number in range(num_segments):
        for place, fact in enumerate(FACTS):
            ledger.append(fact, at_s=100.5 * number + place)
        segments.append(ledger.seal())
    return ledger, segments


def read(data: bytes, index: int = 0, head: Digest = GENESIS_HEAD, first_seq: int = 0) -> Segment:
    return decode_segment(data, index=index, previous_head=head, first_seq=first_seq)


def test_segments_read_back_one_after_the_other() -> None:
    ledger, segments = sealed(3)
    head, seq = GENESIS_HEAD, 0
    for index, segment in enumerate(segments):
        assert read(encode_segment(segment), index, head, seq) == segment
        head, seq = segment.head, seq + len(segment.entries)
    assert head == ledger.head == ledger.sealed_head
    assert (ledger.num_segments, ledger.num_entries) == (3, 3 * len(FACTS))


def test_an_empty_segment_reads_back() -> None:
    ledger, (segment,) = sealed()
    empty = ledger.seal()
    assert read(encode_segment(empty), 1, segment.head, len(FACTS)) == empty
    assert empty.head == segment.head and not empty.entries
    assert Ledger().seal().entries == ()


@given(st.data())
def test_any_altered_byte_is_found_at_its_event(data: st.DataObject) -> None:
    _, (segment,) = sealed()
    whole = encode_segment(segment)
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    altered = whole[:at] + bytes([byte]) + whole[at + 1 :]
    with pytest.raises(InvariantBroken) as found:
        read(altered)
    line = whole[:at].count(b"\n")
    is_break = 10 in (whole[at], byte)
    if line > 0 and not is_break:
        (named,) = re.findall(r"event (\d+)", str(found.value))
        assert int(named) == line - 1, str(found.value)


@given(st.data())
def test_bytes_left_out_or_put_in_are_found(data: st.DataObject) -> None:
    _, (segment,) = sealed()
    whole = encode_segment(segment)
    at = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(
        st.one_of(
            st.just(whole[:at] + whole[at + 1 :]),
            st.binary(min_size=1, max_size=3).map(lambda extra: whole[:at] + extra + whole[at:]),
            st.just(whole[:at]),
        ).filter(lambda candidate: candidate != whole)
    )
    with pytest.raises(InvariantBroken):
        read(other)


@pytest.mark.parametrize("where", ["index", "head", "seq"])
def test_a_segment_stands_in_its_own_place_only(where: str) -> None:
    _, (segment,) = sealed()
    place = {
        "index": {"index": 1},
        "head": {"head": digest(b"other")},
        "seq": {"first_seq": 1},
    }[where]
    with pytest.raises(InvariantBroken):
        read(encode_segment(segment), **place)  # type: ignore[arg-type]


def test_swapped_and_left_out_events_are_found() -> None:
    _, (segment,) = sealed()
    lines = encode_segment(segment).split(b"\n")
    for order in ([0, 2, 1, 3, 4, 5], [0, 1, 2, 4, 5], [0, 1, 1, 2, 3, 4, 5]):
        with pytest.raises(InvariantBroken):
            read(b"\n".join(lines[at] for at in order))


def test_a_rewritten_tail_needs_another_head() -> None:
    """Whoever rewrites an event and every head after it ends at another head than the one on chain."""
    _, (segment,) = sealed()
    forged = Ledger()
    changed = LossRecorded(epoch=Epoch(0), sample=SampleId(3), loss=1.0)
    facts: tuple[AnyFact, ...] = (*FACTS[:2], changed, FACTS[3])
    for place, fact in enumerate(facts):
        forged.append(fact, at_s=float(place))
    other = forged.seal()
    assert read(encode_segment(other)) == other
    assert other.head != segment.head


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b"\xff\n", b"{}", b"[]\n[]\n"])
def test_what_is_no_segment_is_refused(data: bytes) -> None:
    with pytest.raises(InvariantBroken):
        read(data)
