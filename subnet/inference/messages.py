"""What gateways and stage hosts say to each other over TCP, and how it is framed; pure bytes.

A frame: length of the head and of the payload (u32 each, little-endian), the head (MessagePack), the payload (rows as they
cross a cut, raw little-endian), and a MAC of 16 bytes: keyed blake3 over a counter, head and payload. A connection begins
with both sides proving that they know the shared key; from its nonces each direction gets a key of its own, so that a frame
can be neither altered, repeated nor reflected. Nothing is encrypted: the text of requests crosses in the clear.
"""

import struct
from typing import Annotated, Literal

import blake3
import msgspec
import numpy as np
from msgspec import Meta

from subnet.errors import ProtocolViolation
from subnet.inference.sampling import Choice, Sampling
from subnet.types import Endpoint

VERSION = 2
MAGIC = b"STRS"
GREETING = struct.Struct("<4sH32s")
LENGTHS = struct.Struct("<II")
MAC_BYTES = 16
HEAD_LIMIT_BYTES = 4 << 20
PAYLOAD_LIMIT_BYTES = 256 << 20
_CONTEXT = "strata serving link 1"
AUTOREGRESSIVE = "autoregressive"
"""How a stage computes: one token after the other, with caches."""
DENOISING = "denoising"
"""How a stage computes: noisy embeddings of coming tokens, one or many at a time."""
POOLED = "pooled"
"""How a stage computes: a small model over the tokens, with caches; its logits are added to those before it."""

Natural = Annotated[int, Meta(ge=0, le=(1 << 48))]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    """Base; the class name is the tag."""


class Hello(Message, frozen=True):
    """First on a connection. A gateway's `session` names its sequences; they are freed when its connection ends."""

    role: Literal["gateway", "host"]
    session: Annotated[str, Meta(max_length=64)]


class Welcome(Message, frozen=True):
    """What a host is; its answer to Hello."""

    stage: Natural
    num_stages: Natural
    model: str
    """Digest of the configuration and of the names and shapes of the tensors."""
    mode: str
    """How the stage computes: AUTOREGRESSIVE, DENOISING or POOLED."""
    limit_tokens: Natural
    """Positions that all caches together may hold."""
    max_positions: Natural
    is_independent: bool
    """Whether a row's bits were found not to depend on its company."""


class Piece(Message, frozen=True):
    """Consecutive tokens of one sequence, to go through the layers."""

    sequence: Natural
    start: Natural
    ids: tuple[Natural, ...]
    capacity: Natural
    """Positions the sequence will need in all."""
    num_targets: Natural = 0
    """Tokens wanted after these; more than one only of stages that denoise."""
    noise_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Names the noise that stages that denoise start from."""
    sampling: Sampling | None = None
    """Set when tokens are wanted after these."""


class Step(Message, frozen=True):
    """One micro-batch on its way through the stages. `route` names the hosts after the receiver, in order.

    A gateway sends it to the pooled stages after the first too, without rows, ahead of the sum from the stage before.
    """

    session: str
    step: Natural
    pieces: tuple[Piece, ...]
    route: tuple[Endpoint, ...] = ()
    lost: tuple[Natural, ...] = ()
    """Sequences that were left out on the way, because a host did not have their caches."""
    dtype: Literal["none", "float32", "bfloat16"] = "none"
    """Of the payload: rows of all pieces in order; none at the first stage."""


class Result(Message, frozen=True):
    """What the last host made of a step; `lost` are sequences that a host on the way did not have."""

    step: Natural
    choices: tuple[tuple[Natural, Choice], ...]
    lost: tuple[Natural, ...] = ()


class Failed(Message, frozen=True):
    """A step that ends here. `at` is the host to blame, when it is another than the one that says so."""

    step: Natural
    reason: str
    at: Endpoint | None = None


class Drop(Message, frozen=True):
    """Free these sequences, and refuse what may still be under way of them."""

    sequences: tuple[Natural, ...]


class Ping(Message, frozen=True):
    """Are you there?"""

    number: Natural


class Pong(Message, frozen=True):
    """Yes; and what the host holds and has moved. Bytes are those of payloads, counted where they are sent."""

    number: Natural
    num_sequences: Natural
    cache_bytes: Natural
    num_steps: Natural
    num_rows: Natural
    payload_bytes_sent: Natural
    frame_bytes_sent: Natural


AnyMessage = Hello | Welcome | Step | Result | Failed | Drop | Ping | Pong

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def prove(shared_key: bytes, side: Literal["client", "server"], nonces: bytes) -> bytes:
    """Shows that `side` knows the key, for these nonces of client and server."""
    key = blake3.blake3(shared_key, derive_key_context=_CONTEXT).digest()
    return blake3.blake3(side.encode() + nonces, key=key).digest()


class Seal:
    """One direction of one connection: counts frames, so that each MAC is good for one place only."""

    def __init__(self, shared_key: bytes, side: Literal["client", "server"], nonces: bytes) -> None:
        self._key = prove(shared_key, side, b"frames" + nonces)
        self._count = 0

    def mac(self, head: bytes, payload: bytes | memoryview) -> bytes:
        """For the next frame."""
        hasher = blake3.blake3(struct.pack("<QI", self._count, len(head)), key=self._key)
        hasher.update(head)
        hasher.update(payload)
        self._count += 1
        return bytes(hasher.digest(length=MAC_BYTES))


def encode_frame(seal: Seal, message: AnyMessage, payload: bytes = b"") -> list[bytes]:
    """Buffers to write, in order."""
    head = _ENCODER.encode(message)
    return [LENGTHS.pack(len(head), len(payload)) + head, payload, seal.mac(head, payload)]


def frame_lengths(prefix: bytes) -> tuple[int, int]:
    """Bytes of head and payload. Raises ProtocolViolation."""
    head, payload = LENGTHS.unpack(prefix)
    if not 0 < head <= HEAD_LIMIT_BYTES or payload > PAYLOAD_LIMIT_BYTES:
        raise ProtocolViolation(f"serving frame of {head} and {payload} bytes is over the limit")
    return head, payload


def decode_frame(seal: Seal, head: bytes, payload: bytes, mac: bytes) -> AnyMessage:
    """MAC, then schema. Raises ProtocolViolation."""
    if seal.mac(head, payload) != mac:
        raise ProtocolViolation("serving frame does not carry the right MAC")
    try:
        message: AnyMessage = _DECODER.decode(head)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"serving frame: {error}") from error
    return message


def check_payload(step: Step, payload: bytes, *, num_rows: int, width: int, dtype: str) -> None:
    """Raise ProtocolViolation unless the payload is `num_rows` finite rows of `width`."""
    size = {"none": 0, "float32": 4, "bfloat16": 2}[step.dtype]
    if step.dtype != dtype or len(payload) != num_rows * width * size:
        raise ProtocolViolation(
            f"step of {num_rows} rows came with {len(payload)} bytes of {step.dtype}, this stage takes {width} of {dtype}"
        )
    if step.dtype == "bfloat16":
        is_finite = not bool(((np.frombuffer(payload, dtype="<u2") & 0x7F80) == 0x7F80).any())
    else:
        is_finite = bool(np.isfinite(np.frombuffer(payload, dtype="<f4")).all())
    if not is_finite:
        raise ProtocolViolation("step came with NaN or infinity")
