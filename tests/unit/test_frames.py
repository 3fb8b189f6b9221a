import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import frames
from subnet.errors import ProtocolViolation
from subnet.types import Direction, Epoch, Hotkey, Lease, SampleId, StageIndex

LEASE = Lease(
    run_id="run",
    epoch=Epoch(3),
    sample=SampleId(17),
    branch=0,
    attempt=1,
    hops=(Hotkey("5A"), Hotkey("5B")),
    deadline_s=12.5,
    signature="ab",
)
LIMIT_BYTES = 1 << 16


def frame(payload: bytes = bytes(range(48)), shape: tuple[int, ...] = (2, 3, 4)) -> frames.Frame:
    return frames.make(LEASE, stage=StageIndex(1), direction=Direction.FORWARD, shape=shape, payload=payload)


ENCODED = frames.encode(frame())


def decode(data: bytes) -> frames.Frame:
    return frames.decode(data, limit_bytes=LIMIT_BYTES)


def with_header(**changes: object) -> bytes:
    """A well-formed frame whose header says something else."""
    header = {**msgspec.json.decode(msgspec.json.encode(frame().header)), **changes}
    return raw_frame(msgspec.json.encode(header))


def raw_frame(header: bytes, magic: bytes = frames.MAGIC, version: int = frames.VERSION) -> bytes:
    head = struct.pack("<4sHI", magic, version, len(header)) + header
    return head + bytes(-len(head) % frames.ALIGNMENT) + frame().payload


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    item=st.sampled_from(sorted(frames.ITEM_BYTES.values())),
    data=st.data(),
)
def test_a_frame_round_trips(shape: tuple[int, ...], item: int, data: st.DataObject) -> None:
    size = item
    for dim in shape:
        size *= dim
    sent = frame(data.draw(st.binary(min_size=size, max_size=size)), shape)
    encoded = frames.encode(sent)
    assert decode(encoded) == sent
    assert frames.payload_size(sent.header) == size
    assert (len(encoded) - size) % frames.ALIGNMENT == 0


def test_the_dtype_follows_from_the_size() -> None:
    assert frame(bytes(48)).header.dtype == "bfloat16"
    assert frame(bytes(96)).header.dtype == "float32"
    with pytest.raises(ValueError, match="fit no dtype"):
        frame(bytes(47))


def test_a_frame_names_its_pass() -> None:
    sent = frame()
    assert sent.pass_id == "3-17-0-1-1-forward"
    assert (sent.header.epoch, sent.header.sample) == (3, 17)


def test_the_head_can_be_read_before_the_payload_arrives() -> None:
    size = frames.head_size(ENCODED[:10])
    header = frames.decode_head(ENCODED[:size])
    assert frames.check_payload(header, ENCODED[size:]) == frame()
    assert frames.encode_head(header) == ENCODED[:size]


@given(data=st.binary(max_size=300))
def test_random_bytes_only_raise_a_violation(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data)


@given(body=st.binary(max_size=300))
def test_random_headers_only_raise_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(raw_frame(body))


@given(
    at=st.integers(0, len(ENCODED) - 1),
    removed=st.integers(0, 4),
    put=st.binary(max_size=4),
    more=st.binary(max_size=2),
)
def test_a_mutated_frame_is_refused_or_differs_in_its_lease_only(
    at: int, removed: int, put: bytes, more: bytes
) -> None:
    """The payload is tied to the head by its digest, and the head to its sender by the request's signature."""
    changed = ENCODED[:at] + put + ENCODED[at + removed :] + more
    if changed == ENCODED:
        return
    try:
        taken = decode(changed)
    except ProtocolViolation:
        return
    assert taken.payload == frame().payload
    assert frames.digest(frames.encode_head(taken.header)) != frames.digest(frames.encode_head(frame().header))


@pytest.mark.parametrize("size", range(0, len(ENCODED), 7))
def test_a_truncated_frame_is_refused(size: int) -> None:
    with pytest.raises(ProtocolViolation):
        decode(ENCODED[:size])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "dtype 'float64' is not one of bfloat16, float32"),
        ({"dtype": "float32"}, "payload of 48 bytes, header announces 96"),
        ({"shape": []}, "is not a shape"),
        ({"shape": [2, 0, 12]}, "is not a shape"),
        ({"shape": [-2, 3, -4]}, "is not a shape"),
        ({"shape": [1] * 9}, "is not a shape"),
        ({"shape": [1 << 31, 1 << 31, 1 << 31, 4]}, "header announces"),
        ({"shape": [1 << 32]}, "is not a shape"),
        ({"shape": [2.5, 3, 4]}, "shape"),
        ({"shape": "234"}, "shape"),
        ({"payload_digest": "00" * 32}, "does not match its digest"),
        ({"direction": "sideways"}, "direction"),
        ({"stage": "1"}, "stage"),
        ({"lease": None}, "lease"),
        ({"more": 1}, "more"),
    ],
)
def test_a_header_that_lies_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        decode(with_header(**changes))


@pytest.mark.parametrize(
    "data",
    [
        raw_frame(b"{}", magic=b"STRX"),
        raw_frame(b"{}", version=2),
        raw_frame(b""),
        raw_frame(b" " * (frames.HEADER_LIMIT_BYTES + 1)),
        raw_frame(b"[" * 10_000),
        raw_frame(b'{"dtype": "\xff\xfe"}'),
    ],
)
def test_heads_that_are_no_heads_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data)


def test_padding_carries_nothing() -> None:
    size = frames.head_size(ENCODED)
    assert ENCODED[size - 1] == 0
    with pytest.raises(ProtocolViolation, match="padding"):
        decode(ENCODED[: size - 1] + b"\x01" + ENCODED[size:])


def test_a_head_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="wrong length"):
        frames.decode_head(ENCODED[: frames.head_size(ENCODED) + 1])


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolViolation, match=f"{len(ENCODED)} bytes, limit {len(ENCODED) - 1}"):
        frames.decode(ENCODED, limit_bytes=len(ENCODED) - 1)
    assert frames.decode(ENCODED, limit_bytes=len(ENCODED)) == frame()
