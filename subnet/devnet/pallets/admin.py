"""What a subnet's owner may change, and when: not in the last blocks of an epoch, not twice in a row (chain.md 3)."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet import schedule
from subnet.devnet.context import Context, DispatchFailure
from subnet.devnet.hyperparameters import BY_SETTER, Hyperparameter
from subnet.devnet.pallets import subnets

_RATE_LIMIT_INDEX = 1_000
"""Where the owner's last changes start among the indices of TransactionKeyLastBlock."""
_ALPHA_INDEX, _OWNER_HOTKEY_INDEX = 900, 901
"""The same for what is no single number."""
_MIN_TEMPO, _MAX_TEMPO = 360, 50_400
_LEAST_ALPHA_HIGH, _LEAST_ALPHA_LOW = 52_428, 1_638


def require_owner(ctx: Context, who: str, netuid: int) -> None:
    """Refuse anybody but the subnet's owner."""
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetDoesNotExist", pallet="AdminUtils")
    if ctx.get("SubnetOwner", netuid) != who:
        raise DispatchFailure.bad_origin()


def require_thawed(ctx: Context, netuid: int) -> None:
    """Refuse changes in the last blocks of an epoch, when validators have already decided on their weights."""
    due = schedule.next_epoch_block(ctx, netuid)
    is_frozen = due is not None and due - ctx.block < ctx.get("AdminFreezeWindow")
    ctx.require(not is_frozen, "AdminActionProhibitedDuringWeightsWindow")


def _set(ctx: Context, who: str, args: Mapping[str, Any], knob: Hyperparameter, index: int) -> None:
    netuid = args["netuid"]
    require_owner(ctx, who, netuid)
    if not knob.is_owners:
        raise DispatchFailure.bad_origin()
    require_thawed(ctx, netuid)
    (value,) = (given for name, given in args.items() if name != "netuid")
    raw = int(value["bits"]) if isinstance(value, dict) else int(value)
    _check_value(ctx, netuid, knob, raw)
    _count_change(ctx, who, netuid, index)
    subnets.set_knob(ctx, netuid, knob.name, raw)
    if knob.name == "tempo":
        ctx.put("LastEpochBlock", ctx.block, netuid)


def _count_change(ctx: Context, who: str, netuid: int, index: int) -> None:
    """Refuse a second change too soon after the first."""
    slot = _RATE_LIMIT_INDEX + index
    last = ctx.get("TransactionKeyLastBlock", who, netuid, slot)
    wait = ctx.get("OwnerHyperparamRateLimit") * ctx.get("Tempo", netuid)
    ctx.require(last == 0 or ctx.block - last >= wait, "TxRateLimitExceeded")
    ctx.put("TransactionKeyLastBlock", ctx.block, who, netuid, slot)


def _check_value(ctx: Context, netuid: int, knob: Hyperparameter, value: int) -> None:
    if knob.name == "tempo":
        ctx.require(_MIN_TEMPO <= value <= _MAX_TEMPO, "TempoOutOfBounds")
    if knob.name == "max_allowed_uids":
        num_neurons = ctx.get("SubnetworkN", netuid)
        ctx.require(value >= num_neurons, "MaxAllowedUIdsLessThanCurrentUIds", pallet="AdminUtils")


def _set_alpha_values(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """The range of liquid alpha, two numbers in one call."""
    netuid, low, high = args["netuid"], args["alpha_low"], args["alpha_high"]
    require_owner(ctx, who, netuid)
    require_thawed(ctx, netuid)
    ctx.require(ctx.get("LiquidAlphaOn", netuid), "LiquidAlphaDisabled")
    ctx.require(high >= _LEAST_ALPHA_HIGH, "AlphaHighTooLow")
    ctx.require(_LEAST_ALPHA_LOW <= low <= high, "AlphaLowOutOfRange")
    _count_change(ctx, who, netuid, _ALPHA_INDEX)
    ctx.put("AlphaValues", [low, high], netuid)


def _set_owner_hotkey(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """Name another of the owner's keys as the subnet's own."""
    netuid, hotkey = args["netuid"], args["hotkey"]
    require_owner(ctx, who, netuid)
    require_thawed(ctx, netuid)
    ctx.require(ctx.get("Owner", hotkey) == who, "NonAssociatedColdKey")
    _count_change(ctx, who, netuid, _OWNER_HOTKEY_INDEX)
    ctx.put("SubnetOwnerHotkey", hotkey, netuid)


def _trigger_epoch(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """Run the next epoch early: after the freeze window, so that validators still see it coming."""
    netuid = args["netuid"]
    require_owner(ctx, who, netuid)
    window = ctx.get("AdminFreezeWindow")
    ctx.require(not ctx.get("PendingEpochAt", netuid), "EpochTriggerAlreadyPending")
    due = schedule.next_epoch_block(ctx, netuid)
    ctx.require(due is not None and due - ctx.block > window, "AutoEpochAlreadyImminent")
    ctx.put("PendingEpochAt", ctx.block + window, netuid)
    event = {"netuid": netuid, "by": who, "fires_at": ctx.block + window}
    ctx.emit("SubtensorModule", "EpochTriggered", event)


def _setter(knob: Hyperparameter, index: int) -> Any:
    def handle(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
        _set(ctx, who, args, knob, index)

    return handle


CALLS = {
    **{("AdminUtils", setter): _setter(knob, index) for index, (setter, knob) in enumerate(BY_SETTER.items())},
    ("AdminUtils", "sudo_set_alpha_values"): _set_alpha_values,
    ("AdminUtils", "sudo_set_sn_owner_hotkey"): _set_owner_hotkey,
    ("SubtensorModule", "trigger_epoch"): _trigger_epoch,
}
