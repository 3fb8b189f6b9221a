"""Commitments: one record for each hotkey on each subnet, with a byte allowance for each tempo."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context

_MIN_CHARGE_BYTES = 100
"""Space that the smallest commitment uses up."""
_MAX_FIELDS = 3
_MAX_FIELD_BYTES = 512


def _size_bytes(field: Any) -> int:
    """Bytes of data in one field: raw bytes, a hash, or a sealed payload."""
    if not isinstance(field, dict):
        return 0
    (value,) = field.values()
    data = value["encrypted"] if isinstance(value, dict) else value
    if isinstance(data, str):  # the codec shows bytes as hex, or as text when they are text
        return len(data) // 2 - 1 if data.startswith("0x") else len(data.encode())
    return len(data)


def _set_commitment(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid, fields = args["netuid"], args["info"]["fields"]
    is_registered = ctx.get("Uids", netuid, who) is not None
    ctx.require(is_registered, "AccountNotAllowedCommit", pallet="Commitments")
    ctx.require(len(fields) <= _MAX_FIELDS, "TooManyFieldsInCommitmentInfo", pallet="Commitments")
    is_failed = any(isinstance(field, dict) and "TimelockRevealFailed" in field for field in fields)
    ctx.require(not is_failed, "TimelockRevealFailedNotAllowed", pallet="Commitments")
    sizes = [_size_bytes(field) for field in fields]
    ctx.require(max(sizes, default=0) <= _MAX_FIELD_BYTES, "SpaceLimitExceeded", pallet="Commitments")
    epoch = ctx.get("SubnetEpochIndex", netuid)
    usage = ctx.read("Commitments", "UsedSpaceOf", netuid, who) or {"last_epoch": epoch, "used_space": 0}
    used = usage["used_space"] if usage["last_epoch"] == epoch else 0
    used += max(_MIN_CHARGE_BYTES, sum(sizes))
    ctx.require(used <= ctx.read("Commitments", "MaxSpace"), "SpaceLimitExceeded", pallet="Commitments")
    ctx.write("Commitments", "UsedSpaceOf", {"last_epoch": epoch, "used_space": used}, netuid, who)
    record = {"deposit": 0, "block": ctx.block, "info": {"fields": fields}}
    ctx.write("Commitments", "CommitmentOf", record, netuid, who)
    ctx.write("Commitments", "LastCommitment", ctx.block, netuid, who)
    ctx.emit("Commitments", "Commitment", {"netuid": netuid, "who": who})


CALLS = {("Commitments", "set_commitment"): _set_commitment}
