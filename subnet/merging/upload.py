"""A pseudo-gradient as bytes: what is committed before pairs are drawn, and how a downloaded part is checked (trust.md 5)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnet.errors import ProtocolViolation
from subnet.frames import digest
from subnet.merging.schedule import ITEM_BYTES, num_chunks
from subnet.types import Digest

MAX_ABS = 1e4
"""Largest value of a pseudo-gradient that is taken: parameters live far below it, and squares of it cannot overflow."""

_WIRE_FLOAT = np.dtype("<f4")


def to_bytes(vector: npt.NDArray[np.float32]) -> bytes:
    """Little-endian bytes of a flat float32 vector: what is uploaded."""
    return vector.astype(_WIRE_FLOAT, copy=False).tobytes()


def to_buffer(vector: npt.NDArray[np.float32]) -> memoryview:
    """The same bytes where they are: a copy of a large vector keeps every other thread of the process waiting."""
    return np.ascontiguousarray(vector, dtype=_WIRE_FLOAT).data.cast("B")


def upload_digest(data: bytes) -> Digest:
    """Digest of a whole upload, under which the blob store keeps it."""
    return digest(data)


def chunk_digests(data: bytes, chunk_bytes: int) -> tuple[Digest, ...]:
    """Digest of each chunk of an upload, in order; the last chunk may be shorter."""
    view = memoryview(data)
    return tuple(digest(view[at : at + chunk_bytes]) for at in range(0, len(view), chunk_bytes))


def check_commitment(size_bytes: int, digests: Sequence[Digest], *, num_elements: int, chunk_bytes: int) -> None:
    """Whether a commitment can describe an upload of this stage at all. Raises ProtocolViolation."""
    if size_bytes != num_elements * ITEM_BYTES:
        raise ProtocolViolation(f"upload of {size_bytes} bytes, the stage has {num_elements} float32 values")
    if len(digests) != num_chunks(num_elements, chunk_bytes):
        expected = num_chunks(num_elements, chunk_bytes)
        raise ProtocolViolation(
            f"{len(digests)} chunk digests committed, an upload of {size_bytes} bytes has {expected}"
        )


def check_chunks(
    data: bytes | memoryview, start: int, *, num_elements: int, chunk_digests: Sequence[Digest], chunk_bytes: int
) -> None:
    """Check elements [start, start + len(data) / 4) of an upload against the digests committed for all of its chunks.

    A slice begins on a chunk edge and ends on one, or at the end of the vector; an empty one is right. Raises
    ProtocolViolation naming the chunk that differs, ValueError when the caller asked for no such slice.
    """
    first, offset = divmod(start * ITEM_BYTES, chunk_bytes)
    stop = start * ITEM_BYTES + len(data)
    if start < 0 or offset or (stop % chunk_bytes and stop != num_elements * ITEM_BYTES):
        raise ValueError(f"bytes {start * ITEM_BYTES} to {stop} do not lie on edges of {chunk_bytes} byte chunks")
    view = memoryview(data)
    for number, at in enumerate(range(0, len(view), chunk_bytes), start=first):
        if number >= len(chunk_digests) or digest(view[at : at + chunk_bytes]) != chunk_digests[number]:
            raise ProtocolViolation(f"chunk {number} of an upload is not the one committed")


def to_vector(data: bytes | memoryview, num_elements: int) -> npt.NDArray[np.float32]:
    """Values of an upload or of a slice of one: exact size, finite, at most `MAX_ABS`. Raises ProtocolViolation."""
    if len(data) != num_elements * ITEM_BYTES:
        raise ProtocolViolation(f"{len(data)} bytes where {num_elements} float32 values are expected")
    vector = np.frombuffer(data, dtype=_WIRE_FLOAT).astype(np.float32, copy=False)
    # the least and the largest of values with NaN among them are NaN, and a comparison with it is false
    if not (np.min(vector, initial=0.0) >= -MAX_ABS and np.max(vector, initial=0.0) <= MAX_ABS):
        raise ProtocolViolation(f"a pseudo-gradient holds values that are not finite or exceed {MAX_ABS:g}")
    return vector
