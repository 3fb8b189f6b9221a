"""24 simulated hours of a validator's chain, with a random fault every simulated ten minutes; prints what came of it.

    python scripts/chain_weather.py [--hours 24] [--block-time 0.05] [--seed 0] [--kinds drop,freeze,...]

One block stands for 12 s. The validator's chain client is a process of its own. What is counted is read from the chain's
blocks, not taken from the client: tempos in which any transaction was included, tempos with weights set, weights set twice
in one. Memory and open files of the client are shown over the time.
"""

import argparse
import asyncio
import json
import os
import sys
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
SAMPLES = 8
BANK, VALIDATOR = (Keypair.create_from_uri(f"//{name}") for name in ("Bank", "Validator"))
MINERS = [Keypair.create_from_uri(f"//Miner{index}") for index in range(3)]
SUBMIT = "author_submitAndWatchExtrinsic"
LIMITS = ChainLimits(read_timeout_s=1.0, submit_timeout_s=3.0, stall_after_s=1.0, connect_timeout_s=5.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--block-time", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults to draw from; '' for none")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def last_block(options: argparse.Namespace) -> int:
    hours: float = options.hours
    return round(hours * 3600 / 12)


# ---- the client's process ------------------------------------------------------------------------------------------


def footprint() -> tuple[float, int]:
    """Resident memory in MiB, number of open files."""
    status = Path("/proc/self/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return round(rss_kib / 1024, 1), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting open files is the point


async def prepare(chain: BittensorChain) -> None:
    """A validator with a permit, three miners."""
    accounts = ChainAccounts(chain)
    for key in (VALIDATOR, *MINERS):
        await accounts.burned_register(BANK, key.ss58_address)
    await accounts.add_stake(BANK, VALIDATOR.ss58_address, 1_000.0)
    await chain.session.wait_for_block(TEMPO + 1)


async def epoch_status(chain: BittensorChain) -> Any:
    """Where the subnet is in its tempo."""
    return await chain.session.read("epoch", lambda client: client.epochs.epoch_status(netuid=NETUID))


async def validate(options: argparse.Namespace) -> None:
    """Set weights once for each tempo until the end; prints what it saw as JSON."""
    memory = Path(tempfile.mkdtemp())
    chain = BittensorChain(
        options.client, NETUID, VALIDATOR, version_key=1, limits=LIMITS, lock_directory=memory, fallback_endpoints=[]
    )
    await prepare(chain)
    failures, now, samples = 0, 0, [footprint()]
    while now < last_block(options):
        try:
            status = await epoch_status(chain)
            now = status["last_epoch_block"]
            scores = {
                Hotkey(miner.ss58_address): draws.uniform("score", status["epoch_index"], index)
                for index, miner in enumerate(MINERS)
            }
            await chain.set_weights(scores)
            # read anew: setting may have waited for the next tempo, which then has its weights
            now = await chain.session.wait_for_block((await epoch_status(chain))["next_epoch_start_block"] + 1)
        except (TransientFailure, Refused):
            failures += 1
            await asyncio.sleep(options.block_time)
        if now * SAMPLES >= len(samples) * last_block(options):
            samples.append(footprint())
    await chain.close()
    print(json.dumps({"failures": failures, "samples": samples}))


# ---- the node and the weather --------------------------------------------------------------------------------------


class Tally:
    """What the chain's blocks hold, tempo by tempo."""

    def __init__(self) -> None:
        self.num_weights: dict[int, int] = {}
        self.with_transactions: dict[int, None] = {}
        self._seen = TEMPO

    def count(self, node: Node) -> None:
        """Read the blocks that became final since the last look."""
        for number in range(self._seen + 1, node.chain.finalized_number + 1):
            block = node.chain.block(node.chain.block_hash(number))
            assert block is not None, "look more often: a block is kept for a while only"
            if len(block.extrinsics) > 1:
                self.with_transactions[number // TEMPO] = None
            events = node.chain.storage(block.digest).read("System", "Events")
            num_set = sum(record["event"]["event_id"] == "WeightsSet" for record in events)
            self.num_weights[number // TEMPO] = self.num_weights.get(number // TEMPO, 0) + num_set
        self._seen = max(self._seen, node.chain.finalized_number)


async def bad_weather(node: Node, options: argparse.Namespace, log: list[str], tally: Tally) -> None:
    """One fault after another, each over after `FAULT_BLOCKS` blocks."""
    kinds = [kind for kind in options.kinds.split(",") if kind]
    number = 2
    while node.chain.head.number < last_block(options):
        while node.chain.head.number < number * FAULT_EVERY_BLOCKS:  # noqa: ASYNC110 - the chain wakes nobody here
            await asyncio.sleep(node.config.block_time_s)
        if kinds:
            log.append(draws.shuffled(kinds, options.seed, "weather", number)[0])
            await strike(node, log[-1])
        tally.count(node)
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


async def run(options: argparse.Namespace) -> None:
    knobs = {"tempo": TEMPO, "weights_rate_limit": 20}
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters=knobs)
    config = DevnetConfig(
        port=0, block_time_s=options.block_time, subnets=(genesis,), prefunded={BANK.ss58_address: 1e5}, finality_lag=3
    )
    weather: list[str] = []
    tally = Tally()
    started = time.monotonic()
    async with Node(config).running() as node:
        client = await asyncio.create_subprocess_exec(
            sys.executable, *sys.argv, "--client", node.url, stdout=asyncio.subprocess.PIPE
        )
        await bad_weather(node, options, weather, tally)
        output, _ = await client.communicate()
        connections = node.status()["connections"]
    seen = json.loads(output)
    tempos = [tempo for tempo in tally.with_transactions if tempo < last_block(options) // TEMPO]
    num_set = sum(tally.num_weights.get(tempo, 0) > 0 for tempo in tempos)
    num_twice = sum(tally.num_weights.get(tempo, 0) > 1 for tempo in tempos)
    took_s = time.monotonic() - started
    print(f"seed {options.seed}: {last_block(options)} blocks, {len(weather)} faults in {took_s:.0f} s")
    print("faults: " + ", ".join(f"{kind} {weather.count(kind)}" for kind in KINDS))
    share = 100 * num_set / len(tempos)
    print(
        f"weights set in {num_set} of {len(tempos)} tempos with transactions ({share:.1f} %), twice in one: {num_twice}"
    )
    print(f"calls of the client that gave up for the moment: {seen['failures']}; connections left: {connections}")
    print("client, MiB and open files: " + ", ".join(f"{mib} {files}" for mib, files in seen["samples"]))


if __name__ == "__main__":
    given = arguments()
    asyncio.run(validate(given) if given.client else run(given))
