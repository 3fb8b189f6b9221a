"""A whole subnet in one process and in virtual time: the same role code on simulated adapters, seeded, with kills.

Same seed, same plan, same digest. A kill takes a role away between two of its steps, as SIGKILL would; what it wrote to its
disk, the journal and the blob store stays.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from incentives.config import IncentiveConfig
from neurons.description import config_digest
from neurons.init_run import create_run
from neurons.roles.miner import MakeWorker, Miner
from neurons.roles.orchestrator import Orchestrator
from neurons.roles.ports import MinerPorts, OrchestratorPorts
from neurons.roles.validator import Validator, ValidatorPorts
from neurons.scoring import Record, weighted
from subnet import draws, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import InlineCompute, MemoryBlobs, MemoryBlobStore, MemoryDisk, MemoryStateStore
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.config import RunConfig
from subnet.errors import InvariantBroken
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.orchestration.events import Created
from subnet.orchestration.invariants import check_record
from subnet.ports import Corpus
from subnet.sim.compute import SimCompute
from subnet.sim.loop import VirtualClock, run
from subnet.sim.network import Network, NetworkConfig, SimControl, SimPeers, SimPublic
from subnet.training.pipeline import StageWorker
from subnet.types import Digest, Endpoint, Hotkey, Noise, NumericMode, Phase, Uid

ORCHESTRATOR = "orchestrator"
POLL_S = 1.0
WATCH_S = 0.02
"""How often a kill that waits for a phase looks; no phase is shorter than one exchange of messages."""
FLUSH_S = 0.002
"""A flush of the state store takes a moment, so that a kill can come between stepping an event and writing it."""
BLOCK_S = 1.0
CHAIN_TEMPO = 20
VALIDATOR_STAKE = 1000.0
SILENT = Noise(
    mode=NumericMode.FP32,
    machine="simulated",
    rel_d=0.0,
    rel_d_token=0.0,
    rel_d_backward=0.0,
    rel_d_backward_token=0.0,
    rel_dw=0.0,
    loss_error=0.0,
)
"""Everybody computes on this machine in this mode: a replay of honest work is equal to the bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Take a role away for `down_s` seconds, `at_s` after the start; with a `phase`, after `epoch` is first seen in it."""

    name: str
    at_s: float
    down_s: float
    phase: Phase | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPlan:
    """What happens. Miners are named m1, m2, ...; validators v1, v2, ..."""

    seed: int = 0
    num_miners: int = 9
    num_validators: int = 2
    network: NetworkConfig = field(default_factory=NetworkConfig)
    kills: tuple[Kill, ...] = ()
    signers: dict[str, KeypairSigner] = field(default_factory=dict)
    """Keys to use, by name; drawn from the seed for those who are not named."""
    late_s: dict[str, float] = field(default_factory=dict)
    """Seconds after the start at which a node starts; at once when it is not named."""
    workers: dict[str, MakeWorker] = field(default_factory=dict)
    """Dishonest numbers, by miner."""
    miner_ports: dict[str, Callable[[MinerPorts], MinerPorts]] = field(default_factory=dict)
    """Dishonest dealings, by miner: the role's own code over ports that lie."""
    validator_ports: dict[str, Callable[[ValidatorPorts], ValidatorPorts]] = field(default_factory=dict)
    """The same, by validator."""
    noise: dict[str, Noise] = field(default_factory=dict)
    """What validators measured of their machines; SILENT when one is not named."""
    limit_s: float = 4 * 3600.0
    """Virtual time after which the run must have finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    """How it ended. `digest` covers the whole ledger and the weights on chain."""

    digest: Digest
    record: Record
    hotkeys: dict[str, Hotkey]
    weights: dict[str, dict[Uid, int]]
    uids: dict[Hotkey, Uid]
    expected: dict[Hotkey, float]
    num_payload_bytes: int
    num_kills: int


def run_virtual(config: RunConfig, incentives: IncentiveConfig, corpus: Corpus, plan: VirtualPlan) -> VirtualResult:
    """A whole run from genesis to its end. Raises InvariantBroken when it does not end in time or does not hold."""

    async def main() -> VirtualResult:
        return await VirtualSubnet(config, incentives, corpus, plan).run()

    return run(main())


def random_kills(seed: int, *, names: list[str], count: int, until_s: float) -> tuple[Kill, ...]:
    """`count` kills drawn over [0, until_s), each for up to 20 s."""
    kills = [
        Kill(
            name=draws.chosen(names, 1, seed, "kill-who", number)[0],
            at_s=until_s * draws.uniform(seed, "kill-when", number),
            down_s=0.5 + 19.5 * draws.uniform(seed, "kill-how-long", number),
        )
        for number in range(count)
    ]
    return tuple(sorted(kills, key=lambda kill: (kill.at_s, kill.name)))


class VirtualSubnet:
    """Builds the roles, starts, kills and restarts them, and reads the result."""

    def __init__(self, config: RunConfig, incentives: IncentiveConfig, corpus: Corpus, plan: VirtualPlan) -> None:
        self.plan = plan
        self._config = config
        self._incentives = incentives
        self._corpus = corpus
        self._clock = VirtualClock()
        self._network = Network(plan.network, seed=plan.seed, clock=self._clock)
        names = [f"m{n + 1}" for n in range(plan.num_miners)] + [f"v{n + 1}" for n in range(plan.num_validators)]
        self._signers = {name: self._signer(name) for name in [ORCHESTRATOR, *names]}
        self._owner = self._signers[ORCHESTRATOR].hotkey
        self._store = MemoryStateStore(self._clock, flush_s=FLUSH_S)
        self._blobs = MemoryBlobStore(self._clock)
        self._disks = {name: MemoryDisk() for name in names}
        self._chain = MemoryChainState(
            self._clock,
            MemoryChainConfig(block_time_s=BLOCK_S, tempo=CHAIN_TEMPO, seed=plan.seed),
            owner_hotkey=self._owner,
        )
        for name in names:
            stake = VALIDATOR_STAKE if name.startswith("v") else 0.0
            self._chain.register(self._signers[name].hotkey, f"coldkey-{name}", stake=stake)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lives: dict[str, int] = {}
        self._num_kills = 0
        self._orchestrator: Orchestrator | None = None
        self._genesis: Created | None = None

    def _signer(self, name: str) -> KeypairSigner:
        if name in self.plan.signers:
            return self.plan.signers[name]
        return KeypairSigner.from_uri(f"//strata//{self.plan.seed}//{name}", deterministic=True)

    async def run(self) -> VirtualResult:
        """From genesis to the finished run."""
        self._genesis = await create_run(
            self._config,
            self._incentives,
            run_id=f"virtual-{self.plan.seed}",
            owner=self._owner,
            corpus_digest=self._corpus.digest,
            blobs=self._blobs,
            beacon=f"genesis-{self.plan.seed}",
            at_s=self._clock.now(),
        )
        await self._clock.sleep((CHAIN_TEMPO + 2) * BLOCK_S)  # validators have their permits
        for name in self._signers:
            if name not in self.plan.late_s:
                self._start(name)
        kills = asyncio.create_task(self._follow_plan())
        try:
            await self._until_finished()
        finally:
            kills.cancel()
            for name in list(self._running):
                await self._kill(name)
        return await self._result()

    async def _until_finished(self) -> None:
        began = self._clock.now()
        while not self._is_finished():
            await self._clock.sleep(POLL_S)
            self._raise_failures()
            if self._clock.now() - began > self.plan.limit_s:
                state = self._orchestrator.state if self._orchestrator else None
                where = f"epoch {state.epoch}, phase {state.phase}" if state else "no orchestrator"
                raise InvariantBroken(f"no progress: the run has not finished after {self.plan.limit_s} s, at {where}")

    def _raise_failures(self) -> None:
        for name, task in self._running.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
            if task.done():
                raise InvariantBroken(f"{name} ended by itself")

    def _is_finished(self) -> bool:
        orchestrator = self._orchestrator
        if orchestrator is None or orchestrator.state.phase is not Phase.FINISHED:
            return False
        last = orchestrator.state.ledger.num_segments - 1
        posted = orchestrator.state.posted
        names = [name for name in self._disks if name.startswith("v")]
        hotkeys = [self._signers[name].hotkey for name in names]
        return all(hotkey in posted and posted[hotkey].segment == last for hotkey in hotkeys)

    # ---- processes ---------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        self._lives[name] = self._lives.get(name, 0) + 1
        if name == ORCHESTRATOR:
            main = self._run_orchestrator()
        elif name.startswith("m"):
            main = self._run_miner(name)
        else:
            main = self._run_validator(name)
        self._running[name] = asyncio.create_task(main, name=name)

    async def _kill(self, name: str) -> None:
        """The process is gone: nobody reaches it, and it does nothing more."""
        self._network.receivers.pop(self._signers[name].hotkey, None)
        if name == ORCHESTRATOR:
            self._network.server.stop()
        task = self._running.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _follow_plan(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, late_s in self.plan.late_s.items():
                group.create_task(self._start_after(name, late_s))
            for kill in self.plan.kills:
                group.create_task(self._kill_when_due(kill))

    async def _kill_when_due(self, kill: Kill) -> None:
        while kill.phase is not None and not self._is_in(kill.phase, kill.epoch):
            await self._clock.sleep(WATCH_S)
        await self._clock.sleep(kill.at_s)
        if kill.name in self._running:
            self._num_kills += 1
            await self._kill(kill.name)
            await self._start_after(kill.name, kill.down_s)

    def _is_in(self, phase: Phase, epoch: int) -> bool:
        orchestrator = self._orchestrator
        return orchestrator is not None and (orchestrator.state.phase, orchestrator.state.epoch) == (phase, epoch)

    async def _start_after(self, name: str, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._start(name)

    def _discovery(self) -> wire.Discovery:
        return wire.Discovery(
            u="sim://orchestrator",
            r=f"virtual-{self.plan.seed}",
            v=wire.PROTOCOL_VERSION,
            c=config_digest(self._config, self._incentives, self._corpus.digest),
        )

    async def _run_orchestrator(self) -> None:
        def genesis() -> Created:
            if self._genesis is None:
                raise InvariantBroken("the run was not created")
            return self._genesis

        orchestrator = Orchestrator(
            config=self._config,
            ports=OrchestratorPorts(
                signer=self._signers[ORCHESTRATOR],
                store=self._store,
                blobs=self._blobs,
                chain=self._chain.view(self._owner),
                compute=InlineCompute(),
                clock=self._clock,
                may_lead=lambda: True,
            ),
            discovery=self._discovery(),
            genesis=genesis,
        )
        self._orchestrator = orchestrator
        self._network.server.handler = orchestrator.handle
        self._network.server.public = orchestrator.public
        await orchestrator.run()

    async def _run_miner(self, name: str) -> None:
        signer = self._signers[name]
        ports = MinerPorts(
            signer=signer,
            control=SimControl(self._network, signer.hotkey, self._clock),
            peers=SimPeers(self._network, signer.hotkey),
            blobs=MemoryBlobs(self._blobs),
            disk=self._disks[name],
            corpus=self._corpus,
            compute=self._compute(name),
            clock=self._clock,
        )
        if name in self.plan.miner_ports:
            ports = self.plan.miner_ports[name](ports)
        miner = Miner(
            config=self._config,
            discovery=self._discovery(),
            orchestrator=self._owner,
            endpoint=Endpoint(host=name, port=1),
            mode=NumericMode.FP32,
            session=f"{name}-{self._lives[name]}",
            ports=ports,
            make_worker=self.plan.workers.get(name, StageWorker),
        )
        await miner.run()

    async def _run_validator(self, name: str) -> None:
        signer = self._signers[name]
        ports = ValidatorPorts(
            signer=signer,
            control=SimControl(self._network, signer.hotkey, self._clock),
            blobs=MemoryBlobs(self._blobs),
            public=SimPublic(self._network),
            chain=self._chain.view(signer.hotkey),
            corpus=self._corpus,
            compute=self._compute(name),
            clock=self._clock,
        )
        if name in self.plan.validator_ports:
            ports = self.plan.validator_ports[name](ports)
        validator = Validator(
            config=self._config,
            discovery=self._discovery(),
            owner=self._owner,
            noise=self.plan.noise.get(name, SILENT),
            ports=ports,
        )
        await validator.run()

    def _compute(self, name: str) -> SimCompute:
        slowness = 0.5 + draws.uniform(self.plan.seed, "speed", name)
        return SimCompute(
            seconds_per_call=0.05 * slowness,
            seed=self.plan.seed,
            name=f"{name}-{self._lives[name]}",
            clock=self._clock,
        )

    # ---- the end -----------------------------------------------------------------------------------------------

    async def _result(self) -> VirtualResult:
        orchestrator = self._orchestrator
        if orchestrator is None:
            raise InvariantBroken("the orchestrator never ran")
        record = Record()
        await record.follow(_Reader(orchestrator.public), orchestrator.state.ledger.num_segments)
        check_record(record.entries, lanes(self._config))
        weights = {
            name: await self._chain.view(self._owner).weights(self._signers[name].hotkey)
            for name in self._disks
            if name.startswith("v")
        }
        metagraph = await self._chain.view(self._owner).metagraph()
        return VirtualResult(
            digest=digest(
                wire.encode([record.head, sorted((name, sorted(row.items())) for name, row in weights.items())])
            ),
            record=record,
            hotkeys={name: signer.hotkey for name, signer in self._signers.items()},
            weights=weights,
            uids={neuron.hotkey: neuron.uid for neuron in metagraph.neurons},
            expected=weighted(record, burn_hotkey=self._owner),
            num_payload_bytes=self._network.payload_bytes,
            num_kills=self._num_kills,
        )


class _Reader:
    """The orchestrator's public objects, read directly once everything has ended."""

    def __init__(self, read: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._read = read

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        """A public object."""
        data = await self._read(name)
        if data is None or len(data) > limit_bytes:
            raise InvariantBroken(f"public object {name} is missing or too long")
        return data
