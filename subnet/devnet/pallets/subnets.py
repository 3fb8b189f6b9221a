"""Subnets: creation, the owner's start call."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context
from subnet.devnet.hyperparameters import BY_NAME, DEVNET_HYPERPARAMETERS
from subnet.devnet.pallets import registration


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


def _start_call(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid = args["netuid"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("SubnetOwner", netuid) == who, "NotSubnetOwner")
    ctx.require(ctx.get("FirstEmissionBlockNumber", netuid) is None, "FirstEmissionBlockNumberAlreadySet")
    waited = ctx.block - ctx.get("NetworkRegisteredAt", netuid)
    ctx.require(waited >= ctx.get("StartCallDelay"), "NeedWaitingMoreBlocksToStarCall")
    start(ctx, netuid)


CALLS = {("SubtensorModule", "start_call"): _start_call}
