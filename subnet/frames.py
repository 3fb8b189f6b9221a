"""Tensor frames: what one miner pushes to the next. A header and a raw little-endian buffer; no torch here.

Layout: magic, version (u16), header length (u32), header (JSON), zeros up to a multiple of 64, payload. The header names
the payload's digest, and the sender signs the header's digest, so the payload is hashed once.
"""

import math
import struct
from dataclasses import dataclass

import blake3
import msgspec
import numpy as np

from subnet.errors import ProtocolViolation
from subnet.types import Digest, Direction, FrameHeader, Lease, StageIndex

MAGIC = b"STRF"
VERSION = 1
ALIGNMENT = 64
HEADER_LIMIT_BYTES = 16 * 1024
_PREFIX = struct.Struct("<4sHI")
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def digest(data: bytes | memoryview) -> Digest:
    """Hex blake3."""
    return Digest(blake3.blake3(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and the payload it describes; `decode` has checked that they belong together."""

    header: FrameHeader
    payload: bytes

    @property
    def pass_id(self) -> str:
        """Names the pass."""
        return self.header.pass_id


def make(
    lease: Lease,
    *,
    stage: StageIndex,
    direction: Direction,
    shape: tuple[int, ...],
    payload: bytes,
    payload_digest: Digest | None = None,
) -> Frame:
    """Frame around a bfloat16 or float32 payload, hashed here when its digest is not known yet.

    The dtype follows from the size. Raises ValueError when neither fits.
    """
    count = math.prod(shape)
    dtype = next((name for name, size in ITEM_BYTES.items() if count * size == len(payload)), None)
    if dtype is None:
        raise ValueError(f"{len(payload)} bytes fit no dtype for shape {shape}")
    header = FrameHeader(
        lease=lease,
        stage=stage,
        direction=direction,
        dtype=dtype,
        shape=shape,
        payload_digest=payload_digest or digest(payload),
    )
    return Frame(header=header, payload=payload)


def encode_head(header: FrameHeader) -> bytes:
    """Everything before the payload; its digest is what the sender signs."""
    body = msgspec.json.encode(header)
    head = _PREFIX.pack(MAGIC, VERSION, len(body)) + body
    return head + bytes(-len(head) % ALIGNMENT)


def head_size(prefix: bytes) -> int:
    """Length of the head that starts with these first bytes (at least 10). Raises ProtocolViolation."""
    if len(prefix) < _PREFIX.size:
        raise ProtocolViolation(f"a frame begins with {_PREFIX.size} bytes, got {len(prefix)}")
    magic, version, length = _PREFIX.unpack_from(prefix)
    length = int(length)
    if magic != MAGIC or version != VERSION:
        raise ProtocolViolation(f"not a Strata frame of version {VERSION}")
    if not 0 < length <= HEADER_LIMIT_BYTES:
        raise ProtocolViolation(f"frame header of {length} bytes, allowed are 1 to {HEADER_LIMIT_BYTES}")
    size = _PREFIX.size + length
    return size + -size % ALIGNMENT


def decode_head(head: bytes) -> FrameHeader:
    """Header from exactly `head_size` bytes; dims and dtype are checked. Raises ProtocolViolation."""
    if head_size(head) != len(head):
        raise ProtocolViolation("frame head has the wrong length")
    length = _PREFIX.unpack_from(head)[2]
    if any(head[_PREFIX.size + length :]):
        raise ProtocolViolation("frame padding is not zero")
    try:
        header = msgspec.json.decode(head[_PREFIX.size : _PREFIX.size + length], type=FrameHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"frame header: {error}") from error
    if header.dtype not in ITEM_BYTES:
        raise ProtocolViolation(f"frame dtype {header.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
    if not header.shape or len(header.shape) > 8 or any(dim < 1 or dim > 1 << 31 for dim in header.shape):
        raise ProtocolViolation(f"frame shape {header.shape} is not a shape")
    return header


def payload_size(header: FrameHeader) -> int:
    """Bytes that must follow the head."""
    return math.prod(header.shape) * ITEM_BYTES[header.dtype]


def check_payload(header: FrameHeader, payload: bytes) -> Frame:
    """Frame, when the payload has the announced size and digest. Raises ProtocolViolation."""
    if len(payload) != payload_size(header):
        raise ProtocolViolation(f"frame payload of {len(payload)} bytes, header announces {payload_size(header)}")
    if digest(payload) != header.payload_digest:
        raise ProtocolViolation("frame payload does not match its digest")
    return Frame(header=header, payload=payload)


def check_finite(frame: Frame) -> None:
    """Refuse NaN and Inf before any arithmetic. Raises ProtocolViolation."""
    if frame.header.dtype == "bfloat16":
        exponents = np.frombuffer(frame.payload, dtype="<u2") & 0x7F80
        is_finite = not bool((exponents == 0x7F80).any())
    else:
        is_finite = bool(np.isfinite(np.frombuffer(frame.payload, dtype="<f4")).all())
    if not is_finite:
        raise ProtocolViolation("frame payload holds NaN or Inf")


def encode(frame: Frame) -> bytes:
    """Head and payload in one buffer."""
    return encode_head(frame.header) + frame.payload


def decode(data: bytes, *, limit_bytes: int) -> Frame:
    """Inverse of `encode` for at most `limit_bytes`. Raises ProtocolViolation."""
    if len(data) > limit_bytes:
        raise ProtocolViolation(f"frame of {len(data)} bytes, limit {limit_bytes}")
    size = head_size(data[: _PREFIX.size])
    return check_payload(decode_head(data[:size]), data[size:])
