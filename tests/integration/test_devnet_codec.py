"""The devnet's codec against byte vectors that the SDK's authors recorded from a real node."""

import hashlib
import importlib.resources
import json
import lzma
from pathlib import Path
from typing import Any

import bittensor_core
import pytest

from subnet.devnet.codec import Codec
from subnet.devnet.extrinsics import PoolError, parse
from subnet.devnet.scale import Reader, compact, vector
from subnet.errors import ProtocolViolation

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "chain_vectors.json").read_bytes())
CODEC = Codec(block_time_s=0.25)


def test_the_metadata_is_the_recorded_one() -> None:
    packed = importlib.resources.files("subnet.devnet").joinpath("metadata", "v15_opaque.bin.xz").read_bytes()
    digest = hashlib.sha256(lzma.decompress(packed)).hexdigest()
    assert digest == GOLDEN["sdist_sha256_of_v15_metadata"]


def test_storage_keys() -> None:
    for entry in GOLDEN["storage_keys"]:
        key = CODEC.key(entry["pallet"], entry["storage_function"], *entry["params"])
        assert "0x" + key.hex() == entry["key_hex"]


def test_calls_encode_and_decode() -> None:
    for entry in GOLDEN["calls"]:
        data = bytes.fromhex(entry["data_hex"][2:])
        if "call" not in entry["params"] and "calls" not in entry["params"]:  # nested ones are described in words
            assert CODEC.compose(entry["module"], entry["function"], entry["params"]) == data
        call = CODEC.call(data)
        assert (call.pallet, call.function) == (entry["module"], entry["function"])


def test_extrinsics_parse_to_what_was_signed() -> None:
    for entry in GOLDEN["extrinsics"]:
        extrinsic = parse(CODEC, bytes.fromhex(entry["extrinsic_hex"][2:]))
        assert extrinsic.digest == entry["extrinsic_hash"]
        assert (extrinsic.signer, extrinsic.nonce, extrinsic.tip) == (entry["address"], entry["nonce"], entry["tip"])
        assert "0x" + extrinsic.call_bytes.hex() == entry["call_data_hex"]
        if isinstance(entry["era"], dict):
            birth = bittensor_core.era_birth(entry["era"]["period"], entry["era"]["current"])
            assert extrinsic.era.period == entry["era"]["period"]
            assert extrinsic.era.birth(entry["era"]["current"]) == birth
        else:
            assert extrinsic.era.period == 0


def test_storage_values_and_events_decode() -> None:
    for entry in GOLDEN["storage_values"]:
        item = CODEC.item(entry["pallet"], entry["storage_function"])
        raw = bytes.fromhex(entry["raw_hex"][2:]) if entry["raw_hex"] else item.default
        assert raw is not None and CODEC.decode(item.value_type, raw) == entry["decoded"]
    events = CODEC.decode(CODEC.item("System", "Events").value_type, bytes.fromhex(GOLDEN["events"]["raw_hex"][2:]))
    assert [[event["module_id"], event["event_id"]] for event in events] == GOLDEN["events"]["event_ids"]


def test_runtime_api_answers_encode_back_to_the_same_bytes() -> None:
    for entry in GOLDEN["runtime_calls"]:
        method = CODEC.api(f"{entry['api']}_{entry['method']}")
        assert method is not None
        assert CODEC.api_arguments(method, bytes.fromhex(entry["encoded_params_hex"])) == entry["params"]
        assert "0x" + CODEC.encode_filled(method.output, entry["decoded"]).hex() == entry["raw_hex"]


def test_both_metadata_versions_have_the_added_entry_and_the_block_time() -> None:
    for metadata in (CODEC.metadata_v14, CODEC.metadata_v15):
        runtime = bittensor_core.Runtime(metadata, 461, 1, 42)
        assert runtime.constant("Aura", "SlotDuration") == 250
        assert bytes(runtime.storage_entry("SubtensorModule", "SubnetEpochConsensus").default_bytes) == b"\x00"
        assert bytes(runtime.storage_key("SubtensorModule", "MinActivityCutoff", []))


@pytest.mark.parametrize("value", [0, 63, 64, 16_383, 16_384, 2**30 - 1, 2**30, 2**64])
def test_compact_integers(value: int) -> None:
    assert Reader(compact(value)).compact() == value


def test_hostile_bytes_are_refused_by_name() -> None:
    with pytest.raises(ProtocolViolation):
        Reader(compact(5) + b"abc").vector()
    good = bytes.fromhex(GOLDEN["extrinsics"][0]["extrinsic_hex"][2:])
    for bad in (b"", b"\xff" * 40, good[:-1], good + b"\x00", vector(b"\x04" + good[3:]), bytes(2 << 20)):
        with pytest.raises(PoolError):
            parse(CODEC, bad)
