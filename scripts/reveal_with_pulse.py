"""Commit-reveal from end to end: weights sealed by the unmodified SDK, opened by the devnet with a real drand pulse.

    apt-get install libfaketime && python scripts/reveal_with_pulse.py

The SDK seals for a round of the public beacon that lies ahead. No beacon can be reached here, but round 1,000 is known,
so the whole program runs in August 2023, under libfaketime, and waits for an epoch whose weights are due in that round.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bittensor.intents import SetWeights
from bittensor.keyfiles import Keypair

from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.devnet.pallets import commit_reveal
from subnet.types import Hotkey

NETUID = 1
TEMPO = 12
BLOCK_TIME_S = 0.25
ROUND = 1_000
SIGNATURE = "b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39"
BEGIN_UTC = "2023-08-23 15:58:30"
"""A minute and a half before round 1,000 (genesis 15:09:27, one round each 3 s)."""
BANK, VALIDATOR = (Keypair.create_from_uri(f"//{name}") for name in ("Bank", "Validator"))
MINERS = [Hotkey(Keypair.create_from_uri(f"//Miner{index}").ss58_address) for index in range(2)]


def library() -> Path:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        sys.exit("libfaketime is missing; install it with: apt-get install libfaketime")
    return found[0]


async def prepare(chain: BittensorChain) -> None:
    accounts = ChainAccounts(chain)
    await accounts.burned_register(BANK, VALIDATOR.ss58_address)
    await accounts.add_stake(BANK, VALIDATOR.ss58_address, 1_000.0)
    for miner in MINERS:
        await accounts.burned_register(BANK, miner)
    await chain.session.wait_for_block(await chain.block() + TEMPO)


async def commit_for_round(chain: BittensorChain) -> int:
    """Commit in the first epoch whose weights are due in `ROUND`; returns the block."""
    intent = SetWeights(netuid=NETUID, weights={2: 0.75, 3: 0.25})  # type: ignore[arg-type]
    while True:
        plan = await chain.session.read("plan", lambda client: client.plan(intent, VALIDATOR))
        due = plan.extras["reveal_round"]
        if due == ROUND:
            return await chain.set_weights({MINERS[0]: 0.75, MINERS[1]: 0.25})
        if due > ROUND:
            sys.exit(f"weights are due in round {due} already; begin earlier")
        await chain.session.wait_for_block(await chain.block() + 2)


async def run() -> None:
    knobs = {"tempo": TEMPO, "weights_rate_limit": 2, "commit_reveal_weights_enabled": 1}
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters=knobs)
    config = DevnetConfig(
        port=0, block_time_s=BLOCK_TIME_S, subnets=(genesis,), prefunded={BANK.ss58_address: 1e4}, finality_lag=1
    )
    async with Node(config).running() as node:
        chain = BittensorChain(node.url, NETUID, VALIDATOR, version_key=1)
        await prepare(chain)
        block = await commit_for_round(chain)
        pending = await chain.session.read(
            "commits", lambda client: client.weights.timelocked_weight_commits(netuid=NETUID)
        )
        sealed = [entry for entries in pending.values() for entry in entries]
        print(f"committed at block {block}: " + ", ".join(f"round {entry['reveal_round']}" for entry in sealed))
        print(f"weights before the pulse: {await chain.weights(Hotkey(VALIDATOR.ss58_address))}")
        node.chain.as_root(lambda ctx: commit_reveal.add_pulse(ctx, ROUND, SIGNATURE))
        await chain.session.wait_for_block(block + 2 * TEMPO + 1)
        print(f"weights after it: {await chain.weights(Hotkey(VALIDATOR.ss58_address))}")
        await chain.session.wait_for_block(block + 3 * TEMPO + 1)
        neurons = (await chain.fresh_metagraph()).by_hotkey()
        print("emission of the miners: " + ", ".join(f"{neurons[miner].emission:.4f}" for miner in MINERS))
        await chain.close()


def main() -> None:
    if "FAKETIME" in os.environ:
        asyncio.run(run())
        return
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"@{BEGIN_UTC}",
        "TZ": "UTC",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "BITTENSOR_RUNTIME_CACHE_DIR": tempfile.mkdtemp(),
    }
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
