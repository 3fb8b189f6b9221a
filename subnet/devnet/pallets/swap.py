"""Hotkey swap: another key takes over a neuron, with its uid, stake, weights and endpoint."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context
from subnet.devnet.pallets import balances, registration

_COST_EVERYWHERE = 100_000_000
_COST_ON_SUBNET = 1_000_000


def _swap_hotkey(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    old, new, netuid = args["hotkey"], args["new_hotkey"], args["netuid"]
    ctx.require(ctx.get("Owner", old) == who, "NonAssociatedColdKey")
    ctx.require(old != new, "NewHotKeyIsSameWithOld")
    netuids = [netuid] if netuid is not None else [n for n in ctx.netuids() if n]
    members = [n for n in netuids if ctx.get("Uids", n, old) is not None]
    if netuid is not None:
        ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
        ctx.require(bool(members), "HotKeyNotRegisteredInSubNet")
    is_new = all(ctx.get("Uids", n, new) is None for n in netuids)
    ctx.require(is_new, "HotKeyAlreadyRegisteredInSubNet")
    cost = _COST_EVERYWHERE if netuid is None else _COST_ON_SUBNET
    has_cost = balances.free(ctx, who) >= cost + balances.EXISTENTIAL_DEPOSIT
    ctx.require(has_cost, "NotEnoughBalanceToPaySwapHotKey")
    balances.charge(ctx, who, cost)
    registration.own_hotkey(ctx, who, new)
    for member in members:
        _swap_on(ctx, member, old, new)
        event = {"coldkey": who, "old_hotkey": old, "new_hotkey": new, "netuid": member}
        ctx.emit("SubtensorModule", "HotkeySwappedOnSubnet", event)


def _swap_on(ctx: Context, netuid: int, old: str, new: str) -> None:
    uid = ctx.get("Uids", netuid, old)
    ctx.put("Uids", None, netuid, old)
    ctx.put("Uids", uid, netuid, new)
    ctx.put("Keys", new, netuid, uid)
    ctx.put("IsNetworkMember", None, old, netuid)
    ctx.put("IsNetworkMember", True, new, netuid)
    ctx.put("Axons", ctx.get("Axons", netuid, old), netuid, new)
    ctx.put("Axons", None, netuid, old)
    if ctx.get("SubnetOwnerHotkey", netuid) == old:
        ctx.put("SubnetOwnerHotkey", new, netuid)
    _move_stake(ctx, netuid, old, new)


def _move_stake(ctx: Context, netuid: int, old: str, new: str) -> None:
    """Every coldkey's share follows to the new key, which has none yet on this subnet or is joined to it."""
    for (_, coldkey, at_netuid), shares in ctx.entries("SubtensorModule", "Alpha", old):
        if at_netuid != netuid:
            continue
        held = ctx.get("Alpha", new, coldkey, netuid)["bits"]
        ctx.put("Alpha", {"bits": held + shares["bits"]}, new, coldkey, netuid)
        ctx.put("Alpha", None, old, coldkey, netuid)
        hotkeys = list(ctx.get("StakingHotkeys", coldkey))
        ctx.put("StakingHotkeys", [*hotkeys, *([] if new in hotkeys else [new])], coldkey)
    for item in ("TotalHotkeyAlpha", "TotalHotkeyShares"):
        mine, theirs = ctx.get(item, old, netuid), ctx.get(item, new, netuid)
        total = mine + theirs if isinstance(mine, int) else {"bits": mine["bits"] + theirs["bits"]}
        ctx.put(item, total, new, netuid)
        ctx.put(item, None, old, netuid)


CALLS = {
    ("SubtensorModule", "swap_hotkey"): _swap_hotkey,
    ("SubtensorModule", "swap_hotkey_v2"): _swap_hotkey,
}
