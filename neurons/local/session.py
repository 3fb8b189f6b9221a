"""One local subnet from its first key to its report."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from rich.live import Live

from neurons.checks import read_history
from neurons.exit_codes import ExitCode
from neurons.lifecycle import Stop
from neurons.local.apart import disturbed, is_apart, round_work
from neurons.local.chain import make_genesis, register_all, until_up, write_genesis
from neurons.local.children import KeepChain, MeasureText, PlayRole, RepeatRounds, TrainReference
from neurons.local.evidence import Evidence, Report, encode_report
from neurons.local.judging import judge
from neurons.local.keys import create_wallets, hotkeys_of
from neurons.local.lines import changes
from neurons.local.notes import (
    Progress,
    Repeated,
    Trained,
    read_counters,
    read_repeated,
    read_training,
    read_unigram,
)
from neurons.local.plan import Part, Plan
from neurons.local.report import console, make_report, one_screen
from neurons.local.screen import clock_line, screen
from neurons.local.supervisor import Child, Supervisor, last_words
from neurons.local.watch import Snapshot, Watch
from neurons.scoring import SEGMENT_LIMIT_BYTES
from neurons.settings import to_toml
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.embedded_store import find_embedded
from subnet.adapters.http_client import open_session
from subnet.adapters.system import write_atomically
from subnet.errors import StartupRefused
from subnet.types import Epoch, Hotkey, Phase, SampleId

_LOOK_EVERY_S = 1.0
_ANNOUNCE_LIMIT_S = 120.0
_WEIGHTS_LIMIT_S = 90.0
_PAY_SLACK_S = 5.0
_NUM_NEWS = 64


class Session:
    """Starts everything, shows it, judges it. `exit_code` is what the command should end with."""

    def __init__(self, plan: Plan) -> None:
        self.exit_code = ExitCode.INTERRUPTED
        self._plan = plan
        self._layout = plan.layout
        self._began = time.monotonic()
        self._out = console()
        self._live: Live | None = None
        self._reached = ""
        self._news: deque[str] = deque(maxlen=_NUM_NEWS)
        self._wallets = create_wallets(plan)
        self._hotkeys = hotkeys_of(self._wallets)
        self._names = {hotkey: name for name, hotkey in self._hotkeys.items()}
        self._validators = [self._hotkeys[part.name] for part in plan.of_role("validator")]
        cache = str(plan.layout.root / "chain" / "runtime-cache")
        self._supervisor = Supervisor(
            plan.layout.processes, environment={"BITTENSOR_RUNTIME_CACHE_DIR": cache}, tell=self.tell
        )

    async def run(self, stop: Stop) -> None:
        """The whole run, or as much of it as there is before a stop is requested."""
        work, stopped = asyncio.ensure_future(self._work()), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            work.cancel()
            await asyncio.wait({work})
            await self._stop_everything()
        if not work.cancelled():
            await work
        elif self._reached:
            stop.report_lost(f"the run was in {self._reached}")
            self.tell(f"everything is ended; sealed epochs can be checked with: strata audit {self._layout.root}")

    def tell(self, line: str) -> None:
        """One piece of news: into the picture, or onto the output where there is none."""
        self._news.append(clock_line(line))
        if self._live is None:
            self._out.print(clock_line(line), markup=False)

    # ---- the way through ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        async with open_session() as http, asyncio.TaskGroup() as group:
            watch = Watch(self._plan, http, validators=self._validators)
            try:
                await self._start(watch, group)
                group.create_task(self._measure_text(), name="text")
                with self._picture():
                    await self._until_finished(watch)
                    await self._until_paid(watch)
                evidence = await self._collect(watch)
            finally:
                await watch.close()
            await self._supervisor.stop_roles()
            evidence = await self._complete(evidence)
            self._conclude(evidence)
            await self._supervisor.stop()

    async def _start(self, watch: Watch, group: asyncio.TaskGroup) -> None:
        plan, layout = self._plan, self._layout
        self.tell(f"local subnet in {layout.root}: {_counts(plan)}")
        genesis = make_genesis(plan, self._wallets)
        write_genesis(layout, genesis)
        self._write_config()
        chain = KeepChain(
            name="devnet",
            log=str(layout.log("devnet")),
            genesis=genesis,
            directory=str(layout.chain),
            port=plan.chain_port,
        )
        owner = self._hotkeys[plan.orchestrator.name]
        self._supervisor.warm_up()
        self._keep(group, Child(job=chain, role="devnet", port=plan.chain_port, hotkey=owner))
        await until_up(watch.chain)
        self.tell(f"chain node at {plan.chain_url}, netuid {genesis.netuid}")
        self._keep(group, self._role(plan.orchestrator))
        await register_all(plan, self._wallets)
        self.tell(f"{len(plan.parts) - 1} hotkeys registered, validators staked")
        await self._until_announced(watch)
        self.tell(f"orchestrator at {plan.url}, which shows the run in a browser")
        for part in plan.parts:
            if part is not plan.orchestrator:
                self._keep(group, self._role(part))
        self.tell(f"{_counts(plan)} started after {time.monotonic() - self._began:.1f} s")

    def _keep(self, group: asyncio.TaskGroup, child: Child) -> None:
        group.create_task(self._supervisor.keep(child), name=child.job.name)

    def _role(self, part: Part) -> Child:
        job = PlayRole(
            name=part.name,
            log=str(self._layout.log(part.name)),
            role=part.role,
            config=self._plan.node_config(part),
            cheat=part.cheat,
        )
        return Child(job=job, role=part.role, port=part.port, hotkey=self._hotkeys[part.name])

    def _write_config(self) -> None:
        """What each role is told, fit for --config: anyone can start one by hand instead."""
        for part in self._plan.parts:
            path = self._layout.node(part.name) / "node.toml"
            write_atomically(path, to_toml(self._plan.node_config(part)).encode())
        write_atomically(self._layout.run_config, to_toml(self._plan.node_config(self._plan.orchestrator)).encode())

    async def _until_announced(self, watch: Watch) -> None:
        deadline = time.monotonic() + _ANNOUNCE_LIMIT_S
        while watch.last.run is None or await watch.discovery() is None:
            if time.monotonic() > deadline:
                log = self._layout.log(self._plan.orchestrator.name)
                reason = f"the orchestrator did not come up within {_ANNOUNCE_LIMIT_S:g} s: {last_words(log)}\nIts log: {log}"
                raise StartupRefused(reason, ExitCode.UNAVAILABLE)
            await asyncio.sleep(_LOOK_EVERY_S / 4)
            await watch.look()

    @contextlib.contextmanager
    def _picture(self) -> Iterator[None]:
        if not self._out.is_terminal:
            yield
            return
        try:
            with Live(console=self._out, auto_refresh=False, transient=True) as self._live:
                yield
        finally:
            self._live = None

    async def _until_finished(self, watch: Watch) -> None:
        while True:
            await self._look(watch)
            run = watch.last.run
            if run is not None and not watch.last.is_stale and run.phase is Phase.FINISHED:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until_paid(self, watch: Watch) -> None:
        """Until every validator has posted the last segment's weights and the chain has paid by them once."""
        deadline = time.monotonic() + _WEIGHTS_LIMIT_S
        while not _all_posted(watch.last, self._validators) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look(watch)
        options = self._plan.options
        until = await watch.chain.block() + options.tempo_blocks + 1
        self.tell("all weights are set; waiting for one more epoch of the chain to pay by them")
        deadline = time.monotonic() + 2 * options.tempo_blocks * options.block_time_s + _PAY_SLACK_S
        while await watch.chain.block() < until and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look(watch)

    async def _look(self, watch: Watch) -> None:
        before = watch.last
        after = await watch.look()
        unigram = read_unigram(self._layout.text)
        if after.run is not None:
            self._reached = f"epoch {after.run.epoch}, {after.run.phase.value}"
        for line in changes(before, after, self._names, unigram=unigram):
            self.tell(line)
        if self._live is not None:
            notes = [child.note for child in self._supervisor.children.values()]
            picture = screen(after, names=self._names, processes=notes, news=list(self._news), unigram=unigram)
            self._live.update(picture, refresh=True)

    # ---- the end -----------------------------------------------------------------------------------------------

    async def _collect(self, watch: Watch) -> Evidence:
        """The record and the chain, read as an outsider reads them."""
        run = watch.last.run
        num_segments = run.sealed_segments if run else 0
        segments = [
            await watch.public.read(f"ledger/{index}", limit_bytes=SEGMENT_LIMIT_BYTES) for index in range(num_segments)
        ]
        history, whole = read_history(segments, owner=self._hotkeys[self._plan.orchestrator.name])
        return Evidence(
            config=self._plan.config,
            parts={self._hotkeys[part.name]: part for part in self._plan.parts},
            history=history,
            whole=whole,
            discovery=await watch.discovery(),
            metagraph=await watch.chain.fresh_metagraph(),
            weights={hotkey: await watch.chain.weights(hotkey) for hotkey in self._validators},
        )

    async def _complete(self, evidence: Evidence) -> Evidence:
        """With what the processes left, once they have ended."""
        miners = self._plan.of_role("miner")
        found = {part.name: read_counters(self._layout.node(part.name)) for part in miners}
        children = self._supervisor.children
        evidence = replace(
            evidence,
            counters={name: counters for name, counters in found.items() if counters is not None},
            unigram=read_unigram(self._layout.text),
            restarts={name: child.restarts for name, child in children.items()},
        )
        if not self._plan.options.has_reference:
            return evidence
        if is_apart(evidence):
            return replace(evidence, repeated=await self._repeat_rounds(evidence))
        return replace(evidence, reference=await self._train_reference(evidence))

    async def _measure_text(self) -> None:
        job = MeasureText(
            name="text", log=str(self._layout.log("text")), config=self._plan.config, result=str(self._layout.text)
        )
        await self._supervisor.run_once(Child(job=job, role="text", port=0, hotkey=Hotkey("")))

    async def _train_reference(self, evidence: Evidence) -> Trained | None:
        """Train the whole model in one process on the samples that the subnet trained on."""
        samples: tuple[tuple[Epoch, SampleId], ...] = tuple(
            (account.epoch, sample)
            for _, account in sorted(evidence.history.record.accounts.epochs.items())
            for sample in sorted(account.losses)
        )
        path = self._layout.reference
        job = TrainReference(
            name="reference",
            log=str(self._layout.log("reference")),
            config=self._plan.config,
            samples=samples,
            result=str(path),
        )
        self.tell(f"for comparison: the whole model in one process on the same {len(samples)} samples")
        training = asyncio.ensure_future(
            self._supervisor.run_once(Child(job=job, role="reference", port=0, hotkey=Hotkey("")))
        )
        told = 0
        while not training.done():
            await asyncio.wait({training}, timeout=_LOOK_EVERY_S)
            line = read_training(path)
            if isinstance(line, Progress) and line.num_samples >= told + max(1, len(samples) // 4):
                told = line.num_samples
                self.tell(f"reference: {line.num_samples} of {len(samples)} samples, loss {line.loss:.3f}")
        last = read_training(path)
        return last if isinstance(last, Trained) else None

    async def _repeat_rounds(self, evidence: Evidence) -> tuple[Repeated, ...]:
        """Have one process train and average the same samples; nothing where somebody was disturbed and others cannot know."""
        if disturbed(evidence):
            return ()
        path = self._layout.repeated
        job = RepeatRounds(
            name="repeated",
            log=str(self._layout.log("repeated")),
            config=self._plan.config,
            rounds=tuple(map(round_work, evidence.history.record.accounts.published())),
            result=str(path),
        )
        self.tell(f"for comparison: the same {len(job.rounds)} rounds in one process")
        await self._supervisor.run_once(Child(job=job, role="reference", port=0, hotkey=Hotkey("")))
        return read_repeated(path)

    def _conclude(self, evidence: Evidence) -> None:
        owner = self._wallets[self._plan.orchestrator.name]
        findings = judge(evidence, KeypairSigner(owner.hotkey).verify)
        report: Report = make_report(evidence, findings, took_s=time.monotonic() - self._began)
        write_atomically(self._layout.report, encode_report(report))
        self._out.print(one_screen(report, self._layout.root))
        self.exit_code = ExitCode.OK if report.is_ok else ExitCode.CHECK_FAILED

    async def _stop_everything(self) -> None:
        """Every process that was started, the state store of a killed orchestrator included."""
        await self._supervisor.stop()
        store = await asyncio.to_thread(find_embedded, self._layout.node(self._plan.orchestrator.name) / "state")
        if store is not None:
            await asyncio.to_thread(store.stop)


def _counts(plan: Plan) -> str:
    stages, epochs = plan.config.run.training.num_stages, plan.config.run.training.num_epochs
    miners, validators = len(plan.of_role("miner")), len(plan.of_role("validator"))
    return f"{miners} miners in {stages} stages, {validators} validators, {epochs or 'endless'} epochs"


def _all_posted(snapshot: Snapshot, validators: list[Hotkey]) -> bool:
    run = snapshot.run
    return run is not None and all(run.posted.get(hotkey) == run.sealed_segments - 1 for hotkey in validators)
