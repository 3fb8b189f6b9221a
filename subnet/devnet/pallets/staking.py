"""Stake: TAO in and out of a subnet, and each hotkey's pool of alpha shared by its coldkeys.

The devnet's subnets use the runtime's stable mechanism: one TAO buys one alpha, without slippage.
"""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.codec import NO_ACCOUNT
from subnet.devnet.context import Context, Storage
from subnet.devnet.pallets import balances

MIN_STAKE = 2_000_000
"""Smallest stake operation in rao."""
STABLE_PRICE = 1_000_000_000
"""Rao of TAO for one alpha, on the stable mechanism."""
_ONE_SHARE = 1 << 64
"""Shares are fixed-point numbers with 64 fractional bits."""


def hotkey_alpha(storage: Storage, hotkey: str, netuid: int) -> int:
    """All alpha (rao) staked on a hotkey."""
    return int(storage.get("TotalHotkeyAlpha", hotkey, netuid))


def position(storage: Storage, hotkey: str, coldkey: str, netuid: int) -> int:
    """Alpha (rao) that one coldkey has on a hotkey."""
    shares = storage.get("Alpha", hotkey, coldkey, netuid)["bits"]
    total_shares = storage.get("TotalHotkeyShares", hotkey, netuid)["bits"]
    if not total_shares:
        return 0
    total = hotkey_alpha(storage, hotkey, netuid)
    return min(total, int((2 * total * shares + total_shares) // (2 * total_shares)))


def add_to_position(ctx: Context, hotkey: str, coldkey: str, netuid: int, rao: int) -> None:
    """Mint alpha into one coldkey's share of a hotkey's pool."""
    if rao <= 0:
        return
    total = hotkey_alpha(ctx, hotkey, netuid)
    total_shares = ctx.get("TotalHotkeyShares", hotkey, netuid)["bits"]
    shares = rao * total_shares // total if total and total_shares else rao * _ONE_SHARE
    held = ctx.get("Alpha", hotkey, coldkey, netuid)["bits"]
    ctx.put("Alpha", {"bits": held + shares}, hotkey, coldkey, netuid)
    ctx.put("TotalHotkeyShares", {"bits": total_shares + shares}, hotkey, netuid)
    hotkeys = list(ctx.get("StakingHotkeys", coldkey))
    if hotkey not in hotkeys:
        ctx.put("StakingHotkeys", [*hotkeys, hotkey], coldkey)
    _mint(ctx, hotkey, netuid, rao)


def add_to_pool(ctx: Context, hotkey: str, netuid: int, rao: int) -> None:
    """Mint alpha for everyone who stakes on a hotkey, by share; to its owner when nobody does."""
    if ctx.get("TotalHotkeyShares", hotkey, netuid)["bits"]:
        _mint(ctx, hotkey, netuid, rao)
    else:
        add_to_position(ctx, hotkey, ctx.get("Owner", hotkey), netuid, rao)


def take_from_position(ctx: Context, hotkey: str, coldkey: str, netuid: int, rao: int) -> None:
    """Burn alpha of one coldkey's share; the caller has checked that it is there."""
    held = ctx.get("Alpha", hotkey, coldkey, netuid)["bits"]
    total_shares = ctx.get("TotalHotkeyShares", hotkey, netuid)["bits"]
    total = hotkey_alpha(ctx, hotkey, netuid)
    is_all = rao >= position(ctx, hotkey, coldkey, netuid)
    shares = held if is_all else min(held, rao * total_shares // total)
    ctx.put("Alpha", {"bits": held - shares} if held > shares else None, hotkey, coldkey, netuid)
    ctx.put("TotalHotkeyShares", {"bits": total_shares - shares}, hotkey, netuid)
    _mint(ctx, hotkey, netuid, -rao)


def _mint(ctx: Context, hotkey: str, netuid: int, rao: int) -> None:
    ctx.put("TotalHotkeyAlpha", hotkey_alpha(ctx, hotkey, netuid) + rao, hotkey, netuid)
    ctx.put("SubnetAlphaOut", ctx.get("SubnetAlphaOut", netuid) + rao, netuid)


def _add_stake(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    hotkey, netuid, rao = args["hotkey"], args["netuid"], args["amount_staked"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("SubtokenEnabled", netuid), "SubtokenDisabled")
    ctx.require(rao >= MIN_STAKE, "AmountTooLow")
    ctx.require(balances.free(ctx, who) >= rao + balances.EXISTENTIAL_DEPOSIT, "NotEnoughBalanceToStake")
    ctx.require(ctx.get("Owner", hotkey) != NO_ACCOUNT, "HotKeyAccountNotExists")
    ctx.require(args.get("limit_price", STABLE_PRICE) >= STABLE_PRICE, "SlippageTooHigh")
    balances.withdraw(ctx, who, rao)
    ctx.put("SubnetTAO", ctx.get("SubnetTAO", netuid) + rao, netuid)
    ctx.put("TotalStake", ctx.get("TotalStake") + rao)
    add_to_position(ctx, hotkey, who, netuid, rao)
    ctx.emit("SubtensorModule", "StakeAdded", [who, hotkey, rao, rao, netuid, 0])


def _remove_stake(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    hotkey, netuid, rao = args["hotkey"], args["netuid"], args["amount_unstaked"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("SubtokenEnabled", netuid), "SubtokenDisabled")
    ctx.require(ctx.get("Owner", hotkey) != NO_ACCOUNT, "HotKeyAccountNotExists")
    ctx.require(0 < rao <= position(ctx, hotkey, who, netuid), "NotEnoughStakeToWithdraw")
    ctx.require(args.get("limit_price", STABLE_PRICE) <= STABLE_PRICE, "SlippageTooHigh")
    reserve = ctx.get("SubnetTAO", netuid)
    ctx.require(reserve >= rao, "InsufficientLiquidity")
    take_from_position(ctx, hotkey, who, netuid, rao)
    ctx.put("SubnetTAO", reserve - rao, netuid)
    ctx.put("TotalStake", ctx.get("TotalStake") - rao)
    balances.deposit(ctx, who, rao)
    ctx.emit("SubtensorModule", "StakeRemoved", [who, hotkey, rao, rao, netuid, 0])


def _set_auto_stake(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid, hotkey = args["netuid"], args["hotkey"]
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("Uids", netuid, hotkey) is not None, "HotKeyNotRegisteredInSubNet")
    ctx.require(ctx.get("AutoStakeDestination", who, netuid) != hotkey, "SameAutoStakeHotkeyAlreadySet")
    ctx.put("AutoStakeDestination", hotkey, who, netuid)
    event = {"coldkey": who, "netuid": netuid, "hotkey": hotkey}
    ctx.emit("SubtensorModule", "AutoStakeDestinationSet", event)


CALLS = {
    ("SubtensorModule", "add_stake"): _add_stake,
    ("SubtensorModule", "add_stake_limit"): _add_stake,
    ("SubtensorModule", "remove_stake"): _remove_stake,
    ("SubtensorModule", "remove_stake_limit"): _remove_stake,
    ("SubtensorModule", "set_coldkey_auto_stake_hotkey"): _set_auto_stake,
}
