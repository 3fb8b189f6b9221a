"""Bad days of a chain client (chain.md 2): each fails without the work-around it is named for."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import bittensor as bt
import pytest
from bittensor.intents import BurnedRegister
from bittensor.keyfiles import Keypair

from neurons.devnet import ask
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits, ChainSession
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.errors import Refused, TransientFailure
from subnet.types import Hotkey

NETUID = 1
BLOCK_TIME_S = 0.05
LIMITS = ChainLimits(
    connect_timeout_s=5.0, read_timeout_s=1.0, submit_timeout_s=3.0, stall_after_s=0.5, metagraph_max_age_s=0.0
)
OUTDATED = (1010, "Invalid Transaction", "Transaction is outdated")
LOW_PRIORITY = (1014, "Priority is too low: (0 vs 0)", "The transaction has too low priority to replace another.")
SUBMIT = "author_submitAndWatchExtrinsic"
ALICE, BANK, VALIDATOR = (Keypair.create_from_uri(f"//{name}") for name in ("Alice", "Bank", "Validator"))


def config(**knobs: int) -> DevnetConfig:
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters={"tempo": 10, "weights_rate_limit": 2, **knobs})
    return DevnetConfig(
        port=0, block_time_s=BLOCK_TIME_S, subnets=(genesis,), prefunded={BANK.ss58_address: 10_000.0}, finality_lag=1
    )


@asynccontextmanager
async def connected(**knobs: int) -> AsyncIterator[tuple[Node, BittensorChain]]:
    """A node, and the chain through it as the subnet's owner sees it."""
    async with Node(config(**knobs)).running() as node:
        chain = BittensorChain(node.url, NETUID, ALICE, version_key=1, limits=LIMITS)
        try:
            yield node, chain
        finally:
            await chain.close()


def num_included(node: Node, pallet: str, function: str) -> int:
    """How often a call is in the blocks that the node keeps."""
    count = 0
    for number in range(node.chain.head.number + 1):
        block = node.chain.block(node.chain.block_hash(number))
        assert block is not None
        calls = [node.chain.codec.runtime.decode_extrinsic(raw, True)["call"] for raw in block.extrinsics]
        count += sum((call["call_module"], call["call_function"]) == (pallet, function) for call in calls)
    return count


@pytest.mark.parametrize("error", [OUTDATED, LOW_PRIORITY], ids=["outdated", "priority"])
async def test_pool_errors_are_retried_with_a_fresh_nonce(error: tuple[int, str, str]) -> None:
    async with connected() as (node, chain):
        await ask(node.url, "devnet_failNext", SUBMIT, *error, 2)
        await chain.commit(b"record")
        assert await chain.commitment(Hotkey(ALICE.ss58_address)) == b"record"
        assert num_included(node, "Commitments", "set_commitment") == 1


async def test_a_pool_that_always_says_outdated_is_a_transient_failure_with_its_reason() -> None:
    async with connected() as (node, chain):
        await ask(node.url, "devnet_failNext", SUBMIT, *OUTDATED, 9)
        with pytest.raises(TransientFailure, match=r"did not land in 5 attempts.*nonce"):
            await chain.commit(b"record")


async def test_what_landed_though_the_socket_dropped_is_not_sent_again() -> None:
    async with connected() as (node, chain):
        node.faults.is_lossy = True
        await chain.commit(b"record")
        assert num_included(node, "Commitments", "set_commitment") == 1


async def test_the_transaction_after_a_shielded_one_gets_through() -> None:
    async with connected() as (_, chain):
        intent = BurnedRegister(netuid=NETUID, hotkey_ss58=VALIDATOR.ss58_address)
        assert (await chain.session.read("shielded", lambda client: client.execute(intent, BANK))).success
        await ChainAccounts(chain).transfer(BANK, VALIDATOR.ss58_address, 5.0)
        assert await chain.balance(VALIDATOR.ss58_address) == 5.0


async def test_two_processes_with_one_key_take_turns(tmp_path: Path) -> None:
    async with Node(config()).running() as node:
        chains = [BittensorChain(node.url, NETUID, ALICE, limits=LIMITS, lock_directory=tmp_path) for _ in range(2)]
        try:
            blocks = await asyncio.gather(*(chain.commit(b"record") for chain in chains))
        finally:
            for chain in chains:
                await chain.close()
        assert len(blocks) == 2 and num_included(node, "Commitments", "set_commitment") <= 2


async def test_a_dead_first_endpoint_is_passed_over() -> None:
    async with Node(config()).running() as node:
        chain = BittensorChain("ws://127.0.0.1:9", NETUID, fallback_endpoints=[node.url], limits=LIMITS)
        assert await chain.block() >= 0
        await chain.close()


async def test_a_socket_that_went_silent_is_found_within_three_blocks_and_replaced() -> None:
    limits = ChainLimits(connect_timeout_s=5.0, read_timeout_s=3 * BLOCK_TIME_S)
    async with Node(config()).running() as frozen, Node(config()).running() as healthy:
        chain = BittensorChain(frozen.url, NETUID, fallback_endpoints=[healthy.url], limits=limits)
        await chain.block()
        frozen.faults.is_frozen = True
        started = asyncio.get_running_loop().time()
        await chain.block()
        assert asyncio.get_running_loop().time() - started < 3 * BLOCK_TIME_S + 1.5
        assert healthy.status()["connections"] == 1
        await chain.close()


async def test_a_silent_chain_without_a_second_endpoint_is_a_transient_failure_and_heals() -> None:
    async with connected() as (node, chain):
        await chain.block()
        node.faults.is_frozen = True
        with pytest.raises(TransientFailure):
            await chain.block()
        node.faults.is_frozen = False
        assert await chain.block() > 0


async def test_a_chain_without_new_blocks_is_noticed() -> None:
    async with connected() as (node, chain):
        await chain.block()
        node.faults.is_stalled = True
        with pytest.raises(TransientFailure, match="has shown no block after"):
            await chain.session.wait_for_block(10_000)
        node.faults.is_stalled = False
        await chain.session.wait_for_block(await chain.block() + 1)


async def test_watching_a_transaction_ends_though_no_block_comes() -> None:
    limits = ChainLimits(
        connect_timeout_s=5.0, read_timeout_s=1.0, submit_timeout_s=0.3, operation_timeout_s=1.5, num_attempts=2
    )
    async with Node(config()).running() as node:
        chain = BittensorChain(node.url, NETUID, ALICE, limits=limits)
        node.faults.is_stalled = True
        with pytest.raises(TransientFailure):
            await chain.commit(b"record")
        await chain.close()


async def test_reads_survive_dropped_connections_and_leak_nothing() -> None:
    async with connected() as (node, chain):
        await chain.metagraph()
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting open files is the point
        for _ in range(10):
            await ask(node.url, "devnet_drop")
            await chain.metagraph()
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208
        assert node.status()["connections"] <= 2


async def test_a_runtime_upgrade_in_the_middle_of_a_connection() -> None:
    async with connected() as (node, chain):
        await chain.commit(b"before")
        await ask(node.url, "devnet_upgrade")
        await chain.commit(b"after")
        assert await chain.commitment(Hotkey(ALICE.ss58_address)) == b"after"


async def test_a_price_that_moved_is_refused_with_the_chains_reason() -> None:
    async with connected() as (node, chain):
        poor = Keypair.create_from_uri("//Poor")
        accounts = ChainAccounts(chain)
        await accounts.transfer(BANK, poor.ss58_address, await chain.registration_price() + 0.001)
        await ask(node.url, "devnet_setStorage", "SubtensorModule", "Burn", [NETUID], 10**12)
        await chain.session.wait_for_block(await chain.block() + 1)
        with pytest.raises(Refused, match="NotEnoughBalanceToStake"):
            await accounts.burned_register(poor, VALIDATOR.ss58_address)


async def test_a_success_that_is_not_on_the_chain_is_no_success() -> None:
    async with Node(config()).running() as node:
        session = ChainSession(node.url, limits=LIMITS)

        async def send(client: bt.Client) -> bt.ExtrinsicResult:
            return bt.ExtrinsicResult(success=True, message="Success")

        async def landed() -> int | None:
            return None

        with pytest.raises(TransientFailure, match="did not land"):
            await session.submit("nothing", send, landed, key="k")
        await session.close()


async def test_a_successor_on_a_uid_gets_none_of_the_weights_its_predecessor_earned() -> None:
    async with connected(max_allowed_uids=3, immunity_period=0) as (_, chain):
        accounts = ChainAccounts(chain)
        first, second = (Keypair.create_from_uri(f"//{name}").ss58_address for name in ("First", "Second"))
        await accounts.burned_register(BANK, VALIDATOR.ss58_address)
        await accounts.add_stake(BANK, VALIDATOR.ss58_address, 1_000.0)
        await accounts.burned_register(BANK, first)
        before = (await chain.metagraph()).by_hotkey()
        earned_at = {Hotkey(key): before[Hotkey(key)].registered_at_block for key in (first, VALIDATOR.ss58_address)}
        await chain.session.wait_for_block(await chain.block() + 12)
        await accounts.burned_register(BANK, second)
        after = (await chain.metagraph()).by_hotkey()
        assert after[Hotkey(second)].uid == before[Hotkey(first)].uid
        await accounts.burned_register(BANK, first)
        validator = BittensorChain(chain.session.network, NETUID, VALIDATOR, version_key=1, limits=LIMITS)
        with pytest.raises(Refused, match="no registered hotkey"):
            await validator.set_weights_of({Hotkey(first): 1.0}, registered_at=earned_at)
        await validator.close()


async def test_a_reorganisation_under_a_commitment_does_not_lose_it() -> None:
    async with connected() as (node, chain):
        node.chain.finality_lag = 8
        sending = asyncio.ensure_future(chain.commit(b"record"))
        while num_included(node, "Commitments", "set_commitment") == 0:  # noqa: ASYNC110 - blocks wake nobody
            await asyncio.sleep(BLOCK_TIME_S / 5)
        assert await ask(node.url, "devnet_reorg", 3) >= 1
        await sending
        assert await chain.commitment(Hotkey(ALICE.ss58_address)) == b"record"
        assert num_included(node, "Commitments", "set_commitment") >= 1


async def test_transactions_wait_while_finality_is_late() -> None:
    async with connected() as (node, chain):
        await ask(node.url, "devnet_setFinalityLag", 12)
        block = await chain.commit(b"record")
        assert node.chain.finalized_number >= block


async def test_many_readers_on_one_connection_survive_its_end_together() -> None:
    async with connected() as (node, chain):
        await chain.metagraph()
        for _ in range(3):
            readers = [asyncio.ensure_future(chain.fresh_metagraph()) for _ in range(20)]
            await asyncio.sleep(0)
            node.drop_all()
            graphs = await asyncio.gather(*readers)
            assert {graph.netuid for graph in graphs} == {NETUID}
        node.faults.is_frozen = True
        silent = [asyncio.ensure_future(chain.block()) for _ in range(20)]
        outcomes = await asyncio.gather(*silent, return_exceptions=True)
        assert all(isinstance(outcome, TransientFailure) for outcome in outcomes)
        node.faults.is_frozen = False
        assert await chain.block() > 0
        assert node.status()["connections"] <= 2


async def test_a_watch_whose_news_was_lost_ends_and_the_chain_is_asked() -> None:
    limits = ChainLimits(connect_timeout_s=5.0, read_timeout_s=1.0, submit_timeout_s=1.0, operation_timeout_s=15.0)
    async with Node(config()).running() as node:
        chain = BittensorChain(node.url, NETUID, ALICE, limits=limits)
        sending = asyncio.ensure_future(chain.commit(b"record"))
        while len(node.chain.pool) == 0:  # noqa: ASYNC110 - the pool is the node's, it wakes nobody
            await asyncio.sleep(0)
        node.faults.is_frozen = True
        while node.chain.finalized_number < node.chain.head.number or len(node.chain.pool):
            node.chain.finality_lag = 0
            await asyncio.sleep(0.01)
        node.make_block()
        node.faults.is_frozen = False
        assert await sending > 0
        assert num_included(node, "Commitments", "set_commitment") == 1
        await chain.close()
