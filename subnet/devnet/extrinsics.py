"""Signed extrinsics: bytes to fields, and the checks a pool makes before it takes one.

Layout (version 4): length, 0x84, address, signature, era, nonce, tip, metadata-hash mode, call.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import bittensor_core

from subnet.devnet.codec import SS58_FORMAT, Call, Codec
from subnet.devnet.scale import Reader
from subnet.errors import ProtocolViolation

_SIGNED_V4 = 0x84
_ADDRESS_ID = 0
_MAX_BYTES = 1 << 20
_SIGNATURE_SCHEMES = (0, 1)
"""ed25519 and sr25519; both have signatures of 64 bytes."""


class PoolError(Exception):
    """The pool refuses an extrinsic; `code`, `message` and `data` are those of the JSON-RPC error."""

    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(f"{code} {message}: {data}")
        self.code = code
        self.message = message
        self.data = data


def invalid(reason: str) -> PoolError:
    """Error 1010, by which substrate says that a transaction cannot be valid now."""
    return PoolError(1010, "Invalid Transaction", reason)


@dataclass(frozen=True, slots=True)
class Era:
    """The blocks during which an extrinsic is valid; `period` 0 is for ever."""

    period: int
    phase: int

    def birth(self, current: int) -> int:
        """The block at which the era that holds `current` began."""
        if not self.period:
            return 0
        return (max(current, self.phase) - self.phase) // self.period * self.period + self.phase


@dataclass(frozen=True, slots=True)
class Extrinsic:
    """One signed extrinsic and its decoded call."""

    raw: bytes
    digest: str
    signer: str
    scheme: int
    signature: bytes
    era: Era
    nonce: int
    tip: int
    call_bytes: bytes
    call: Call


def parse(codec: Codec, raw: bytes) -> Extrinsic:
    """Fields of extrinsic bytes. Raises PoolError when they are none that this runtime takes."""
    if len(raw) > _MAX_BYTES:
        raise invalid("Transaction would exhaust the block limits")
    try:
        return _parse(codec, raw)
    except ProtocolViolation as error:
        raise PoolError(1002, "Verification Error: Runtime error: Execution failed", str(error)) from error


def _parse(codec: Codec, raw: bytes) -> Extrinsic:
    outer = Reader(raw)
    reader = Reader(outer.vector())
    outer_rest = outer.rest()
    if outer_rest or reader.integer(1) != _SIGNED_V4 or reader.integer(1) != _ADDRESS_ID:
        raise ProtocolViolation("not a signed extrinsic of version 4 from an account id")
    signer = bittensor_core.ss58_encode(reader.take(32), SS58_FORMAT)
    scheme = reader.integer(1)
    if scheme not in _SIGNATURE_SCHEMES:
        raise ProtocolViolation(f"signature scheme {scheme} is neither ed25519 nor sr25519")
    signature = reader.take(64)
    era = _era(reader)
    nonce, tip = reader.compact(), reader.compact()
    if reader.integer(1) != 0:
        raise ProtocolViolation("extrinsics that carry a metadata hash are not taken here")
    call_bytes = reader.rest()
    digest = "0x" + hashlib.blake2b(raw, digest_size=32).hexdigest()
    call = codec.call(call_bytes)
    return Extrinsic(raw, digest, signer, scheme, signature, era, nonce, tip, call_bytes, call)


def _era(reader: Reader) -> Era:
    first = reader.integer(1)
    if first == 0:
        return Era(0, 0)
    encoded = first | reader.integer(1) << 8
    period = 2 << (encoded % 16)
    return Era(period, (encoded >> 4) * max(1, period >> 12))


def check_signature(codec: Codec, extrinsic: Extrinsic, *, block: int, block_hash: Callable[[int], str | None]) -> None:
    """Raise PoolError unless the signer signed this call for this chain and era."""
    birth = extrinsic.era.birth(block)
    birth_hash = block_hash(birth)
    genesis_hash = block_hash(0)
    if birth_hash is None or genesis_hash is None:
        raise invalid("Transaction has an ancient birth block")
    era = {"period": extrinsic.era.period, "current": birth} if extrinsic.era.period else "00"
    payload = codec.runtime.signature_payload(
        extrinsic.call_bytes,
        era=era,
        nonce=extrinsic.nonce,
        tip=extrinsic.tip,
        tip_asset_id=None,
        genesis_hash=bytes.fromhex(genesis_hash[2:]),
        era_block_hash=bytes.fromhex(birth_hash[2:]),
        metadata_hash=None,
    )
    if not bittensor_core.verify(bytes(payload), extrinsic.signature, extrinsic.signer, extrinsic.scheme):
        raise invalid("Transaction has a bad signature")
