"""A record of bytes as fields of the commitments pallet, and back.

The SDK shows bytes that happen to be text as text, and drops such fields from its own reading; a leading
byte that no text has (0xFF) keeps long fields in hex.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from subnet.errors import Refused

_RAW_BYTES = 128
_BIG_BYTES = 511
_MAX_FIELDS = 3
_NOT_TEXT = b"\xff"
MAX_RECORD_BYTES = _BIG_BYTES * _MAX_FIELDS
"""Largest record that fits into one commitment."""


def to_fields(data: bytes) -> list[Any]:
    """Fields that hold `data`. Raises Refused when it is empty or does not fit."""
    if not 0 < len(data) <= MAX_RECORD_BYTES:
        reason = f"a commitment holds 1 to {MAX_RECORD_BYTES} bytes, this record has {len(data)}"
        raise Refused("commitment_size", reason)
    if len(data) <= _RAW_BYTES * _MAX_FIELDS:
        parts = [data[start : start + _RAW_BYTES] for start in range(0, len(data), _RAW_BYTES)]
        return [{f"Raw{len(part)}": "0x" + part.hex()} for part in parts]
    parts = [data[start : start + _BIG_BYTES] for start in range(0, len(data), _BIG_BYTES)]
    return [{"BigRaw": "0x" + (_NOT_TEXT + part).hex()} for part in parts]


def from_fields(fields: Sequence[Any]) -> bytes:
    """The bytes that fields hold; fields that hold none (hashes, sealed payloads, flags) count as empty."""
    data = b""
    for entry in fields:
        kind, value = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", None)
        if isinstance(value, str) and (kind.startswith("Raw") or kind == "BigRaw"):
            part = _bytes_of(value)
            data += part.removeprefix(_NOT_TEXT) if kind == "BigRaw" else part
    return data


def _bytes_of(value: str) -> bytes:
    """Hex after `0x`; all else, also what only begins so, is text that somebody committed."""
    if value.startswith("0x"):
        with contextlib.suppress(ValueError):
            return bytes.fromhex(value[2:])
    return value.encode()
