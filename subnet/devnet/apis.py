"""Runtime APIs: the aggregated reads that clients ask for by name (chain.md 3)."""

from collections.abc import Callable, Mapping
from typing import Any

from subnet import yuma
from subnet.devnet import schedule
from subnet.devnet.context import Storage
from subnet.devnet.hyperparameters import HYPERPARAMETERS
from subnet.devnet.pallets import balances, staking, subnets

_SYMBOL = "\N{GREEK SMALL LETTER ALPHA}"
_KNOB_FIELDS = {
    "rho": "Rho",
    "kappa": "Kappa",
    "min_allowed_weights": "MinAllowedWeights",
    "max_weights_limit": "MaxWeightsLimit",
    "weights_version": "WeightsVersionKey",
    "weights_rate_limit": "WeightsSetRateLimit",
    "max_validators": "MaxAllowedValidators",
    "num_uids": "SubnetworkN",
    "max_uids": "MaxAllowedUids",
    "burn": "Burn",
    "difficulty": "Difficulty",
    "registration_allowed": "NetworkRegistrationAllowed",
    "pow_registration_allowed": "NetworkPowRegistrationAllowed",
    "immunity_period": "ImmunityPeriod",
    "min_difficulty": "MinDifficulty",
    "max_difficulty": "MaxDifficulty",
    "min_burn": "MinBurn",
    "max_burn": "MaxBurn",
    "max_regs_per_block": "MaxRegistrationsPerBlock",
    "serving_rate_limit": "ServingRateLimit",
    "commit_reveal_weights_enabled": "CommitRevealWeightsEnabled",
    "commit_reveal_period": "RevealPeriodEpochs",
    "liquid_alpha_enabled": "LiquidAlphaOn",
    "bonds_moving_avg": "BondsMovingAverage",
    "network_registered_at": "NetworkRegisteredAt",
    "owner_hotkey": "SubnetOwnerHotkey",
    "owner_coldkey": "SubnetOwner",
    "tempo": "Tempo",
    "last_step": "LastEpochBlock",
    "blocks_since_last_step": "BlocksSinceLastStep",
    "alpha_out": "SubnetAlphaOut",
    "tao_in": "SubnetTAO",
}
_COLUMNS = {
    "active": "Active",
    "validator_permit": "ValidatorPermit",
    "last_update": "LastUpdate",
    "emission": "Emission",
    "dividends": "Dividends",
    "incentives": "Incentive",
    "consensus": "Consensus",
}


def _text(value: str) -> list[int]:
    return list(value.encode())


def _exists(storage: Storage, netuid: int) -> bool:
    return bool(storage.get("NetworksAdded", netuid)) and netuid != 0


def _hotkeys(storage: Storage, netuid: int) -> list[str]:
    return [storage.get("Keys", netuid, uid) for uid in range(storage.get("SubnetworkN", netuid))]


def _name(storage: Storage, netuid: int) -> str:
    identity = storage.get("SubnetIdentitiesV3", netuid)
    return str(identity["subnet_name"]) if identity else ""


def _metagraph(storage: Storage, netuid: int) -> dict[str, Any] | None:
    if not _exists(storage, netuid):
        return None
    hotkeys = _hotkeys(storage, netuid)
    stakes = [staking.hotkey_alpha(storage, hotkey, netuid) for hotkey in hotkeys]
    zeros = [0] * len(hotkeys)
    return {
        **{field: storage.get(item, netuid) for field, item in _KNOB_FIELDS.items()},
        **{field: storage.column(item, netuid) for field, item in _COLUMNS.items()},
        "netuid": netuid,
        "name": _text(_name(storage, netuid)),
        "symbol": _text(_SYMBOL),
        "block": storage.read("System", "Number"),
        "activity_cutoff": schedule.activity_cutoff(storage, netuid),
        "alpha_in": storage.get("SubnetTAO", netuid),
        "alpha_out_emission": yuma.ALPHA_PER_BLOCK,
        "pending_alpha_emission": storage.get("PendingServerEmission", netuid)
        + storage.get("PendingValidatorEmission", netuid),
        "hotkeys": hotkeys,
        "coldkeys": [storage.get("Owner", hotkey) for hotkey in hotkeys],
        "identities": [None] * len(hotkeys),
        "axons": [storage.get("Axons", netuid, hotkey) for hotkey in hotkeys],
        "block_at_registration": [storage.get("BlockAtRegistration", netuid, uid) for uid in range(len(hotkeys))],
        "alpha_stake": stakes,
        "total_stake": stakes,
        **dict.fromkeys(
            ("pruning_score", "tao_stake", "rank", "trust", "collateral_locked", "collateral_min", "collateral_earned"),
            zeros,
        ),
    }


def _mechagraph(storage: Storage, netuid: int, mechanism: int) -> dict[str, Any] | None:
    return _metagraph(storage, netuid) if mechanism == 0 else None


def _all_metagraphs(storage: Storage) -> list[dict[str, Any] | None]:
    return [_metagraph(storage, netuid) for netuid in storage.netuids() if netuid]


def _neuron(storage: Storage, netuid: int, uid: int) -> dict[str, Any]:
    hotkey = storage.get("Keys", netuid, uid)
    coldkey = storage.get("Owner", hotkey)
    columns = {
        "active": "Active",
        "emission": "Emission",
        "incentive": "Incentive",
        "consensus": "Consensus",
        "validator_trust": "ValidatorTrust",
        "dividends": "Dividends",
        "last_update": "LastUpdate",
        "validator_permit": "ValidatorPermit",
    }
    return {
        **{field: storage.column(item, netuid)[uid] for field, item in columns.items()},
        "hotkey": hotkey,
        "coldkey": coldkey,
        "uid": uid,
        "netuid": netuid,
        "axon_info": storage.get("Axons", netuid, hotkey),
        "stake": [[coldkey, staking.hotkey_alpha(storage, hotkey, netuid)]],
    }


def _neuron_lite(storage: Storage, netuid: int, uid: int) -> dict[str, Any] | None:
    return _neuron(storage, netuid, uid) if uid < storage.get("SubnetworkN", netuid) else None


def _neurons_lite(storage: Storage, netuid: int) -> list[dict[str, Any]]:
    return [_neuron(storage, netuid, uid) for uid in range(storage.get("SubnetworkN", netuid))]


def _neurons(storage: Storage, netuid: int) -> list[dict[str, Any]]:
    matrices = {"weights": "Weights", "bonds": "Bonds"}
    return [
        {**neuron, **{field: storage.get(item, netuid, neuron["uid"]) for field, item in matrices.items()}}
        for neuron in _neurons_lite(storage, netuid)
    ]


def _hyperparameters(storage: Storage, netuid: int) -> list[dict[str, Any]] | None:
    if not _exists(storage, netuid):
        return None
    entries = [
        {"name": knob.name.encode(), "value": {knob.tag: storage.get(knob.item, netuid)}} for knob in HYPERPARAMETERS
    ]
    cutoff = {"name": b"activity_cutoff", "value": {"U64": schedule.activity_cutoff(storage, netuid)}}
    return [*entries, cutoff]


def _stake_info(storage: Storage, hotkey: str, coldkey: str, netuid: int) -> dict[str, Any]:
    return {
        "hotkey": hotkey,
        "coldkey": coldkey,
        "netuid": netuid,
        "stake": staking.position(storage, hotkey, coldkey, netuid),
        "is_registered": storage.get("Uids", netuid, hotkey) is not None,
    }


def _stake_infos(storage: Storage, coldkey: str) -> list[dict[str, Any]]:
    infos = [
        _stake_info(storage, hotkey, coldkey, netuid)
        for hotkey in storage.get("StakingHotkeys", coldkey)
        for netuid in storage.netuids()
    ]
    return [info for info in infos if info["stake"]]


def _stake_infos_of_many(storage: Storage, coldkeys: list[str]) -> list[Any]:
    return [[coldkey, _stake_infos(storage, coldkey)] for coldkey in coldkeys]


def _stake_availability(
    storage: Storage, coldkeys: list[str], netuids: list[int] | None
) -> dict[str, dict[int, dict[str, int]]]:
    """What each coldkey has on each subnet; the devnet locks nothing."""
    found: dict[str, dict[int, dict[str, int]]] = {}
    for coldkey in coldkeys:
        by_netuid = found.setdefault(coldkey, {})
        for info in _stake_infos(storage, coldkey):
            if netuids is None or info["netuid"] in netuids:
                sums = by_netuid.setdefault(info["netuid"], {"total": 0, "locked": 0, "available": 0})
                sums["total"] += info["stake"]
                sums["available"] += info["stake"]
    return found


def _dynamic_info(storage: Storage, netuid: int) -> dict[str, Any] | None:
    graph = _metagraph(storage, netuid)
    if graph is None:
        return None
    return {**graph, "subnet_name": graph["name"], "token_symbol": graph["symbol"], "emission": yuma.ALPHA_PER_BLOCK}


def _all_dynamic_info(storage: Storage) -> list[dict[str, Any] | None]:
    return [_dynamic_info(storage, netuid) for netuid in storage.netuids() if netuid]


def _price(storage: Storage, netuid: int) -> int:
    return staking.STABLE_PRICE


def _all_prices(storage: Storage) -> list[dict[str, int]]:
    return [{"netuid": netuid, "price": staking.STABLE_PRICE} for netuid in storage.netuids()]


def _swap(storage: Storage, netuid: int, amount: int) -> dict[str, int]:
    return {"tao_amount": amount, "alpha_amount": amount}


def _auto_stake_hotkey(storage: Storage, coldkey: str, netuid: int) -> Any:
    return storage.get("AutoStakeDestination", coldkey, netuid)


def _block_emission(storage: Storage) -> int:
    return int(storage.get("BlockEmission"))


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "AccountNonceApi_account_nonce": balances.nonce,
    "NeuronInfoRuntimeApi_get_neuron_lite": _neuron_lite,
    "NeuronInfoRuntimeApi_get_neurons": _neurons,
    "NeuronInfoRuntimeApi_get_neurons_lite": _neurons_lite,
    "StakeInfoRuntimeApi_get_stake_info_for_coldkey": _stake_infos,
    "StakeInfoRuntimeApi_get_stake_info_for_coldkeys": _stake_infos_of_many,
    "StakeInfoRuntimeApi_get_stake_info_for_hotkey_coldkey_netuid": _stake_info,
    "StakeInfoRuntimeApi_get_stake_availability_for_coldkeys": _stake_availability,
    "SubnetInfoRuntimeApi_get_all_dynamic_info": _all_dynamic_info,
    "SubnetInfoRuntimeApi_get_all_metagraphs": _all_metagraphs,
    "SubnetInfoRuntimeApi_get_block_emission": _block_emission,
    "SubnetInfoRuntimeApi_get_coldkey_auto_stake_hotkey": _auto_stake_hotkey,
    "SubnetInfoRuntimeApi_get_dynamic_info": _dynamic_info,
    "SubnetInfoRuntimeApi_get_mechagraph": _mechagraph,
    "SubnetInfoRuntimeApi_get_metagraph": _metagraph,
    "SubnetInfoRuntimeApi_get_next_epoch_start_block": schedule.next_epoch_block,
    "SubnetInfoRuntimeApi_get_subnet_hyperparams_v3": _hyperparameters,
    "SubnetRegistrationRuntimeApi_get_network_registration_cost": subnets.creation_price,
    "SwapRuntimeApi_current_alpha_price": _price,
    "SwapRuntimeApi_current_alpha_price_all": _all_prices,
    "SwapRuntimeApi_sim_swap_alpha_for_tao": _swap,
    "SwapRuntimeApi_sim_swap_tao_for_alpha": _swap,
}


def answer(storage: Storage, name: str, data: bytes) -> bytes | None:
    """The SCALE answer of a runtime API call; None when the runtime has no such method.

    Methods of the metadata that the node does not model answer with the zero value of their type.
    """
    method = storage.codec.api(name)
    if method is None:
        return None
    respond = _ANSWERS.get(name)
    arguments = storage.codec.api_arguments(method, data) if respond else []
    value = respond(storage, *arguments) if respond else None
    return storage.codec.encode_filled(method.output, value)
