"""Block 0: accounts and subnets of the configuration."""

from subnet.devnet.config import ALICE, RAO, DevnetConfig
from subnet.devnet.context import Context
from subnet.devnet.pallets import balances, subnets
from subnet.devnet.pallets.shield import Shield

_ROOT = 0


def write_genesis(ctx: Context, config: DevnetConfig, shield: Shield) -> None:
    """Fill an empty state."""
    ctx.write("System", "Number", 0)
    ctx.write("Timestamp", "Now", ctx.now_ms)
    ctx.write("MevShield", "NextKey", "0x" + shield.public_key.hex())
    ctx.write("MevShield", "CurrentKey", "0x" + shield.public_key.hex())
    for address, tao in sorted({ALICE: config.alice_tao, **config.prefunded}.items()):
        balances.deposit(ctx, address, round(tao * RAO))
        balances.issue(ctx, round(tao * RAO))
    ctx.put("NetworksAdded", True, _ROOT)
    ctx.put("TotalNetworks", 1)
    ctx.put("NetworkRateLimit", 0)
    ctx.put("StakeThreshold", round(config.stake_threshold_tao * RAO))
    for subnet in config.subnets:
        subnets.create(
            ctx,
            subnet.netuid,
            subnet.owner_coldkey,
            subnet.owner_hotkey,
            name=subnet.name,
            knobs=subnet.hyperparameters,
        )
        if subnet.is_started:
            subnets.start(ctx, subnet.netuid)
