import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import frames
from subnet.errors import ProtocolViolation
from subnet.merging.upload import (
    MAX_ABS,
    check_chunks,
    check_commitment,
    chunk_digests,
    to_buffer,
    to_bytes,
    to_vector,
    upload_digest,
)

CHUNK_BYTES = 64
NUM_ELEMENTS = 100
DATA = to_bytes(np.arange(NUM_ELEMENTS, dtype=np.float32))
DIGESTS = chunk_digests(DATA, CHUNK_BYTES)


def check(data: bytes, start: int) -> None:
    check_chunks(data, start, num_elements=NUM_ELEMENTS, chunk_digests=DIGESTS, chunk_bytes=CHUNK_BYTES)


def test_bytes_and_vector_are_inverse_and_little_endian() -> None:
    vector = to_vector(DATA, NUM_ELEMENTS)
    assert vector.dtype == np.float32
    assert to_bytes(vector) == to_buffer(vector) == DATA
    assert DATA[4:8] == b"\x00\x00\x80\x3f"


def test_each_chunk_has_its_own_digest() -> None:
    assert tuple(frames.digest(DATA[at : at + CHUNK_BYTES]) for at in range(0, len(DATA), CHUNK_BYTES)) == DIGESTS
    assert len(DIGESTS) == 7
    assert upload_digest(DATA) == frames.digest(DATA)
    check_commitment(len(DATA), DIGESTS, num_elements=NUM_ELEMENTS, chunk_bytes=CHUNK_BYTES)


@given(first=st.integers(0, 7), last=st.integers(0, 7))
def test_every_slice_on_chunk_edges_passes(first: int, last: int) -> None:
    start, stop = sorted((min(first * 16, NUM_ELEMENTS), min(last * 16, NUM_ELEMENTS)))
    if start < NUM_ELEMENTS:
        check(DATA[start * 4 : stop * 4], start)


@given(at=st.integers(64, 191), bit=st.integers(0, 7))
def test_one_flipped_bit_names_the_chunk(at: int, bit: int) -> None:
    changed = bytearray(DATA)
    changed[at] ^= 1 << bit
    with pytest.raises(ProtocolViolation, match=f"chunk {at // CHUNK_BYTES} "):
        check(bytes(changed[64:192]), 16)


def test_a_slice_from_elsewhere_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="chunk 1 "):
        check(DATA[128:192], 16)


def test_a_slice_beyond_the_committed_chunks_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="chunk 1 "):
        check_chunks(DATA[:128], 0, num_elements=NUM_ELEMENTS, chunk_digests=DIGESTS[:1], chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize(("start", "size"), [(1, 64), (-16, 64), (0, 60)])
def test_a_slice_off_the_edges_is_the_callers_mistake(start: int, size: int) -> None:
    with pytest.raises(ValueError, match="edges"):
        check(DATA[:size], start)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2 * MAX_ABS, -2 * MAX_ABS, 3e38])
def test_values_that_could_poison_a_merge_are_refused(bad: float) -> None:
    data = to_bytes(np.array([1.0, bad, 2.0], dtype=np.float32))
    with pytest.raises(ProtocolViolation, match="finite"):
        to_vector(data, 3)


def test_subnormal_values_are_values() -> None:
    smallest = np.array([1e-45, -1e-45], dtype=np.float32)
    assert to_vector(to_bytes(smallest), 2).tobytes() == smallest.tobytes()


@pytest.mark.parametrize("size", [0, 399, 401, 404])
def test_a_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolViolation, match="100 float32"):
        to_vector((DATA * 2)[:size], NUM_ELEMENTS)


@pytest.mark.parametrize(("size", "count", "words"), [(396, 7, "100 float32"), (400, 6, "7"), (400, 8, "7")])
def test_a_commitment_that_cannot_be_true_is_refused(size: int, count: int, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        check_commitment(size, (DIGESTS * 2)[:count], num_elements=NUM_ELEMENTS, chunk_bytes=CHUNK_BYTES)
