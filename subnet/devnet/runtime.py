"""Execution of one block: what begins it, extrinsics with fees and errors, what ends it."""

from collections.abc import Callable, Mapping
from typing import Any

from subnet.devnet import epoch
from subnet.devnet.codec import NO_ACCOUNT, Call, Codec
from subnet.devnet.context import Context, DispatchFailure, Storage
from subnet.devnet.extrinsics import Extrinsic, invalid
from subnet.devnet.pallets import (
    admin,
    balances,
    commit_reveal,
    commitments,
    registration,
    serving,
    shield,
    staking,
    subnets,
    swap,
    weights,
)
from subnet.devnet.scale import vector

Handler = Callable[[Context, str, Mapping[str, Any]], None]

CALLS: Mapping[tuple[str, str], Handler] = {
    **admin.CALLS,
    **balances.CALLS,
    **commit_reveal.CALLS,
    **commitments.CALLS,
    **registration.CALLS,
    **serving.CALLS,
    **shield.CALLS,
    **staking.CALLS,
    **subnets.CALLS,
    **swap.CALLS,
    **weights.CALLS,
}
"""Every call the node carries out; the others are filtered, as a runtime may filter calls."""

_COLDKEY_PAYS = {
    ("SubtensorModule", "set_weights"),
    ("SubtensorModule", "set_mechanism_weights"),
    ("SubtensorModule", "commit_timelocked_weights"),
    ("SubtensorModule", "commit_timelocked_mechanism_weights"),
    ("SubtensorModule", "serve_axon"),
    ("Commitments", "set_commitment"),
}
"""Calls of a hotkey whose fee the owning coldkey pays."""
_UNSIGNED_V5 = b"\x05"
_WEIGHT = {"ref_time": 224_051_000, "proof_size": 7_791}


def fee_payer(storage: Storage, signer: str, call: Call) -> str:
    """Who pays for a call: the signer, or for a hotkey's calls its coldkey."""
    if (call.pallet, call.function) not in _COLDKEY_PAYS:
        return signer
    owner = str(storage.get("Owner", signer))
    return signer if owner == NO_ACCOUNT else owner


def check_payment(storage: Storage, extrinsic: Extrinsic) -> None:
    """Raise PoolError when nobody can pay the fee."""
    payer = fee_payer(storage, extrinsic.signer, extrinsic.call)
    fee = balances.fee_of(len(extrinsic.raw)) + extrinsic.tip
    if balances.free(storage, payer) < fee:
        raise invalid(f"Inability to pay some fees (e.g. account balance too low): {payer} needs {fee} rao")


def begin_block(ctx: Context) -> bytes:
    """Timestamp, prices, emission and epochs. Returns the timestamp inherent, extrinsic 0 of every block."""
    ctx.write("System", "Number", ctx.block)
    ctx.write("Timestamp", "Now", ctx.now_ms)
    for netuid in ctx.netuids():
        if netuid:
            registration.start_block(ctx, netuid)
            epoch.begin_block(ctx, netuid)
    ctx.extrinsic = 0
    info = {"weight": _WEIGHT, "class": "Mandatory", "pays_fee": "Yes"}
    ctx.emit("System", "ExtrinsicSuccess", {"dispatch_info": info})
    ctx.extrinsic = None
    return vector(_UNSIGNED_V5 + ctx.codec.compose("Timestamp", "set", {"now": ctx.now_ms}))


def apply_extrinsic(ctx: Context, extrinsic: Extrinsic, *, index: int) -> None:
    """Charge the fee, count the nonce, carry the call out; a refusal undoes the call but not the fee."""
    ctx.extrinsic = index
    payer = fee_payer(ctx, extrinsic.signer, extrinsic.call)
    fee = balances.fee_of(len(extrinsic.raw)) + extrinsic.tip
    balances.use_nonce(ctx, extrinsic.signer)
    balances.charge(ctx, payer, fee)
    num_events = len(ctx.events)
    info = {"weight": _WEIGHT, "class": "Normal", "pays_fee": "Yes"}
    outcome: tuple[str, Any] = ("ExtrinsicSuccess", {"dispatch_info": info})
    ctx.state.begin()
    try:
        _dispatch(ctx, extrinsic)
    except DispatchFailure as failure:
        ctx.state.rollback()
        del ctx.events[num_events:]
        outcome = ("ExtrinsicFailed", {"dispatch_error": _dispatch_error(ctx, failure), "dispatch_info": info})
    else:
        ctx.state.commit()
    paid = {"who": payer, "actual_fee": fee, "tip": extrinsic.tip}
    ctx.emit("TransactionPayment", "TransactionFeePaid", paid)
    ctx.emit("System", *outcome)
    ctx.extrinsic = None


def _dispatch_error(ctx: Context, failure: DispatchFailure) -> Any:
    """A refusal as events show it: a pallet's error by its indices, the others by name."""
    if not failure.pallet:
        return failure.name
    pallet, error = ctx.codec.error_index(failure.pallet, failure.name)
    return {"Module": {"index": pallet, "error": f"0x{error:02x}000000"}}


def _dispatch(ctx: Context, extrinsic: Extrinsic) -> None:
    call = extrinsic.call
    handler = CALLS.get((call.pallet, call.function))
    if handler is None:
        raise DispatchFailure("CallFiltered", pallet="System")
    handler(ctx, extrinsic.signer, call.args)


def end_block(ctx: Context) -> None:
    """Publish the block's events."""
    ctx.write("System", "Events", ctx.events)


def payment_info(codec: Codec, type_string: str, size_bytes: int) -> bytes:
    """What an extrinsic of this size would cost, as the runtime API answers."""
    info = {"weight": _WEIGHT, "class": "Normal", "partial_fee": balances.fee_of(size_bytes)}
    return codec.encode(type_string, info)
