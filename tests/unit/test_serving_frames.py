"""Frames between gateway and hosts: what is sealed comes back, and nothing else does."""

import pytest

from subnet.errors import ProtocolViolation
from subnet.inference.cache import CacheBook, CacheShape, padded
from subnet.inference.messages import (
    LENGTHS,
    AnyMessage,
    Drop,
    Piece,
    Ping,
    Seal,
    Step,
    check_payload,
    decode_frame,
    encode_frame,
    frame_lengths,
    prove,
)
from subnet.inference.sampling import Sampling
from subnet.types import Endpoint

KEY, NONCES = b"a key", bytes(64)
STEP = Step(
    session="s",
    step=3,
    pieces=(Piece(sequence=1, start=4, ids=(7, 8), capacity=20, sampling=Sampling(temperature=0.5)),),
    route=(Endpoint(host="h", port=5),),
    dtype="bfloat16",
)


def sealed(message: AnyMessage, payload: bytes = b"", seal: Seal | None = None) -> tuple[bytes, bytes, bytes]:
    first, body, mac = encode_frame(seal or Seal(KEY, "client", NONCES), message, payload)
    head_bytes, payload_bytes = frame_lengths(first[: LENGTHS.size])
    assert (head_bytes, payload_bytes) == (len(first) - LENGTHS.size, len(body))
    return first[LENGTHS.size :], body, mac


def test_a_frame_comes_back() -> None:
    assert decode_frame(Seal(KEY, "client", NONCES), *sealed(STEP, b"rows")) == STEP


def test_an_altered_repeated_reflected_or_foreign_frame_is_refused() -> None:
    head, payload, mac = sealed(STEP, b"rows")
    altered = [
        (head + b" ", payload, mac),
        (head, b"Rows", mac),
        (head, payload, bytes(16)),
        (head + b"r", b"ows", mac),
    ]
    for frame in altered:
        with pytest.raises(ProtocolViolation, match="right MAC"):
            decode_frame(Seal(KEY, "client", NONCES), *frame)
    receiver = Seal(KEY, "client", NONCES)
    decode_frame(receiver, head, payload, mac)
    with pytest.raises(ProtocolViolation, match="right MAC"):
        decode_frame(receiver, head, payload, mac)
    for other in (Seal(KEY, "server", NONCES), Seal(b"other", "client", NONCES), Seal(KEY, "client", b"\1" * 64)):
        with pytest.raises(ProtocolViolation, match="right MAC"):
            decode_frame(other, head, payload, mac)


def test_a_schema_is_strict() -> None:
    for head in (b"", b"\xc1", b"\x81\xa4type\xa4Ping", b"\x82\xa4type\xa4Pong\xa6number\x01"):
        with pytest.raises(ProtocolViolation):
            decode_frame(Seal(KEY, "client", NONCES), head, b"", Seal(KEY, "client", NONCES).mac(head, b""))


def test_lengths_are_bounded() -> None:
    for head, payload in ((0, 0), (5 << 20, 0), (10, 300 << 20)):
        with pytest.raises(ProtocolViolation, match="over the limit"):
            frame_lengths(LENGTHS.pack(head, payload))


def test_proofs_tell_sides_keys_and_nonces_apart() -> None:
    proofs = {
        prove(KEY, "client", NONCES),
        prove(KEY, "server", NONCES),
        prove(b"", "client", NONCES),
        prove(KEY, "client", bytes(63) + b"\1"),
    }
    assert len(proofs) == 4


def test_rows_that_do_not_fit_the_step_are_refused() -> None:
    check_payload(STEP, bytes(2 * 4 * 2), num_rows=2, width=4, dtype="bfloat16")
    for payload, dtype in ((bytes(15), "bfloat16"), (bytes(16), "float32"), (b"\x80\x7f" + bytes(14), "bfloat16")):
        with pytest.raises(ProtocolViolation, match="step"):
            check_payload(STEP, payload, num_rows=2, width=4, dtype=dtype)


def test_messages_of_each_kind_are_told_apart() -> None:
    for message in (Ping(number=2), Drop(sequences=(1, 2))):
        assert decode_frame(Seal(KEY, "client", NONCES), *sealed(message)) == message


def test_caches_are_counted_bounded_and_freed() -> None:
    import torch

    shape = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    book = CacheBook(shape, limit_tokens=3 * padded(1))
    first = book.open(("s", 1), start=0, stop=5, capacity=10)
    assert first is not None and first.size_bytes == padded(10) * shape.bytes_per_token == book.size_bytes
    assert book.open(("s", 1), start=5, stop=6, capacity=10) is first
    assert book.open(("s", 1), start=6, stop=padded(10) + 1, capacity=10) is None, "beyond what was asked for"
    assert book.open(("s", 2), start=3, stop=4, capacity=10) is None, "its beginning is not here"
    assert book.open(("t", 1), start=0, stop=5, capacity=2 * padded(1)) is not None, "another gateway's"
    assert book.open(("s", 3), start=0, stop=1, capacity=1) is None, "no room"
    book.drop(("s", 3))
    book.drop(("s", 1))
    assert book.open(("s", 1), start=0, stop=5, capacity=10) is None, "dropped is dropped"
    assert book.drop_session("t") == 1
    assert (book.size_bytes, book.num_tokens) == (0, 0)
    assert book.open(("s", 4), start=0, stop=1, capacity=1) is not None
