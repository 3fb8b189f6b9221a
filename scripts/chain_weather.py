"""24 simulated hours of a validator's chain, with a random fault every simulated ten minutes; prints what came of it.

    python scripts/chain_weather.py [--hours 24] [--block-time 0.05] [--seed 0]

One block stands for 12 s. Counts: tempos in which the chain took any transaction, tempos with weights set, weights set
twice in one tempo, memory and open files of this process at the start and at the end.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from bittensor.keyfiles import Keypair

from subnet import draws
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.devnet.rpc import RpcError
from subnet.errors import Refused, TransientFailure
from subnet.types import Hotkey

NETUID = 1
TEMPO = 100
FAULT_EVERY_BLOCKS = 50
FAULT_BLOCKS = 12
KINDS = ("drop", "freeze", "stall", "lossy", "outdated", "priority", "reorg", "upgrade", "finality")
BANK, VALIDATOR = (Keypair.create_from_uri(f"//{name}") for name in ("Bank", "Validator"))
MINERS = [Keypair.create_from_uri(f"//Miner{index}") for index in range(3)]
SUBMIT = "author_submitAndWatchExtrinsic"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--block-time", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def footprint() -> tuple[float, int]:
    """Resident memory in MiB, number of open files."""
    status = Path("/proc/self/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return rss_kib / 1024, len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting open files is the point


async def bad_weather(node: Node, seed: int, last_block: int, log: list[str]) -> None:
    """One fault after another, each over after `FAULT_BLOCKS` blocks."""
    number = 0
    while node.chain.head.number < last_block:
        target = (number + 1) * FAULT_EVERY_BLOCKS
        while node.chain.head.number < target:  # noqa: ASYNC110 - the chain wakes nobody in this process
            await asyncio.sleep(node.config.block_time_s)
        kind = draws.shuffled(KINDS, seed, "weather", number)[0]
        log.append(kind)
        await strike(node, kind)
        number += 1


async def strike(node: Node, kind: str) -> None:
    length_s = FAULT_BLOCKS * node.config.block_time_s
    flags = {"freeze": "is_frozen", "stall": "is_stalled", "lossy": "is_lossy"}
    if kind in flags:
        setattr(node.faults, flags[kind], True)
        await asyncio.sleep(length_s)
        setattr(node.faults, flags[kind], False)
    elif kind == "drop":
        node.drop_all()
    elif kind == "reorg":
        node.reorganise(2)
    elif kind == "upgrade":
        node.chain.upgrade()
    elif kind == "finality":
        node.chain.finality_lag = 8
        await asyncio.sleep(length_s)
        node.chain.finality_lag = node.config.finality_lag
    else:
        reason = {
            "outdated": RpcError(1010, "Invalid Transaction", "Transaction is outdated"),
            "priority": RpcError(1014, "Priority is too low: (0 vs 0)", "too low priority to replace another"),
        }[kind]
        node.faults.next_failures.extend([(SUBMIT, reason)] * 2)


async def validate(chain: BittensorChain, node: Node, last_block: int, set_at: list[int]) -> int:
    """Set weights once for each tempo; returns how many attempts failed."""
    failures = 0
    while node.chain.head.number < last_block:
        try:
            epoch = (await epoch_status(chain))["epoch_index"]
            scores = {
                Hotkey(miner.ss58_address): draws.uniform("score", epoch, index) for index, miner in enumerate(MINERS)
            }
            set_at.append(await chain.set_weights(scores))
            # read anew: setting may have waited for the next tempo, which then has its weights
            await chain.session.wait_for_block((await epoch_status(chain))["next_epoch_start_block"] + 1)
        except (TransientFailure, Refused):
            failures += 1
            await asyncio.sleep(node.config.block_time_s)
    return failures


async def epoch_status(chain: BittensorChain) -> Any:
    """Where the subnet is in its tempo."""
    return await chain.session.read("epoch", lambda client: client.epochs.epoch_status(netuid=NETUID))


async def prepare(chain: BittensorChain) -> None:
    """A validator with a permit, three miners."""
    accounts = ChainAccounts(chain)
    for key in (VALIDATOR, *MINERS):
        await accounts.burned_register(BANK, key.ss58_address)
    await accounts.add_stake(BANK, VALIDATOR.ss58_address, 1_000.0)
    await chain.session.wait_for_block(TEMPO + 1)


async def run(options: argparse.Namespace) -> None:
    last_block = round(options.hours * 3600 / 12)
    knobs = {"tempo": TEMPO, "weights_rate_limit": 20}
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters=knobs)
    config = DevnetConfig(
        port=0, block_time_s=options.block_time, subnets=(genesis,), prefunded={BANK.ss58_address: 1e5}, finality_lag=3
    )
    limits = ChainLimits(read_timeout_s=1.0, submit_timeout_s=3.0, stall_after_s=1.0, connect_timeout_s=5.0)
    set_at: list[int] = []
    weather: list[str] = []
    started = time.monotonic()
    async with Node(config).running() as node:
        chain = BittensorChain(
            node.url, NETUID, VALIDATOR, version_key=1, limits=limits, lock_directory=Path(tempfile.mkdtemp())
        )
        await prepare(chain)
        before = footprint()
        async with asyncio.TaskGroup() as group:
            group.create_task(bad_weather(node, options.seed, last_block, weather))
            failing = group.create_task(validate(chain, node, last_block, set_at))
        after = footprint()
        tempos = node.chain.head.number // TEMPO - 1
        await chain.close()
    by_tempo = [block // TEMPO for block in dict.fromkeys(set_at)]
    print(
        f"seed {options.seed}: {last_block} blocks, {tempos} tempos, {len(weather)} faults in {time.monotonic() - started:.0f} s"
    )
    print("faults: " + ", ".join(f"{kind} {weather.count(kind)}" for kind in KINDS))
    print(f"weights set in {len(set(by_tempo))} tempos, twice in one: {len(by_tempo) - len(set(by_tempo))}")
    print(f"calls of the client that gave up for the moment: {failing.result()}")
    print(f"memory {before[0]:.1f} -> {after[0]:.1f} MiB, open files {before[1]} -> {after[1]}")


if __name__ == "__main__":
    asyncio.run(run(arguments()))
