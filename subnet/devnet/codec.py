"""Genuine runtime metadata and the SCALE codec built from it (chain.md 3).

The metadata is that of spec 461, with two patches: a storage entry that SDK 11.3.0 asks for, and the
block time. Type ids are positions in the metadata's own registry.
"""

import functools
import importlib.resources
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bittensor_core

from subnet.devnet.scale import Reader, compact, vector
from subnet.errors import ProtocolViolation

SPEC_NAME = "node-subtensor"
SPEC_VERSION = 461
TRANSACTION_VERSION = 1
SS58_FORMAT = 42
NO_ACCOUNT = bittensor_core.ss58_encode(bytes(32), SS58_FORMAT)
_SLOT_DURATION_MS = 250
_PALLET = vector(b"SubtensorModule")


@dataclass(frozen=True, slots=True)
class StorageItem:
    """One entry of a pallet's storage: its value type, and the value that stands for absence (None when optional)."""

    value_type: str
    default: bytes | None


@dataclass(frozen=True, slots=True)
class Call:
    """A decoded call: which pallet and function, and its arguments by name."""

    pallet: str
    function: str
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ApiMethod:
    """A runtime API method: types of its arguments and of its result."""

    inputs: tuple[str, ...]
    output: str


class Codec:
    """Encodes and decodes everything a client sees, for one runtime version and block time."""

    def __init__(self, *, block_time_s: float, spec_version: int = SPEC_VERSION) -> None:
        self.spec_version = spec_version
        self.metadata_v14 = _patched(_unpacked("v14.bin.xz"), block_time_s)
        opaque = Reader(_unpacked("v15_opaque.bin.xz")[1:])
        self.metadata_v15 = _patched(opaque.vector(), block_time_s)
        self.runtime = bittensor_core.Runtime(self.metadata_v15, spec_version, TRANSACTION_VERSION, SS58_FORMAT)
        self._types: dict[int, Any] = {t["id"]: t["type"] for t in json.loads(self.runtime.registry_json())["types"]}
        self._errors = {
            (pallet["name"], error["name"]): (pallet["index"], error["index"])
            for pallet in self.runtime.metadata_ir()["pallets"]
            for error in pallet["errors"]
        }
        self._apis = {
            f"{api}_{name}": ApiMethod(tuple(kind for _, kind in method["inputs"]), method["output"])
            for api, methods in self.runtime.runtime_api_map().items()
            for name, method in methods.items()
        }
        self.item = functools.cache(self._item)
        self.key = functools.lru_cache(maxsize=65_536)(self._key)

    def _item(self, pallet: str, name: str) -> StorageItem:
        entry = self.runtime.storage_entry(pallet, name)
        return StorageItem(entry.value_type, None if entry.modifier == "Optional" else bytes(entry.default_bytes))

    def _key(self, pallet: str, name: str, *params: int | str) -> bytes:
        return bytes(self.runtime.storage_key(pallet, name, list(params)))

    def key_params(self, pallet: str, name: str, key: bytes) -> list[Any]:
        """The map parameters that a full storage key holds."""
        return list(self.runtime.decode_storage_key_params(pallet, name, key, 0))

    def encode(self, type_string: str, value: Any) -> bytes:
        """SCALE bytes of a plain value."""
        return bytes(self.runtime.encode(type_string, value))

    def encode_filled(self, type_string: str, partial: Any) -> bytes:
        """SCALE bytes of a value of which only some fields are given; the rest are zero."""
        filled = self._filled(_type_id(type_string), partial)
        return b"\x00" if filled is None else self.encode(type_string, filled)

    def decode(self, type_string: str, data: bytes) -> Any:
        """The plain value of SCALE bytes."""
        return self.runtime.decode(type_string, data, True)

    def error_index(self, pallet: str, name: str) -> tuple[int, int]:
        """(pallet, error) indices of a dispatch error; KeyError for a name the runtime does not have."""
        return self._errors[(pallet, name)]

    def api(self, name: str) -> ApiMethod | None:
        """The runtime API method called `Api_method`, None when there is none."""
        return self._apis.get(name)

    def api_arguments(self, method: ApiMethod, data: bytes) -> list[Any]:
        """The arguments of a runtime API call, which arrive concatenated."""
        arguments = []
        try:
            for kind in method.inputs:
                value = self.runtime.decode(kind, data, False)
                arguments.append(value)
                data = data[len(self.encode(kind, value)) :]
        except ValueError as error:
            raise ProtocolViolation(f"arguments of the runtime call do not decode: {error}") from error
        return arguments

    def call(self, data: bytes) -> Call:
        """Decode call bytes. Raises ProtocolViolation when they are no call of this runtime."""
        try:
            decoded = self.runtime.decode_call(data)
        except ValueError as error:
            raise ProtocolViolation(f"call does not decode: {error}") from error
        args = {argument["name"]: argument["value"] for argument in decoded["call_args"]}
        return Call(decoded["call_module"], decoded["call_function"], args)

    def compose(self, pallet: str, function: str, args: Mapping[str, Any]) -> bytes:
        """Call bytes of a call."""
        return bytes(self.runtime.compose_call(pallet, function, dict(args)))

    def _filled(self, type_id: int, value: Any) -> Any:
        """`value` with every field the type has and the value lacks set to zero."""
        definition = self._types[type_id]["def"]
        kind, detail = next(iter(definition.items()))
        if kind == "composite":
            return self._filled_composite(type_id, detail.get("fields", []), value)
        if kind == "variant":
            return self._filled_variant(type_id, detail, value)
        if kind == "sequence":
            return value if isinstance(value, str | bytes) else [self._filled(detail["type"], v) for v in value or ()]
        if kind == "array":
            return bytes(detail["len"]) if value is None else value
        if kind == "tuple":
            parts: Sequence[Any] = [None] * len(detail) if value is None else value
            return [self._filled(part, v) for part, v in zip(detail, parts, strict=True)]
        if kind == "compact":
            return self._filled(detail["type"], value)
        return {"bool": False, "str": ""}.get(detail, 0) if value is None else value

    def _filled_composite(self, type_id: int, fields: list[Any], value: Any) -> Any:
        name = self._types[type_id].get("path", [""])[-1]
        if name == "AccountId32":
            return NO_ACCOUNT if value is None else value
        if name == "BTreeMap":
            return value or {}
        if fields and fields[0].get("name"):
            given = value or {}
            return {field["name"]: self._filled(field["type"], given.get(field["name"])) for field in fields}
        if len(fields) == 1:
            return self._filled(fields[0]["type"], value)
        parts: Sequence[Any] = [None] * len(fields) if value is None else value
        return [self._filled(field["type"], v) for field, v in zip(fields, parts, strict=True)]

    def _filled_variant(self, type_id: int, detail: Any, value: Any) -> Any:
        if self._types[type_id].get("path") == ["Option"]:
            return None if value is None else self._filled(detail["variants"][1]["fields"][0]["type"], value)
        return detail["variants"][0]["name"] if value is None else value


def _type_id(type_string: str) -> int:
    return int(type_string.removeprefix("scale_info::"))


@functools.cache
def _unpacked(name: str) -> bytes:
    packed = importlib.resources.files("subnet.devnet").joinpath("metadata", name).read_bytes()
    return lzma.decompress(packed)


def _patched(metadata: bytes, block_time_s: float) -> bytes:
    return _with_block_time(_with_epoch_consensus(metadata), block_time_s)


def _with_epoch_consensus(metadata: bytes) -> bytes:
    """Add SubtensorModule.SubnetEpochConsensus (netuid -> u8, default 0) in front of the pallet's storage entries."""
    storage = _PALLET + b"\x01" + _PALLET
    at = metadata.index(storage) + len(storage)
    reader = Reader(metadata[at : at + 4])
    num_entries = reader.compact()
    is_default, is_map, identity_hasher = b"\x01", b"\x01", b"\x06"
    netuid_type, u8_type = compact(41), compact(2)
    entry = (
        vector(b"SubnetEpochConsensus")
        + is_default
        + (is_map + compact(1) + identity_hasher + netuid_type + u8_type)
        + vector(b"\x00")
        + compact(0)
    )
    return metadata[:at] + compact(num_entries + 1) + entry + metadata[at + reader.position :]


def _with_block_time(metadata: bytes, block_time_s: float) -> bytes:
    """Set the constant Aura.SlotDuration, from which clients derive the block time."""
    name = vector(b"SlotDuration")
    value = compact(8) + _SLOT_DURATION_MS.to_bytes(8, "little")
    at = -1
    while (at := metadata.find(name, at + 1)) >= 0:
        reader = Reader(metadata[at + len(name) : at + len(name) + 16])
        reader.compact()
        start = at + len(name) + reader.position
        if metadata[start : start + len(value)] == value:
            milliseconds = max(1, round(block_time_s * 1_000))
            return metadata[: start + 1] + milliseconds.to_bytes(8, "little") + metadata[start + len(value) :]
    raise ProtocolViolation("Aura.SlotDuration is not in the metadata: these are not the files of spec 461")
