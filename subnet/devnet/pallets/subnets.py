"""Subnets: creation at a price that doubles each time, identity, the owner's start call."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context, Storage
from subnet.devnet.hyperparameters import BY_NAME, DEVNET_HYPERPARAMETERS
from subnet.devnet.pallets import balances, registration

_LAST_CREATED = "NetworkLastRegistered"
"""Key of LastRateLimitedBlock under which the block of the newest subnet stands."""


def create(
    ctx: Context, netuid: int, coldkey: str, hotkey: str, *, name: str, knobs: Mapping[str, int] | None = None
) -> None:
    """A new subnet, not started, with its owner's hotkey as uid 0."""
    ctx.put("NetworksAdded", True, netuid)
    ctx.put("TotalNetworks", ctx.get("TotalNetworks") + 1)
    ctx.put("NetworkRegisteredAt", ctx.block, netuid)
    ctx.put("SubnetOwner", coldkey, netuid)
    ctx.put("SubnetOwnerHotkey", hotkey, netuid)
    ctx.put("LastEpochBlock", ctx.block, netuid)
    ctx.put("SubtokenEnabled", False, netuid)
    ctx.put("SubnetIdentitiesV3", {"subnet_name": name.encode()}, netuid)
    for item in (*registration.NEURON_COLUMNS, "LastUpdate"):
        ctx.put(item, [], netuid)
    for knob, value in {**DEVNET_HYPERPARAMETERS, **(knobs or {})}.items():
        set_knob(ctx, netuid, knob, value)
    registration.own_hotkey(ctx, coldkey, hotkey)
    registration.register_neuron(ctx, netuid, hotkey)
    ctx.emit("SubtensorModule", "NetworkAdded", [netuid, 0])


def set_knob(ctx: Context, netuid: int, name: str, value: int) -> None:
    """Store a hyperparameter given as a raw number."""
    knob = BY_NAME[name]
    typed = bool(value) if knob.tag == "Bool" else {"bits": value} if knob.tag == "U64F64" else value
    ctx.put(knob.item, typed, netuid)


def start(ctx: Context, netuid: int) -> None:
    """Open a subnet for stake and emission."""
    ctx.put("SubtokenEnabled", True, netuid)
    ctx.put("FirstEmissionBlockNumber", ctx.block + 1, netuid)
    ctx.emit("SubtensorModule", "FirstEmissionBlockNumberSet", [netuid, ctx.block + 1])


def creation_price(storage: Storage) -> int:
    """Rao that a new subnet costs: twice the last price, falling in a straight line to the floor."""
    floor, last = storage.get("NetworkMinLockCost"), storage.get("NetworkLastLockCost")
    created = storage.get("LastRateLimitedBlock", _LAST_CREATED)
    if not created:
        return int(max(floor, last))
    fallen = last * (storage.read("System", "Number") - created) // storage.get("NetworkLockReductionInterval")
    return int(max(floor, 2 * last - fallen))


def _register_network(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """A subnet of the caller's. What it costs becomes the subnet's reserve; there is no queue for a place."""
    created, wait = ctx.get("LastRateLimitedBlock", _LAST_CREATED), ctx.get("NetworkRateLimit")
    ctx.require(not created or ctx.block - created >= wait, "NetworkTxRateLimitExceeded")
    netuids = ctx.netuids()
    ctx.require(len(netuids) <= ctx.get("SubnetLimit"), "SubnetLimitReached")
    price = creation_price(ctx)
    ctx.require(balances.free(ctx, who) >= price + balances.EXISTENTIAL_DEPOSIT, "CannotAffordLockCost")
    netuid = next(number for number in range(1, len(netuids) + 1) if number not in netuids)
    balances.withdraw(ctx, who, price)
    ctx.put("SubnetTAO", ctx.get("SubnetTAO", netuid) + price, netuid)
    ctx.put("TotalStake", ctx.get("TotalStake") + price)
    ctx.put("SubnetLocked", price, netuid)
    ctx.put("NetworkLastLockCost", price)
    ctx.put("LastRateLimitedBlock", ctx.block, _LAST_CREATED)
    create(ctx, netuid, who, args["hotkey"], name=f"subnet {netuid}")
    if args.get("identity"):
        ctx.put("SubnetIdentitiesV3", args["identity"], netuid)


def _set_identity(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid = args["netuid"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("SubnetOwner", netuid) == who, "NotSubnetOwner")
    ctx.put("SubnetIdentitiesV3", {name: value for name, value in args.items() if name != "netuid"}, netuid)
    ctx.emit("SubtensorModule", "SubnetIdentitySet", netuid)


def _start_call(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid = args["netuid"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("SubnetOwner", netuid) == who, "NotSubnetOwner")
    ctx.require(ctx.get("FirstEmissionBlockNumber", netuid) is None, "FirstEmissionBlockNumberAlreadySet")
    waited = ctx.block - ctx.get("NetworkRegisteredAt", netuid)
    ctx.require(waited >= ctx.get("StartCallDelay"), "NeedWaitingMoreBlocksToStarCall")
    start(ctx, netuid)


CALLS = {
    ("SubtensorModule", "register_network"): _register_network,
    ("SubtensorModule", "register_network_with_identity"): _register_network,
    ("SubtensorModule", "set_subnet_identity"): _set_identity,
    ("SubtensorModule", "start_call"): _start_call,
}
