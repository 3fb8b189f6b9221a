"""Two `strata orchestrator` processes of one run: the leader is killed, or paused for longer than its lease, with work under way.

Processes, state store, chain and sockets are real. Miners are the test's: they sign receipts of passes that nobody computes, so
that what is leased, credited and sealed needs no torch.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import bittensor as bt
import msgspec
import pytest
from bittensor.keyfiles import Keypair

from neurons.exit_codes import ExitCode
from neurons.scoring import Record, parse_discovery
from subnet import receipts, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.public import HttpPublic
from subnet.adapters.system import SystemClock
from subnet.dashboard.views import RunView
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.errors import StrataError
from subnet.lanes import lanes
from subnet.orchestration.invariants import check_record
from subnet.orchestration.ledger import Credited, EpochPublished, Fact, LossRecorded, SampleDropped, Voided
from subnet.types import Endpoint, Epoch, Hotkey, Lease, NumericMode, Phase, Receipt
from tests.unit.orchestration import passes
from tests.unit.test_reach_checks import free_port

F = TypeVar("F", bound=Fact)

BANK = Keypair.create_from_uri("//Bank")
EPOCH = Epoch(0)
NUM_STAGES, NUM_SAMPLES = 3, 3
LIMIT_S = 90.0
"""For whatever is waited for; nothing has to be quick."""
CONFIG = f"""
[model]
width = 32
num_layers = 3
num_heads = 2
num_kv_heads = 2
ffn_width = 64
bottleneck_width = 1
[training]
num_stages = {NUM_STAGES}
microbatch_size = 2
num_tokens = 16
accumulate = 1
min_batches = 1
target_batches = {NUM_SAMPLES}
min_miners = {NUM_STAGES}
min_validators = 0
num_epochs = 1
quorum = 1.0
[deadlines]
gathering_s = 600.0
training_s = 600.0
committing_s = 1.0
sample_s = 600.0
silent_s = 600.0
"""


@dataclass
class Place:
    """A run on a chain, and the machines that may lead it: directories with a lock of their own."""

    root: Path
    node: Node
    state_url: str
    owner: Hotkey
    processes: list["Process"] = field(default_factory=list)

    def command(self, name: str, machine: str, *flags: str) -> list[str]:
        common = ["--config", str(self.root / "run.toml"), "--netuid", "1", "-n", self.node.url]
        key = ["--wallet.path", str(self.root / "wallets"), "-w", "default", "-H", "default"]
        own = ["--data-dir", str(self.root / machine), "--set", f"node.lock_dir={self.root / machine}-locks"]
        return [
            sys.executable,
            "-m",
            "neurons.cli",
            name,
            *common,
            *key,
            *own,
            "--set",
            f"node.state_url={self.state_url}",
            *flags,
        ]

    async def run(self, name: str, machine: str, *flags: str) -> "Process":
        process = Process(self.root / f"{machine}-{len(self.processes)}.log", free_port())
        self.processes.append(process)
        with process.log.open("wb") as log:
            arguments = self.command(name, machine, "--set", f"node.port={process.port}", *flags)
            process.process = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log)
        return process


@dataclass
class Process:
    log: Path
    port: int
    process: asyncio.subprocess.Process = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    async def until_said(self, words: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while words not in self.log.read_text():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """A run that is announced; its directory is copied to a second machine, and the blob store is one for both."""
    wallet = bt.Wallet("default", "default", str(tmp_path / "wallets"))
    wallet.create_new_coldkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    wallet.create_new_hotkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    owner, coldkey = Hotkey(wallet.hotkey.ss58_address), wallet.coldkeypub.ss58_address
    subnet = SubnetGenesis(netuid=1, owner_hotkey=owner, owner_coldkey=coldkey)
    funded = {BANK.ss58_address: 10_000.0, coldkey: 10.0}
    (tmp_path / "run.toml").write_text(CONFIG)
    store = await asyncio.to_thread(start_embedded, tmp_path / "state")
    async with Node(DevnetConfig(port=0, block_time_s=0.25, subnets=(subnet,), prefunded=funded)).running() as node:
        made = Place(tmp_path, node, store.url, owner)
        try:
            created = await made.run("init-run", "a", "--url", "http://127.0.0.1:1")
            assert await created.ended() == ExitCode.OK, created.log.read_text()
            shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("blobs"))
            (tmp_path / "b" / "blobs").symlink_to(tmp_path / "a" / "blobs")
            yield made
        finally:
            for process in made.processes:
                process.signal(signal.SIGKILL)
                await process.process.wait()
            await asyncio.to_thread(store.stop)


class Miners:
    """One miner for each stage. They talk to whoever `follow` names last, the requests under way included."""

    def __init__(self, session: aiohttp.ClientSession, owner: Hotkey) -> None:
        self.signers = [KeypairSigner.from_uri(f"//miner-{number}") for number in range(NUM_STAGES)]
        self.controls = {
            signer.hotkey: HttpControl(session, "", signer=signer, orchestrator=owner, clock=SystemClock())
            for signer in self.signers
        }
        self.chains: dict[Hotkey, list[Receipt]] = {hotkey: [] for hotkey in self.controls}

    def follow(self, leader: Process) -> None:
        for control in self.controls.values():
            control._base = leader.url

    async def ask(self, hotkey: Hotkey, request: wire.Request) -> wire.Response:
        return await self.controls[hotkey].call(request, timeout_s=LIMIT_S)

    async def begin(self) -> None:
        """Join, and hold what the epoch starts from."""
        for hotkey in self.controls:
            joined = await self.ask(hotkey, wire.Join(endpoint=Endpoint(host="h", port=1), mode=NumericMode.FP32))
            assert isinstance(joined, wire.Joined)
            view = await self.ask(hotkey, wire.Poll(known_version=0, wait_s=0.0))
            assert isinstance(view, wire.Directive) and view.snapshot is not None
            await self.ask(hotkey, wire.Ready(epoch=EPOCH, anchor=view.snapshot.digest))
            if joined.stage == 0:
                self.first = hotkey

    async def lease(self) -> list[Lease]:
        answer = await self.ask(self.first, wire.LeaseSamples(epoch=EPOCH, count=1))
        assert isinstance(answer, wire.Leases)
        return list(answer.leases)

    async def work(self, lease: Lease, hops: range = range(NUM_STAGES)) -> None:
        for hop in hops:
            hotkey, run = lease.hops[hop], lease.run_id
            done = self.chains[hotkey]
            fresh = tuple(msgspec.structs.replace(receipt, run_id=run) for receipt in passes(lease, hop, NUM_STAGES))
            head = receipts.extend(receipts.first_head(run, EPOCH, hotkey), (*done, *fresh))
            before = len(done)
            done += fresh
            acked = await self.ask(hotkey, wire.PostReceipts(epoch=EPOCH, num_before=before, receipts=fresh, head=head))
            assert isinstance(acked, wire.Ack) and acked.num_receipts == before + 2


async def until_in(phase: Phase, session: aiohttp.ClientSession, leader: Process) -> None:
    """Wait until the leader says that the run is in this phase."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            assert leader.process.returncode is None, leader.log.read_text()
            with contextlib.suppress(StrataError):
                data = await HttpPublic(session, leader.url).read("status", limit_bytes=1 << 20)
                if msgspec.json.decode(data, type=RunView).phase == phase:
                    return
            await asyncio.sleep(0.1)


async def until_sealed(chain: BittensorChain, owner: Hotkey) -> wire.Discovery:
    """The record on chain, once it has the end of the run's only epoch."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = parse_discovery(await chain.commitment(owner))
            if found.n:
                return found
            await asyncio.sleep(0.1)


def facts(record: Record, kind: type[F]) -> list[F]:
    return [entry.fact for entry in record.entries if isinstance(entry.fact, kind)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_stand_by_goes_on_where_the_leader_was_stopped(
    place: Place, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "subnet.adapters.http_client._ATTEMPT_S", 3.0
    )  # then a miner asks whoever the name points at by now
    chain = BittensorChain(place.node.url, 1, None)
    async with open_session() as session, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(chain.close)
        miners = Miners(session, place.owner)
        for hotkey in miners.controls:
            await ChainAccounts(chain).burned_register(BANK, hotkey)
        first = await place.run("orchestrator", "a")
        miners.follow(first)
        await until_in(Phase.GATHERING, session, first)
        second = await place.run("orchestrator", "b")
        await miners.begin()
        await until_in(Phase.TRAINING, session, first)
        (one,), (two,) = await miners.lease(), await miners.lease()
        await miners.work(one)
        await miners.work(two, range(2))
        await second.until_said("standing by")

        first.signal(how)
        under_way = asyncio.create_task(miners.work(two, range(2, 3)))
        await second.until_said("recovered")
        miners.follow(second)
        await under_way
        first.signal(signal.SIGCONT)
        ended = first.ended()
        (three,) = await miners.lease()
        await miners.work(three)
        await until_in(Phase.FINISHED, session, second)

        assert await ended == (ExitCode.SUPERSEDED if how is signal.SIGSTOP else -signal.SIGKILL)
        record = Record()
        sealed = await until_sealed(chain, place.owner)
        await record.follow(HttpPublic(session, second.url), sealed.n)
        assert record.head == sealed.s
        check_record(record.entries, lanes(record.run_config()))
        credited = [(fact.sample, fact.hotkey) for fact in facts(record, Credited)]
        assert sorted(credited) == sorted(
            (lease.sample, hotkey) for lease in (one, two, three) for hotkey in lease.hops
        )
        assert len(facts(record, LossRecorded)) == NUM_SAMPLES
        assert not facts(record, SampleDropped) and not facts(record, Voided)
        assert [fact.epoch for fact in facts(record, EpochPublished)] == [EPOCH]
        second.signal(signal.SIGTERM)
        assert await second.ended() == ExitCode.OK
    if how is signal.SIGSTOP:
        assert "leads this run now" in first.log.read_text()
