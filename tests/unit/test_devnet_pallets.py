"""The runtime's rules, one block at a time and without a network."""

import functools
import inspect
from typing import Any

import bittensor as bt
import pytest
from bittensor.intents.hyperparameters import OWNER_HYPERPARAMETERS

from subnet import draws
from subnet.devnet.extrinsics import PoolError
from subnet.devnet.hyperparameters import BY_NAME
from subnet.devnet.pallets import staking, subnets
from tests.devnet_bench import NETUID, Bench, address

RAO = 10**9
IDENTITY_FIELDS = ("github_repo", "subnet_contact", "subnet_url", "discord", "description", "logo_url", "additional")


def weights(bench: Bench, who: str, uids: list[int], values: list[int], version_key: int = 0) -> str | None:
    return bench.send(
        who, "set_mechanism_weights", netuid=NETUID, mecid=0, dests=uids, weights=values, version_key=version_key
    )


def with_validator(**knobs: int) -> Bench:
    """Owner 0, validator 1 with a permit, miners 2 and 3."""
    bench = Bench(tempo=20, weights_rate_limit=1, **knobs)
    bench.register("Val", "M0", "M1")
    bench.stake("Val", 1_000)
    bench.blocks(20)
    return bench


@pytest.mark.parametrize(
    ("uids", "values", "error"),
    [
        ([2], [1, 2], "WeightVecNotEqualSize"),
        ([0, 1, 2, 3, 4], [1] * 5, "UidsLengthExceedUidsInSubNet"),
        ([2, 2], [1, 1], "DuplicateUids"),
        ([9], [1], "UidVecContainInvalidOne"),
        ([2, 3], [5, 15], None),
    ],
)
def test_weights_are_checked_as_the_runtime_does(uids: list[int], values: list[int], error: str | None) -> None:
    bench = with_validator()
    assert weights(bench, "Val", uids, values) == error
    expected = [] if error else [(2, 21_845), (3, 65_535)]
    assert [tuple(pair) for pair in bench.get("Weights", NETUID, 1)] == expected


def test_the_first_failing_check_is_the_one_that_is_named() -> None:
    bench = with_validator(weights_version=3, min_allowed_weights=2)
    assert weights(bench, "Val", [2, 2], [1, 1], version_key=2) == "IncorrectWeightVersionKey"
    assert weights(bench, "M0", [2, 2], [1, 1], version_key=3) == "NeuronNoValidatorPermit"
    assert weights(bench, "Val", [2, 2], [1, 1], version_key=3) == "DuplicateUids"
    assert weights(bench, "Val", [2], [1], version_key=3) == "WeightVecLengthIsLow"
    assert weights(bench, "Val", [1], [1], version_key=3) is None


def test_weights_have_a_limit_for_each_miner_and_a_rate() -> None:
    bench = with_validator(max_weights_limit=39_321)
    assert weights(bench, "Val", [2, 3], [9, 1]) == "MaxWeightExceeded"
    assert weights(bench, "Val", [2, 3], [3, 2]) is None
    bench.set("WeightsSetRateLimit", 50, NETUID)
    assert weights(bench, "Val", [2, 3], [2, 3]) == "SettingWeightsTooFast"


def test_weights_need_the_stake_the_chain_asks_for() -> None:
    bench = with_validator()
    bench.set("StakeThreshold", 5_000 * RAO)
    assert weights(bench, "Val", [2], [1]) == "NotEnoughStakeToSetWeights"


def test_a_full_subnet_prunes_the_lowest_earner_then_the_oldest_then_the_lowest_uid() -> None:
    bench = Bench(max_allowed_uids=4, immunity_period=0, tempo=360)
    bench.register("M1", "M2", "M3")
    bench.set("Emission", [0, 5, 0, 0], NETUID)
    bench.register("New")
    assert bench.uid("New") == 2 and bench.uid("M2") is None
    bench.set("Emission", [0, 5, 7, 0], NETUID)
    bench.register("Newer")
    assert bench.uid("Newer") == 3


def test_immune_neurons_go_last_and_the_owner_never() -> None:
    bench = Bench(max_allowed_uids=3, immunity_period=50, tempo=360)
    bench.register("Old")
    bench.blocks(50)
    bench.register("Young", "New")
    assert bench.uid("Old") is None and bench.uid("Young") == 2
    bench.set("MaxAllowedUids", 1, NETUID)
    bench.set("SubnetworkN", 1, NETUID)
    assert bench.send("Bank", "burned_register", netuid=NETUID, hotkey=address("Late")) == "NoNeuronIdAvailable"


def test_a_successor_inherits_neither_weights_nor_axon_nor_permit() -> None:
    bench = with_validator(max_allowed_uids=4, immunity_period=0)
    weights(bench, "Val", [2], [1])
    bench.set("Emission", [9, 0, 9, 9], NETUID)
    bench.register("New")
    assert bench.uid("New") == 1
    assert bench.get("Weights", NETUID, 1) == [] and not bench.get("ValidatorPermit", NETUID)[1]


def test_registration_is_refused_by_name() -> None:
    bench = Bench({"Bank": 100.0, "Poor": 0.0005})
    args: dict[str, Any] = {"netuid": NETUID, "hotkey": address("M")}
    assert bench.send("Poor", "burned_register", **args) == "NotEnoughBalanceToStake"
    assert bench.send("Bank", "burned_register", **{**args, "netuid": 0}) == "RegistrationNotPermittedOnRootSubnet"
    assert bench.send("Bank", "burned_register", **{**args, "netuid": 9}) == "SubnetNotExists"
    bench.register("M")
    assert bench.send("Bank", "burned_register", **args) == "HotKeyAlreadyRegisteredInSubNet"
    bench.set("NetworkRegistrationAllowed", False, NETUID)
    args["hotkey"] = address("N")
    assert bench.send("Bank", "burned_register", **args) == "SubNetRegistrationDisabled"


def test_a_subnet_pays_nothing_before_its_start_call() -> None:
    bench = Bench(tempo=5)
    bench.set("FirstEmissionBlockNumber", None, NETUID)
    bench.set("SubtokenEnabled", False, NETUID)
    before = bench.get("SubnetAlphaOut", NETUID)
    bench.blocks(15)
    paid_late = bench.get("SubnetAlphaOut", NETUID)
    assert bench.send("Bank", "start_call", netuid=NETUID) == "NotSubnetOwner"
    assert bench.send("Alice", "start_call", netuid=NETUID) is None
    assert bench.send("Alice", "start_call", netuid=NETUID) == "FirstEmissionBlockNumberAlreadySet"
    bench.blocks(10)
    assert paid_late <= before + 3 * RAO
    assert bench.get("SubnetAlphaOut", NETUID) > paid_late + 4 * RAO


def test_emission_is_divided_as_the_chain_does_it() -> None:
    bench = with_validator()
    assert weights(bench, "Val", [2, 3], [3, 1]) is None
    bench.blocks(40)
    emission = bench.get("Emission", NETUID)
    for_both = 20 * (RAO - RAO * 11_796 // 65_535)
    assert sum(emission) == pytest.approx(for_both, abs=40)
    assert emission[2] == pytest.approx(3 * emission[3], rel=1e-4)
    assert emission[1] == pytest.approx(emission[2] + emission[3], rel=1e-6)


def test_the_owners_own_miners_earn_nothing_and_auto_stake_redirects_a_miners_pay() -> None:
    bench = with_validator()
    bench.send("Alice", "transfer_keep_alive", "Balances", dest=address("Bank"), value=RAO)
    bench.register("OwnersMiner", coldkey="Alice")
    assert bench.send("Bank", "set_coldkey_auto_stake_hotkey", netuid=NETUID, hotkey=address("Val")) is None
    assert weights(bench, "Val", [2, 4], [1, 1]) is None
    bench.blocks(40)
    storage = bench.chain.storage()
    assert bench.get("Emission", NETUID)[4] > 0
    assert staking.hotkey_alpha(storage, address("OwnersMiner"), NETUID) == 0
    assert staking.hotkey_alpha(storage, address("M0"), NETUID) == 0
    assert staking.hotkey_alpha(storage, address("Val"), NETUID) > 1_000 * RAO


def test_knobs_are_the_owners_and_frozen_before_an_epoch() -> None:
    bench = Bench(tempo=60)
    knob: dict[str, Any] = {"netuid": NETUID, "immunity_period": 77}
    assert bench.send("Bank", "sudo_set_immunity_period", "AdminUtils", **knob) == "BadOrigin"
    assert bench.send("Alice", "sudo_set_kappa", "AdminUtils", netuid=NETUID, kappa=1) == "BadOrigin"
    assert bench.send("Alice", "sudo_set_immunity_period", "AdminUtils", **knob) is None
    assert bench.get("ImmunityPeriod", NETUID) == 77
    assert bench.send("Alice", "sudo_set_immunity_period", "AdminUtils", **knob) == "TxRateLimitExceeded"
    bench.blocks(53 - bench.chain.head.number)
    change: dict[str, Any] = {"netuid": NETUID, "min_allowed_weights": 2}
    frozen = bench.send("Alice", "sudo_set_min_allowed_weights", "AdminUtils", **change)
    assert frozen == "AdminActionProhibitedDuringWeightsWindow"
    bench.blocks(10)
    assert bench.send("Alice", "sudo_set_min_allowed_weights", "AdminUtils", **change) is None
    assert bench.send("Alice", "sudo_set_tempo", "AdminUtils", netuid=NETUID, tempo=10) == "TempoOutOfBounds"


def test_every_knob_that_the_sdk_lets_an_owner_turn_can_be_turned() -> None:
    bench = Bench({"Alice": 1.0}, tempo=0, liquid_alpha_enabled=1)
    for name, (setter, is_boolean) in sorted(OWNER_HYPERPARAMETERS.items()):
        if setter in ("sudo_set_alpha_values", "sudo_set_epoch_consensus") or name not in BY_NAME:
            continue
        parameters = inspect.signature(getattr(bt.calls.AdminUtils, setter)).parameters
        (parameter,) = (given for given in parameters if given != "netuid")
        value: Any = True if is_boolean else {"bits": 1 << 64} if name == "burn_increase_mult" else 400
        assert bench.send("Alice", setter, "AdminUtils", netuid=NETUID, **{parameter: value}) is None, name
        bench.set("Tempo", 0, NETUID)
    alpha: dict[str, Any] = {"netuid": NETUID, "alpha_low": 2_000}
    bench.set("LiquidAlphaOn", False, NETUID)
    assert (
        bench.send("Alice", "sudo_set_alpha_values", "AdminUtils", **alpha, alpha_high=60_000) == "LiquidAlphaDisabled"
    )
    bench.set("LiquidAlphaOn", True, NETUID)
    assert bench.send("Alice", "sudo_set_alpha_values", "AdminUtils", **alpha, alpha_high=60) == "AlphaHighTooLow"
    assert bench.send("Alice", "sudo_set_alpha_values", "AdminUtils", **alpha, alpha_high=60_000) is None
    assert list(bench.get("AlphaValues", NETUID)) == [2_000, 60_000]


def test_the_owner_names_only_a_hotkey_of_its_own_as_the_subnets() -> None:
    bench = Bench(tempo=60)
    bench.register("Theirs")
    bench.register("Mine", coldkey="Alice")
    rename = functools.partial(bench.send, "Alice", "sudo_set_sn_owner_hotkey", "AdminUtils", netuid=NETUID)
    assert rename(hotkey=address("Theirs")) == "NonAssociatedColdKey"
    assert rename(hotkey=address("Mine")) is None
    assert bench.get("SubnetOwnerHotkey", NETUID) == address("Mine")


def test_a_new_subnet_costs_twice_what_the_last_one_did_and_is_its_creators() -> None:
    bench = Bench({"Bank": 8_000.0, "Poor": 10.0})
    price = subnets.creation_price(bench.chain.storage())
    assert bench.send("Poor", "register_network", hotkey=address("P")) == "CannotAffordLockCost"
    before = bench.get("TotalIssuance")
    assert bench.send("Bank", "register_network", hotkey=address("First")) is None
    assert bench.get("SubnetOwner", 2) == address("Bank") and bench.get("Uids", 2, address("First")) == 0
    assert bench.get("SubnetLocked", 2) == bench.get("SubnetTAO", 2) == price
    assert before - bench.get("TotalIssuance") < RAO  # only the fee is recycled
    assert price < subnets.creation_price(bench.chain.storage()) <= 2 * price
    identity = {"subnet_name": b"ours", **dict.fromkeys(IDENTITY_FIELDS, b"")}
    assert bench.send("Bank", "register_network_with_identity", hotkey=address("Second"), identity=identity) is None
    assert bench.get("SubnetIdentitiesV3", 3)["subnet_name"] == "ours"
    renamed: dict[str, Any] = {**identity, "subnet_name": b"renamed"}
    assert bench.send("Poor", "set_subnet_identity", netuid=2, **renamed) == "NotSubnetOwner"
    assert bench.send("Bank", "set_subnet_identity", netuid=2, **renamed) is None
    assert bench.send("Bank", "start_call", netuid=2) is None
    bench.set("NetworkRateLimit", 100)
    assert bench.send("Bank", "register_network", hotkey=address("Third")) == "NetworkTxRateLimitExceeded"


def test_the_owner_can_pull_an_epoch_forward() -> None:
    bench = Bench(tempo=60)
    bench.block()
    assert bench.send("Alice", "trigger_epoch", netuid=NETUID) is None
    assert bench.send("Alice", "trigger_epoch", netuid=NETUID) == "EpochTriggerAlreadyPending"
    bench.blocks(10)
    assert bench.get("LastEpochBlock", NETUID) == 12


def test_a_swapped_hotkey_keeps_uid_stake_and_weights() -> None:
    bench = with_validator()
    weights(bench, "Val", [2], [1])
    storage = bench.chain.storage()
    before = staking.position(storage, address("Val"), address("Bank"), NETUID)
    swap: dict[str, Any] = {"hotkey": address("Val"), "new_hotkey": address("Val2"), "netuid": NETUID}
    assert bench.send("Alice", "swap_hotkey", **swap) == "NonAssociatedColdKey"
    assert (
        bench.send("Bank", "swap_hotkey", **{**swap, "new_hotkey": address("M0")}) == "HotKeyAlreadyRegisteredInSubNet"
    )
    assert bench.send("Bank", "swap_hotkey", **swap) is None
    assert bench.uid("Val2") == 1 and bench.uid("Val") is None
    assert len(bench.get("Weights", NETUID, 1)) == 1
    storage = bench.chain.storage()
    assert staking.position(storage, address("Val2"), address("Bank"), NETUID) >= before
    assert staking.hotkey_alpha(storage, address("Val"), NETUID) == 0


def test_commitments_use_up_an_allowance_that_each_epoch_renews() -> None:
    bench = Bench(tempo=40)
    record: dict[str, Any] = {"netuid": NETUID, "info": {"fields": [{"BigRaw": "0x" + "ab" * 512}] * 3}}
    assert bench.send("Alice", "set_commitment", "Commitments", **record) is None
    assert bench.send("Alice", "set_commitment", "Commitments", **record) is None
    assert bench.send("Alice", "set_commitment", "Commitments", **record) == "SpaceLimitExceeded"
    bench.blocks(40)
    assert bench.send("Alice", "set_commitment", "Commitments", **record) is None
    assert bench.send("Bank", "set_commitment", "Commitments", **record) == "AccountNotAllowedCommit"


def test_the_pool_refuses_as_substrate_does() -> None:
    bench = Bench()
    args = {"dest": address("Bank"), "value": RAO}
    first = bench.signed("Alice", "Balances", "transfer_keep_alive", args)
    bench.chain.submit(first)
    for raw, code in ((first, 1013), (bench.signed("Alice", "System", "remark", {"remark": b"x"}), 1014)):
        with pytest.raises(PoolError) as error:
            bench.chain.submit(raw)
        assert error.value.code == code
    bench.block()
    with pytest.raises(PoolError, match="outdated"):
        bench.chain.submit(first)
    with pytest.raises(PoolError, match="bad signature"):
        bench.chain.submit(_forged(first))
    with pytest.raises(PoolError, match="pay some fees"):
        bench.chain.submit(bench.signed("Nobody", "System", "remark", {"remark": b"x"}))
    with pytest.raises(PoolError) as garbage:
        bench.chain.submit(b"\x10abcd")
    assert garbage.value.code == 1002


def _forged(raw: bytes) -> bytes:
    """The same extrinsic with one bit of its signature turned."""
    return raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]


def test_a_nonce_gap_waits() -> None:
    bench = Bench()
    nonce = bench.chain.nonce(address("Alice"))
    later = bench.chain.submit(bench.signed("Alice", "System", "remark", {"remark": b"b"}, nonce=nonce + 1))
    assert later.raw not in bench.block().extrinsics
    bench.chain.submit(bench.signed("Alice", "System", "remark", {"remark": b"a"}, nonce=nonce))
    assert later.raw in bench.block().extrinsics


def test_a_reorganisation_puts_transactions_back_and_includes_them_again() -> None:
    bench = Bench()
    bench.blocks(3)
    bench.register("M0")
    lost = bench.chain.head.digest
    assert len(bench.chain.undo(2)) == 2
    assert bench.uid("M0") is None
    bench.block()
    assert bench.uid("M0") == 1 and bench.chain.head.digest != lost
    assert bench.chain.undo(50) and bench.chain.head.number == bench.chain.finalized_number


def test_tao_and_alpha_are_conserved_to_the_rao() -> None:
    """10,000 random transactions of twelve accounts: nothing appears and nothing vanishes."""
    names = [f"A{index}" for index in range(12)]
    bench = Bench(dict.fromkeys(names, 5_000.0), tempo=15)
    for number in range(1_000):
        for name in draws.shuffled(names, "senders", number)[:10]:
            _random_call(bench, name, names, number)
        bench.block()
    storage = bench.chain.storage()
    accounts = sum(account["data"]["free"] for _, account in storage.entries("System", "Account"))
    staked = sum(value for _, value in storage.entries("SubtensorModule", "SubnetTAO"))
    assert accounts + staked == storage.get("TotalIssuance") == storage.read("Balances", "TotalIssuance")
    alpha = sum(value for _, value in storage.entries("SubtensorModule", "TotalHotkeyAlpha"))
    assert alpha == storage.get("SubnetAlphaOut", NETUID)


def _random_call(bench: Bench, name: str, names: list[str], number: int) -> None:
    other = address(draws.shuffled(names, "target", number, name)[0])
    hotkey, rao = address(name + "hot"), 1 + int(draws.uniform("rao", number, name) * 40 * RAO)
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("transfer_keep_alive", "Balances", {"dest": other, "value": rao}),
        ("transfer_allow_death", "Balances", {"dest": other, "value": rao}),
        ("burned_register", "SubtensorModule", {"netuid": NETUID, "hotkey": hotkey}),
        ("add_stake", "SubtensorModule", {"hotkey": hotkey, "netuid": NETUID, "amount_staked": rao}),
        ("remove_stake", "SubtensorModule", {"hotkey": hotkey, "netuid": NETUID, "amount_unstaked": rao}),
    ]
    function, pallet, args = draws.shuffled(calls, "call", number, name)[0]
    bench.chain.submit(bench.signed(name, pallet, function, args))
