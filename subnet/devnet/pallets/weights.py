"""Weights: every check of the runtime, in the runtime's order (chain.md 2)."""

from collections.abc import Mapping, Sequence
from typing import Any

from subnet.devnet.context import Context
from subnet.devnet.pallets import staking

U16_MAX = 65_535
MECHANISMS = 1
"""Every devnet subnet has one mechanism, so its storage index is the netuid."""


def stored(uids: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """Weights as stored: scaled so that the largest is 65,535."""
    largest = max(values, default=0)
    if largest == 0:
        return [[uid, 0] for uid in uids]
    return [[uid, round(value * U16_MAX / largest)] for uid, value in zip(uids, values, strict=True)]


def apply_weights(
    ctx: Context,
    netuid: int,
    hotkey: str,
    uids: Sequence[int],
    values: Sequence[int],
    *,
    version_key: int,
    is_reveal: bool,
) -> None:
    """Check and store one validator's weights; a reveal was rate-limited and dated when it was committed."""
    ctx.require(len(uids) == len(values), "WeightVecNotEqualSize")
    ctx.require(ctx.get("NetworksAdded", netuid), "MechanismDoesNotExist")
    num_neurons = ctx.get("SubnetworkN", netuid)
    ctx.require(len(uids) <= num_neurons, "UidsLengthExceedUidsInSubNet")
    uid = ctx.get("Uids", netuid, hotkey)
    ctx.require(uid is not None, "HotKeyNotRegisteredInSubNet")
    has_stake = staking.hotkey_alpha(ctx, hotkey, netuid) >= ctx.get("StakeThreshold")
    ctx.require(has_stake, "NotEnoughStakeToSetWeights")
    required = ctx.get("WeightsVersionKey", netuid)
    ctx.require(required == 0 or version_key >= required, "IncorrectWeightVersionKey")
    if not is_reveal:
        check_rate(ctx, netuid, uid, "SettingWeightsTooFast")
    _check_targets(ctx, netuid, hotkey, uid, uids)
    row = stored(uids, values)
    _check_limit(ctx, netuid, uid, row)
    ctx.put("Weights", row, netuid, uid)
    if not is_reveal:
        ctx.put_at("LastUpdate", netuid, uid, ctx.block)
    ctx.emit("SubtensorModule", "WeightsSet", [netuid, uid])


def check_rate(ctx: Context, netuid: int, uid: int, error: str) -> None:
    """Refuse a second update too soon after the first."""
    last = ctx.column("LastUpdate", netuid)[uid]
    ctx.require(last == 0 or ctx.block - last >= ctx.get("WeightsSetRateLimit", netuid), error)


def _check_targets(ctx: Context, netuid: int, hotkey: str, uid: int, uids: Sequence[int]) -> None:
    is_self_weight = list(uids) == [uid]
    is_owner = hotkey == ctx.get("SubnetOwnerHotkey", netuid)
    has_permit = is_self_weight or is_owner or ctx.column("ValidatorPermit", netuid)[uid]
    ctx.require(has_permit, "NeuronNoValidatorPermit")
    ctx.require(len(set(uids)) == len(uids), "DuplicateUids")
    num_neurons = ctx.get("SubnetworkN", netuid)
    ctx.require(all(target < num_neurons for target in uids), "UidVecContainInvalidOne")
    minimum = min(num_neurons, ctx.get("MinAllowedWeights", netuid))
    ctx.require(is_self_weight or len(uids) >= minimum, "WeightVecLengthIsLow")


def _check_limit(ctx: Context, netuid: int, uid: int, row: Sequence[Sequence[int]]) -> None:
    values = [value for _, value in row]
    if [target for target, _ in row] == [uid] or not any(values):
        return
    limit = ctx.get("MaxWeightsLimit", netuid)
    ctx.require(max(values) * U16_MAX <= limit * sum(values), "MaxWeightExceeded")


def _set_weights(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid = args["netuid"]
    ctx.require(args.get("mecid", 0) < MECHANISMS, "MechanismDoesNotExist")
    ctx.require(not ctx.get("CommitRevealWeightsEnabled", netuid), "CommitRevealEnabled")
    uids, values, version_key = args["dests"], args["weights"], args["version_key"]
    apply_weights(ctx, netuid, who, uids, values, version_key=version_key, is_reveal=False)


CALLS = {
    ("SubtensorModule", "set_weights"): _set_weights,
    ("SubtensorModule", "set_mechanism_weights"): _set_weights,
}
