"""Neurons: registration against a moving price, and who makes room on a full subnet."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.codec import NO_ACCOUNT
from subnet.devnet.context import Context, DispatchFailure
from subnet.devnet.pallets import balances

NEURON_COLUMNS: Mapping[str, Any] = {
    "Active": True,
    "Emission": 0,
    "Consensus": 0,
    "Dividends": 0,
    "ValidatorTrust": 0,
    "ValidatorPermit": False,
    "Incentive": 0,
}
"""Per-neuron vectors and what a new neuron has in them; LastUpdate starts at the block of registration."""
_FIXED_ONE = 1 << 64


def register_neuron(ctx: Context, netuid: int, hotkey: str) -> int:
    """Give a hotkey a uid: the next one, or that of the neuron that has to go."""
    num_neurons = ctx.get("SubnetworkN", netuid)
    if num_neurons < ctx.get("MaxAllowedUids", netuid):
        uid = num_neurons
        ctx.put("SubnetworkN", num_neurons + 1, netuid)
        for item, initial in {**NEURON_COLUMNS, "LastUpdate": ctx.block}.items():
            ctx.put(item, [*ctx.column(item, netuid), initial], netuid)
    else:
        uid = _uid_to_prune(ctx, netuid)
        _clear_neuron(ctx, netuid, uid)
    ctx.put("Uids", uid, netuid, hotkey)
    ctx.put("Keys", hotkey, netuid, uid)
    ctx.put("IsNetworkMember", True, hotkey, netuid)
    ctx.put("BlockAtRegistration", ctx.block, netuid, uid)
    ctx.emit("SubtensorModule", "NeuronRegistered", [netuid, uid, hotkey])
    return int(uid)


def own_hotkey(ctx: Context, coldkey: str, hotkey: str) -> None:
    """Tie a hotkey to its coldkey at first sight; another coldkey's hotkey is refused."""
    owner = ctx.get("Owner", hotkey)
    if owner == NO_ACCOUNT:
        ctx.put("Owner", coldkey, hotkey)
        ctx.put("OwnedHotkeys", [*ctx.get("OwnedHotkeys", coldkey), hotkey], coldkey)
        return
    ctx.require(owner == coldkey, "NonAssociatedColdKey")


def decay_price(ctx: Context, netuid: int) -> None:
    """One block of the price's exponential decay towards its floor."""
    price, floor = ctx.get("Burn", netuid), ctx.get("MinBurn", netuid)
    half_life = ctx.get("BurnHalfLife", netuid)
    if price > floor and half_life:
        ctx.put("Burn", max(floor, int(price * 0.5 ** (1 / half_life))), netuid)


def start_block(ctx: Context, netuid: int) -> None:
    """What each block begins with: the price decays, the count of registrations starts over."""
    decay_price(ctx, netuid)
    ctx.put("RegistrationsThisBlock", 0, netuid)


def _burned_register(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid, hotkey = args["netuid"], args["hotkey"]
    ctx.require(netuid != 0, "RegistrationNotPermittedOnRootSubnet")
    ctx.require(ctx.get("NetworksAdded", netuid), "SubnetNotExists")
    ctx.require(ctx.get("NetworkRegistrationAllowed", netuid), "SubNetRegistrationDisabled")
    registered = ctx.get("RegistrationsThisBlock", netuid)
    ctx.require(registered < ctx.get("MaxRegistrationsPerBlock", netuid), "TooManyRegistrationsThisBlock")
    ctx.require(ctx.get("Uids", netuid, hotkey) is None, "HotKeyAlreadyRegisteredInSubNet")
    price = ctx.get("Burn", netuid)
    ctx.require(balances.free(ctx, who) >= price + balances.EXISTENTIAL_DEPOSIT, "NotEnoughBalanceToStake")
    ctx.require(ctx.get("MaxAllowedUids", netuid) > 0, "NoNeuronIdAvailable")
    own_hotkey(ctx, who, hotkey)
    balances.withdraw(ctx, who, price)
    balances.issue(ctx, -price)
    ctx.put("RAORecycledForRegistration", ctx.get("RAORecycledForRegistration", netuid) + price, netuid)
    register_neuron(ctx, netuid, hotkey)
    ctx.put("RegistrationsThisBlock", registered + 1, netuid)
    raised = price * ctx.get("BurnIncreaseMult", netuid)["bits"] // _FIXED_ONE
    ctx.put("Burn", min(max(raised, ctx.get("MinBurn", netuid)), ctx.get("MaxBurn", netuid)), netuid)


def _uid_to_prune(ctx: Context, netuid: int) -> int:
    """Lowest emission first, then oldest registration, then lowest uid; immune neurons only when all are.

    The owner's neuron is never pruned.
    """
    emission = ctx.column("Emission", netuid)
    immunity = ctx.get("ImmunityPeriod", netuid)
    owner_uid = ctx.get("Uids", netuid, ctx.get("SubnetOwnerHotkey", netuid))
    candidates = []
    for uid in range(ctx.get("SubnetworkN", netuid)):
        registered = ctx.get("BlockAtRegistration", netuid, uid)
        if uid != owner_uid:
            candidates.append((ctx.block - registered < immunity, emission[uid], registered, uid))
    if not candidates:
        raise DispatchFailure("NoNeuronIdAvailable")
    return min(candidates)[-1]


def _clear_neuron(ctx: Context, netuid: int, uid: int) -> None:
    """Take from a uid everything its last holder had: a successor inherits nothing."""
    old = ctx.get("Keys", netuid, uid)
    ctx.put("Uids", None, netuid, old)
    ctx.put("IsNetworkMember", None, old, netuid)
    ctx.put("Axons", None, netuid, old)
    ctx.put("Weights", None, netuid, uid)
    ctx.put("Bonds", None, netuid, uid)
    for item, initial in {**NEURON_COLUMNS, "LastUpdate": ctx.block}.items():
        ctx.put_at(item, netuid, uid, initial)


CALLS = {("SubtensorModule", "burned_register"): _burned_register}
