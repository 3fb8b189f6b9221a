"""What a client can ask: every RPC method and runtime API answers, and mistakes get the errors of a real node."""

from typing import Any

import pytest

from subnet.devnet.rpc import Rpc, RpcError
from subnet.devnet.runtime import CALLS
from tests.devnet_bench import NETUID, Bench, address


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench(tempo=10, weights_rate_limit=1)
    made.register("Val", "M0")
    made.stake("Val", 100)
    made.blocks(12)
    weights: dict[str, Any] = {"netuid": NETUID, "dests": [2], "weights": [9], "version_key": 0}
    assert made.send("Val", "set_weights", **weights) is None
    axon: dict[str, Any] = {"version": 1, "ip": 2_130_706_433, "port": 80, "ip_type": 4, "protocol": 4}
    assert made.send("M0", "serve_axon", netuid=NETUID, **axon, placeholder1=0, placeholder2=0) is None
    made.blocks(10)
    return made


def asked(bench: Bench, name: str, *arguments: Any) -> Any:
    """A runtime API answer, decoded."""
    codec = bench.chain.codec
    method = codec.api(name)
    assert method is not None
    data = b"".join(codec.encode(kind, value) for kind, value in zip(method.inputs, arguments, strict=True))
    answer = Rpc(bench.chain).answer("state_call", [name, data.hex(), None])
    return codec.decode(method.output, bytes.fromhex(answer[2:]))


def test_every_view_of_the_subnet_tells_the_same(bench: Bench) -> None:
    graph = asked(bench, "SubnetInfoRuntimeApi_get_metagraph", NETUID)
    assert asked(bench, "SubnetInfoRuntimeApi_get_mechagraph", NETUID, 0) == graph
    assert asked(bench, "SubnetInfoRuntimeApi_get_mechagraph", NETUID, 1) is None
    assert asked(bench, "SubnetInfoRuntimeApi_get_all_metagraphs") == [graph]
    assert asked(bench, "SubnetInfoRuntimeApi_get_metagraph", 9) is None
    lite = asked(bench, "NeuronInfoRuntimeApi_get_neurons_lite", NETUID)
    full = asked(bench, "NeuronInfoRuntimeApi_get_neurons", NETUID)
    assert [neuron["hotkey"] for neuron in lite] == [neuron["hotkey"] for neuron in full] == graph["hotkeys"]
    assert [tuple(pair) for pair in full[1]["weights"]] == [(2, 65_535)] and full[1]["bonds"]
    assert asked(bench, "NeuronInfoRuntimeApi_get_neuron_lite", NETUID, 2)["axon_info"]["port"] == 80
    assert asked(bench, "NeuronInfoRuntimeApi_get_neuron_lite", NETUID, 9) is None
    assert graph["axons"][2]["port"] == 80 and graph["emission"][2] == lite[2]["emission"] > 0
    dynamic = asked(bench, "SubnetInfoRuntimeApi_get_dynamic_info", NETUID)
    assert asked(bench, "SubnetInfoRuntimeApi_get_all_dynamic_info") == [dynamic]
    assert dynamic["tempo"] == 10
    assert asked(bench, "SubnetInfoRuntimeApi_get_dynamic_info", 9) is None


def test_stake_prices_and_schedule(bench: Bench) -> None:
    bank, validator = address("Bank"), address("Val")
    one = asked(bench, "StakeInfoRuntimeApi_get_stake_info_for_hotkey_coldkey_netuid", validator, bank, NETUID)
    positions = asked(bench, "StakeInfoRuntimeApi_get_stake_info_for_coldkey", bank)
    assert one in positions and one["stake"] > 100 * 10**9
    many = asked(bench, "StakeInfoRuntimeApi_get_stake_info_for_coldkeys", [bank])
    assert [list(entry) for entry in many] == [[bank, positions]]
    everything = asked(bench, "StakeInfoRuntimeApi_get_stake_availability_for_coldkeys", [bank], None)
    (of_bank,) = everything.values()
    assert sum(entry["available"] for entry in of_bank.values()) == sum(entry["stake"] for entry in positions)
    assert asked(bench, "SwapRuntimeApi_current_alpha_price", NETUID) == 10**9
    assert {entry["netuid"] for entry in asked(bench, "SwapRuntimeApi_current_alpha_price_all")} == {0, NETUID}
    for direction in ("tao_for_alpha", "alpha_for_tao"):
        assert asked(bench, f"SwapRuntimeApi_sim_swap_{direction}", NETUID, 7)["tao_amount"] == 7
    due = asked(bench, "SubnetInfoRuntimeApi_get_next_epoch_start_block", NETUID)
    assert due == bench.get("LastEpochBlock", NETUID) + 10
    assert asked(bench, "SubnetInfoRuntimeApi_get_block_emission") == 10**9
    assert asked(bench, "SubnetRegistrationRuntimeApi_get_network_registration_cost") == 1_000 * 10**9
    assert asked(bench, "SubnetInfoRuntimeApi_get_coldkey_auto_stake_hotkey", bank, NETUID) is None
    assert asked(bench, "AccountNonceApi_account_nonce", bank) == bench.chain.nonce(bank)
    assert asked(bench, "SubnetInfoRuntimeApi_get_subnet_hyperparams_v3", 9) is None


def test_methods_that_the_node_does_not_model_answer_zero(bench: Bench) -> None:
    assert asked(bench, "EthereumRuntimeRPCApi_chain_id") == 0
    assert asked(bench, "DelegateInfoRuntimeApi_get_delegates") == []


def test_the_node_introduces_itself(bench: Bench) -> None:
    rpc = Rpc(bench.chain)
    assert rpc.answer("system_chain", []) == "Bittensor"
    assert rpc.answer("system_name", []) == "strata-devnet" and rpc.answer("system_version", [])
    assert rpc.answer("system_properties", [])["ss58Format"] == 42
    assert not rpc.answer("system_health", [])["isSyncing"]
    assert "state_call" in rpc.answer("rpc_methods", [])["methods"]
    assert rpc.answer("state_getRuntimeVersion", [])["specVersion"] == 461
    versions = bytes.fromhex(rpc.answer("state_call", ["Metadata_metadata_versions", "", None])[2:])
    assert versions == b"\x08\x0e\x00\x00\x00\x0f\x00\x00\x00"
    unknown = rpc.answer("state_call", ["Metadata_metadata_at_version", "10000000", None])
    assert unknown == "0x00"
    assert rpc.answer("state_getMetadata", []).startswith("0x6d657461")


def test_blocks_by_hash_number_and_head(bench: Bench) -> None:
    rpc = Rpc(bench.chain)
    head = rpc.answer("chain_getHead", [])
    assert rpc.answer("chain_getBlockHash", []) == head == rpc.answer("chain_getBlockHash", [bench.chain.head.number])
    assert rpc.answer("chain_getBlockHash", [hex(bench.chain.head.number)]) == head
    assert rpc.answer("chain_getBlockHash", [10**6]) is None
    header = rpc.answer("chain_getHeader", [head])
    assert int(header["number"], 16) == bench.chain.head.number
    assert rpc.answer("chain_getBlock", [head])["block"]["header"] == header
    assert rpc.answer("chain_getHeader", ["0x" + "00" * 32]) is None
    assert rpc.answer("chain_getBlock", ["0x" + "00" * 32]) is None
    assert rpc.answer("chain_getFinalizedHead", []) == bench.chain.block_hash(bench.chain.finalized_number)


def test_storage_is_listed_in_pages(bench: Bench) -> None:
    rpc, codec = Rpc(bench.chain), bench.chain.codec
    prefix = "0x" + codec.key("SubtensorModule", "Uids", NETUID).hex()
    first = rpc.answer("state_getKeysPaged", [prefix, 2, None, None])
    rest = rpc.answer("state_getKeysPaged", [prefix, 100, first[-1], None])
    assert len(first) == 2 and len(rest) == 1
    changes = rpc.answer("state_queryStorageAt", [[*first, "0x00"]])[0]["changes"]
    assert [key for key, _ in changes] == [*first, "0x00"] and changes[-1][1] is None
    assert rpc.answer("state_getStorage", [first[0]]) == changes[0][1]


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("chain_makeCoffee", [], -32601),
        ("state_getStorage", ["no hex"], -32602),
        ("state_getStorage", [], -32602),
        ("state_getStorage", ["0x00", "0x" + "00" * 32], 4003),
        ("state_call", ["Nothing_here", "", None], 4003),
        ("state_call", ["SubnetInfoRuntimeApi_get_metagraph", "00", None], -32602),
        ("account_nextIndex", ["me"], -32602),
        ("author_submitExtrinsic", ["0x00"], 1002),
    ],
)
def test_mistakes_get_the_errors_of_a_real_node(bench: Bench, method: str, params: list[Any], code: int) -> None:
    with pytest.raises(RpcError) as error:
        Rpc(bench.chain).answer(method, params)
    assert error.value.code == code


def test_every_call_the_node_carries_out_exists_in_the_runtime() -> None:
    chain = Bench().chain
    known = {
        (pallet["name"], call["name"])
        for pallet in chain.codec.runtime.metadata_ir()["pallets"]
        for call in pallet["calls"]
    }
    assert set(CALLS) <= known
