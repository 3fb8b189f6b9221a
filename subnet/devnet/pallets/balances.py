"""TAO accounts: free balance, nonce, transfers, fees."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context, DispatchFailure, Storage

EXISTENTIAL_DEPOSIT = 500
"""Rao below which an account cannot exist."""
_BASE_FEE = 50_000
_FEE_PER_BYTE = 500


def fee_of(size_bytes: int) -> int:
    """Rao that an extrinsic of this size costs."""
    return _BASE_FEE + _FEE_PER_BYTE * size_bytes


def free(storage: Storage, who: str) -> int:
    """Free rao of an account."""
    return int(storage.read("System", "Account", who)["data"]["free"])


def nonce(storage: Storage, who: str) -> int:
    """Number of the next extrinsic of an account."""
    return int(storage.read("System", "Account", who)["nonce"])


def use_nonce(ctx: Context, who: str) -> None:
    """Count one extrinsic of an account."""
    account = ctx.read("System", "Account", who)
    ctx.write("System", "Account", {**account, "nonce": account["nonce"] + 1}, who)


def deposit(ctx: Context, who: str, rao: int) -> None:
    """Add to an account."""
    _set_free(ctx, who, free(ctx, who) + rao)


def withdraw(ctx: Context, who: str, rao: int) -> None:
    """Take from an account; the caller has checked that it is there."""
    _set_free(ctx, who, free(ctx, who) - rao)


def issue(ctx: Context, rao: int) -> None:
    """Change the total issuance (negative: recycled)."""
    ctx.put("TotalIssuance", ctx.get("TotalIssuance") + rao)
    ctx.write("Balances", "TotalIssuance", ctx.read("Balances", "TotalIssuance") + rao)


def charge(ctx: Context, who: str, rao: int) -> None:
    """Take a transaction fee, which is recycled."""
    withdraw(ctx, who, rao)
    issue(ctx, -rao)


def _set_free(ctx: Context, who: str, rao: int) -> None:
    account = ctx.read("System", "Account", who)
    ctx.write("System", "Account", {**account, "providers": 1, "data": {**account["data"], "free": rao}}, who)


def _move(ctx: Context, source: str, target: Any, rao: int, *, floor: int) -> None:
    if not isinstance(target, str):
        raise DispatchFailure("CallFiltered", pallet="System")
    available = free(ctx, source)
    ctx.require(available >= rao, "InsufficientBalance", pallet="Balances")
    ctx.require(available - rao >= floor, "Expendability", pallet="Balances")
    ctx.require(free(ctx, target) + rao >= EXISTENTIAL_DEPOSIT, "ExistentialDeposit", pallet="Balances")
    withdraw(ctx, source, rao)
    deposit(ctx, target, rao)
    ctx.emit("Balances", "Transfer", {"from": source, "to": target, "amount": rao})


def _transfer_keep_alive(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    _move(ctx, who, args["dest"], args["value"], floor=EXISTENTIAL_DEPOSIT)


def _transfer_allow_death(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    _move(ctx, who, args["dest"], args["value"], floor=0)


def _transfer_all(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    floor = EXISTENTIAL_DEPOSIT if args["keep_alive"] else 0
    _move(ctx, who, args["dest"], max(0, free(ctx, who) - floor), floor=floor)


def _remark(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """A call that does nothing but pay its fee."""


CALLS = {
    ("Balances", "transfer_keep_alive"): _transfer_keep_alive,
    ("Balances", "transfer_allow_death"): _transfer_allow_death,
    ("Balances", "transfer_all"): _transfer_all,
    ("System", "remark"): _remark,
}
