"""Tempo epochs: emission accrues each block, Yuma divides it, alpha is credited as stake (chain.md 3, 4)."""

import numpy as np

from subnet import yuma
from subnet.devnet import schedule
from subnet.devnet.context import Context, Storage
from subnet.devnet.pallets import commit_reveal, staking

U16_MAX = 65_535


def accrue(ctx: Context, netuid: int) -> None:
    """Add one block's emission to what is pending; a subnet that was never started accrues nothing."""
    first = ctx.get("FirstEmissionBlockNumber", netuid)
    if first is None or ctx.block < first:
        return
    cut = ctx.get("SubnetOwnerCut") if ctx.get("OwnerCutEnabled", netuid) else 0
    block = yuma.block_emission(cut)
    ctx.put("PendingOwnerCut", ctx.get("PendingOwnerCut", netuid) + block.owner, netuid)
    ctx.put("PendingServerEmission", ctx.get("PendingServerEmission", netuid) + block.server, netuid)
    ctx.put("PendingValidatorEmission", ctx.get("PendingValidatorEmission", netuid) + block.validator, netuid)


def run_epoch(ctx: Context, netuid: int) -> None:
    """One epoch: consensus over the stored weights, pay, new permits, and the schedule moves on."""
    result = _consensus(ctx, netuid)
    pending = _drain(ctx, netuid)
    _store(ctx, netuid, result)
    _pay(ctx, netuid, result, pending)
    ctx.put("LastEpochBlock", ctx.block, netuid)
    ctx.put("LastMechansimStepBlock", ctx.block, netuid)
    ctx.put("PendingEpochAt", 0, netuid)
    ctx.put("SubnetEpochIndex", ctx.get("SubnetEpochIndex", netuid) + 1, netuid)
    ctx.put("BlocksSinceLastStep", 0, netuid)


def consensus_input(storage: Storage, netuid: int, *, block: int) -> yuma.YumaInput:
    """The subnet as Yuma sees it."""
    num_neurons = storage.get("SubnetworkN", netuid)
    hotkeys = [storage.get("Keys", netuid, uid) for uid in range(num_neurons)]
    registered = [storage.get("BlockAtRegistration", netuid, uid) for uid in range(num_neurons)]
    last_update = storage.column("LastUpdate", netuid)
    cutoff = schedule.activity_cutoff(storage, netuid)
    weights = np.zeros((num_neurons, num_neurons))
    bonds = np.zeros((num_neurons, num_neurons))
    for uid in range(num_neurons):
        for matrix, item in ((weights, "Weights"), (bonds, "Bonds")):
            for target, value in storage.get(item, netuid, uid):
                if target < num_neurons:
                    matrix[uid, target] = value
    registered_n = np.array(registered, dtype=np.int64)
    last_epoch = storage.get("LastEpochBlock", netuid)
    return yuma.YumaInput(
        stake_n=np.array([staking.hotkey_alpha(storage, hotkey, netuid) for hotkey in hotkeys], dtype=np.float64),
        weights_nn=weights,
        bonds_nn=yuma.without_bonds_to(bonds, registered_n >= max(1, last_epoch)),
        permits_n=np.array(storage.column("ValidatorPermit", netuid), dtype=bool),
        active_n=np.array([update + cutoff >= block for update in last_update], dtype=bool),
        last_update_n=np.array(last_update, dtype=np.int64),
        registered_n=registered_n,
        owner_uid=storage.get("Uids", netuid, storage.get("SubnetOwnerHotkey", netuid)),
    )


def consensus_params(storage: Storage, netuid: int) -> yuma.YumaParams:
    """The subnet's consensus hyperparameters as fractions."""
    return yuma.YumaParams(
        kappa=storage.get("Kappa", netuid) / U16_MAX,
        bonds_moving_average=storage.get("BondsMovingAverage", netuid) / 1e6,
        bonds_penalty=storage.get("BondsPenalty", netuid) / U16_MAX,
        max_validators=storage.get("MaxAllowedValidators", netuid),
        min_stake=float(storage.get("StakeThreshold")),
    )


def _consensus(ctx: Context, netuid: int) -> yuma.YumaResult:
    before = consensus_input(ctx, netuid, block=ctx.block)
    ctx.put("Active", before.active_n.tolist(), netuid)
    return yuma.yuma_epoch(before, consensus_params(ctx, netuid))


def _store(ctx: Context, netuid: int, result: yuma.YumaResult) -> None:
    """Keep what the epoch found. Losing the permit deletes a validator's bonds."""
    columns = {
        "Consensus": result.consensus_n,
        "Incentive": result.incentive_n,
        "Dividends": result.dividends_n,
        "ValidatorTrust": result.validator_trust_n,
    }
    for item, values in columns.items():
        ctx.put(item, yuma.quantized(values), netuid)
    ctx.put("ValidatorPermit", result.permits_n.tolist(), netuid)
    for uid, row in enumerate(result.bonds_nn.astype(np.int64).tolist()):
        kept = [[target, value] for target, value in enumerate(row) if value] if result.permits_n[uid] else []
        ctx.put("Bonds", kept or None, netuid, uid)


def _drain(ctx: Context, netuid: int) -> yuma.Emission:
    pending = yuma.Emission(
        owner=ctx.get("PendingOwnerCut", netuid),
        server=ctx.get("PendingServerEmission", netuid),
        validator=ctx.get("PendingValidatorEmission", netuid),
    )
    for item in ("PendingOwnerCut", "PendingServerEmission", "PendingValidatorEmission"):
        ctx.put(item, 0, netuid)
    return pending


def _pay(ctx: Context, netuid: int, result: yuma.YumaResult, pending: yuma.Emission) -> None:
    """Credit the tempo's alpha."""
    emission = []
    for uid, (incentive, dividend) in enumerate(yuma.payouts(result, pending)):
        hotkey = ctx.get("Keys", netuid, uid)
        _pay_incentive(ctx, netuid, hotkey, incentive)
        _pay_dividend(ctx, netuid, hotkey, dividend)
        emission.append(incentive + dividend)
    ctx.put("Emission", emission, netuid)
    owner_hotkey = ctx.get("SubnetOwnerHotkey", netuid)
    staking.add_to_position(ctx, owner_hotkey, ctx.get("SubnetOwner", netuid), netuid, pending.owner)


def _pay_incentive(ctx: Context, netuid: int, hotkey: str, rao: int) -> None:
    """Stake a miner's alpha for its coldkey, on the coldkey's auto-stake hotkey if it named one.

    What the subnet owner's own hotkeys earn as miners is burned.
    """
    coldkey = ctx.get("Owner", hotkey)
    if coldkey == ctx.get("SubnetOwner", netuid):
        return
    destination = ctx.get("AutoStakeDestination", coldkey, netuid) or hotkey
    staking.add_to_position(ctx, destination, coldkey, netuid, rao)


def _pay_dividend(ctx: Context, netuid: int, hotkey: str, rao: int) -> None:
    """Stake a validator's alpha: its take for its owner, the rest for everyone who stakes on it."""
    if rao <= 0:
        return
    take = rao * ctx.get("Delegates", hotkey) // U16_MAX
    staking.add_to_pool(ctx, hotkey, netuid, rao - take)
    staking.add_to_position(ctx, hotkey, ctx.get("Owner", hotkey), netuid, take)
    ctx.put("AlphaDividendsPerSubnet", rao, netuid, hotkey)


def begin_block(ctx: Context, netuid: int) -> None:
    """A subnet's work at the start of every block."""
    accrue(ctx, netuid)
    ctx.put("BlocksSinceLastStep", ctx.get("BlocksSinceLastStep", netuid) + 1, netuid)
    due = schedule.next_epoch_block(ctx, netuid)
    is_due = due is not None and ctx.block >= due
    if ctx.get("CommitRevealWeightsEnabled", netuid):
        commit_reveal.reveal_due(ctx, netuid, epoch=ctx.get("SubnetEpochIndex", netuid) + is_due)
    if is_due:
        run_epoch(ctx, netuid)
