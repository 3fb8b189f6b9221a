"""Miner: hold one stage, run forward and backward, share and reduce shards.

The miner follows the orchestrator's directive, a pure view of the run, so it can be killed at any moment and go on: what
it needs is the directive, its own disk, and the blob store.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict

from neurons.exit_codes import ExitCode
from neurons.roles.books import Books
from neurons.roles.collector import Collector
from neurons.roles.delivery import Delivery
from neurons.roles.detour import Detour, DetourCounters
from neurons.roles.ports import MinerPorts
from neurons.roles.sharing import Anchor, Sharing, upload_bytes
from neurons.roles.starting import HeldStage, Starting
from neurons.roles.workbench import Workbench
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, StartupRefused, TransientFailure
from subnet.frames import Frame, digest
from subnet.training.outer import decode_snapshot
from subnet.training.pipeline import StageWorker
from subnet.types import Direction, Endpoint, Epoch, FrameHeader, Hotkey, NumericMode, Phase, StageIndex

log = logging.getLogger("strata.miner")

POLL_S = 10.0
RETRY_S = 0.5
RECEIPTS_EVERY_S = 0.5

MakeWorker = Callable[[RunConfig, StageIndex, NumericMode], StageWorker]


class Miner:
    """One hotkey, one stage, one process (`session` tells processes apart)."""

    def __init__(
        self,
        *,
        config: RunConfig,
        discovery: wire.Discovery,
        orchestrator: Hotkey,
        endpoint: Endpoint,
        mode: NumericMode,
        session: str,
        ports: MinerPorts,
        make_worker: MakeWorker = StageWorker,
    ) -> None:
        self.directive: wire.Directive | None = None
        self.detoured = DetourCounters()
        self._config = config
        self._run_id = discovery.r
        self._orchestrator = orchestrator
        self._endpoint = endpoint
        self._mode = mode
        self._session = session
        self._ports = ports
        self._make_worker = make_worker
        self._changed = asyncio.Event()
        self._sharing = Sharing(
            config=config,
            control=ports.control,
            blobs=ports.blobs,
            compute=ports.compute,
            hotkey=ports.signer.hotkey,
        )
        self._starting = Starting(config=config, sharing=self._sharing, ports=ports)
        self._collector = Collector(
            control=ports.control,
            blobs=ports.blobs,
            signer=ports.signer,
            clock=ports.clock,
            expect=self._expect_soon,
            take=self._on_frame,
            counters=self.detoured,
        )
        self._delivery: Delivery | None = None
        self._stage: HeldStage | None = None

    @property
    def num_open_samples(self) -> int:
        """Samples that would be lost if the process ended now."""
        return self._stage.bench.open_samples if self._stage else 0

    async def run(self) -> None:
        """Work until cancelled. Raises Refused when the run will not have this miner."""
        ports = self._ports
        ports.peers.on_frame(self._on_frame)
        detour = Detour(
            control=ports.control, blobs=ports.blobs, signer=ports.signer, clock=ports.clock, counters=self.detoured
        )
        async with asyncio.TaskGroup() as group:
            self._delivery = Delivery(
                peers=ports.peers, control=ports.control, detour=detour, clock=ports.clock, group=group
            )
            group.create_task(self._collector.run(), name="collect")
            group.create_task(self._follow(), name="follow")
            group.create_task(self._live(), name="live")
            group.create_task(self._post_receipts(), name="receipts")
            group.create_task(self._answer_challenges(), name="challenges")

    def expect(self, header: FrameHeader) -> None:
        """Refuse a frame by its header, before its payload is read. Raises Backpressure, ProtocolViolation."""
        if self._stage is None:
            raise Backpressure("this miner has no stage yet")
        self._stage.bench.expect(header)

    def _expect_soon(self, header: FrameHeader) -> None:
        """The same for a frame that waits in the store, where it may lie until there is room for it."""
        self.expect(header)
        if self._stage is not None:
            self._stage.bench.require_room(header)

    def health(self) -> dict[str, object]:
        """Where this miner is, for a monitor."""
        directive = self.directive
        return {
            "stage": directive.stage if directive else None,
            "epoch": directive.epoch if directive else None,
            "phase": directive.phase if directive else None,
            "note": directive.note if directive else "not joined yet",
        }

    @property
    def num_batches(self) -> int:
        """Backward passes done in this epoch."""
        return self._stage.books.num_batches if self._stage else 0

    def counters(self) -> dict[str, object]:
        """What went over the wire so far: payload bytes by direction, passes, and each merge."""
        delivered = self._delivery.payload_bytes if self._delivery else {}
        return {
            "activation_payload_bytes_sent": delivered.get(Direction.FORWARD, 0),
            "gradient_payload_bytes_sent": delivered.get(Direction.BACKWARD, 0),
            "passes_sent": self._delivery.num_delivered if self._delivery else 0,
            "frames_lost": self._delivery.num_lost if self._delivery else 0,
            "frames_detoured": self.detoured.frames_sent,
            "detoured_payload_bytes_sent": self.detoured.payload_bytes_sent,
            "frames_refused": self._stage.bench.num_refused if self._stage else 0,
            "merges": [asdict(merge) for merge in self._sharing.merges],
            "moved": self._sharing.moved.by_kind,
        }

    async def leave(self) -> None:
        """Tell the orchestrator that this process ends, so that nobody waits for it."""
        request = wire.Leave(num_open_samples=self.num_open_samples, session=self._session)
        await self._ports.control.call(request, timeout_s=2.0)

    # ---- following the orchestrator ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        await self._join()
        while True:
            known = self.directive.version if self.directive else 0
            request = wire.Poll(known_version=known, wait_s=POLL_S, session=self._session)
            try:
                answer = await self._ports.control.call(request, timeout_s=3 * POLL_S)
            except TransientFailure as error:
                log.warning("orchestrator not reached", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)
                continue
            except Refused as error:
                if error.code == "not-registered":
                    raise StartupRefused(
                        f"{self._ports.signer.hotkey} lost its place on the subnet while running; nothing was spent.\n"
                        "Look at the price with btcli subnets list, and register again if it is worth it.",
                        ExitCode.PRUNED,
                    ) from error
                raise
            if isinstance(answer, wire.Directive):
                await self._take(answer)

    async def _join(self) -> None:
        request = wire.Join(endpoint=self._endpoint, mode=self._mode, session=self._session)
        while True:
            try:
                answer = await self._ports.control.call(request, timeout_s=60.0)
                break
            except TransientFailure as error:
                log.warning("orchestrator not reached", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)
            except Refused as error:
                if error.code != "not-registered":
                    raise
                # a key registered a moment ago may not be in the orchestrator's metagraph yet
                log.warning("not admitted yet", extra={"reason": str(error)})
                await self._ports.clock.sleep(4 * RETRY_S)
        if isinstance(answer, wire.Joined):
            log.info("joined", extra={"stage": answer.stage, "first_epoch": answer.first_epoch, "note": answer.note})
            self._hold(answer.stage)

    def _hold(self, stage: StageIndex) -> None:
        ports = self._ports
        if self._delivery is None or (self._stage is not None and self._stage.books.stage == stage):
            return
        books = Books(run_id=self._run_id, hotkey=ports.signer.hotkey, stage=stage, disk=ports.disk)
        worker = self._make_worker(self._config, stage, self._mode)
        bench = Workbench(
            config=self._config,
            run_id=self._run_id,
            orchestrator=self._orchestrator,
            worker=worker,
            books=books,
            delivery=self._delivery,
            ports=ports,
        )
        self._stage = HeldStage(worker=worker, books=books, bench=bench, posting=asyncio.Lock())

    async def _take(self, directive: wire.Directive) -> None:
        self.directive = directive
        if directive.has_frames:
            self._collector.call()
        if directive.stage is not None:
            self._hold(directive.stage)
        self._changed.set()
        self._changed = asyncio.Event()
        if self._stage is not None:
            self._stage.bench.wake()

    async def _on_frame(self, sender: Hotkey, frame: Frame) -> None:
        if self._stage is None:
            raise Backpressure("this miner has no stage yet")
        await self._stage.bench.take(sender, frame)

    # ---- one epoch after the other -----------------------------------------------------------------------------

    async def _live(self) -> None:
        while True:
            directive, stage = self.directive, self._stage
            if directive is None or stage is None or directive.snapshot is None:
                await self._wait()
                continue
            try:
                await self._epoch(directive, stage)
            except (TransientFailure, NotFound, Refused, ProtocolViolation) as error:
                log.warning("epoch interrupted", extra={"epoch": directive.epoch, "reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)

    async def _wait(self) -> None:
        """Until the directive changes, or a moment passes."""
        changed = self._changed
        try:
            async with asyncio.timeout(POLL_S):
                await changed.wait()
        except TimeoutError:
            return

    async def _epoch(self, directive: wire.Directive, stage: HeldStage) -> None:
        """Everything between two published epochs; each part looks at the directive, so it can be entered anywhere."""
        epoch = directive.epoch
        if directive.phase in (Phase.CLOSING, Phase.FINISHED):
            await self._leave_epoch_or_change(epoch)
            return
        await self._starting.prepare(directive, stage)
        if directive.phase in (Phase.GATHERING, Phase.PUBLISHED) or not directive.is_in_roster:
            await self._leave_epoch_or_change(epoch)
            return
        if self._is_training(epoch):
            await stage.bench.run(
                is_over=lambda: not self._is_training(epoch), may_lease=lambda: self._may_lease(epoch)
            )
        if self._phase_of(epoch) is Phase.COMMITTING:
            await self._commit(epoch, stage)
        while self._phase_of(epoch) in (Phase.COMMITTING, Phase.UPLOADING, Phase.MERGING):
            if not await self._share(epoch, stage):
                await self._wait()

    async def _leave_epoch_or_change(self, epoch: Epoch) -> None:
        directive = self.directive
        if directive is not None and directive.epoch == epoch:
            await self._wait()

    def _phase_of(self, epoch: Epoch) -> Phase | None:
        directive = self.directive
        return directive.phase if directive is not None and directive.epoch == epoch else None

    def _is_training(self, epoch: Epoch) -> bool:
        """Training goes on into the commit phase until open samples are settled, or half of that phase is over."""
        directive = self.directive
        phase = self._phase_of(epoch)
        if directive is None or phase is not Phase.COMMITTING:
            return phase is Phase.TRAINING
        if directive.is_settled or directive.has_committed:
            return False
        half_s = self._config.deadlines.committing_s / 2
        return self._ports.clock.now() < directive.phase_deadline_s - half_s

    def _may_lease(self, epoch: Epoch) -> bool:
        return self._phase_of(epoch) is Phase.TRAINING

    async def _commit(self, epoch: Epoch, stage: HeldStage) -> None:
        directive = self.directive
        if directive is None or directive.has_committed or stage.anchor is None:
            return
        await self._flush(stage)
        anchor = stage.anchor
        stage.upload = await self._ports.compute.run(lambda: upload_bytes(anchor, stage.worker.params()))
        await self._ports.control.call(self._sharing.commitment(stage.books, stage.upload))
        stage.committed_epoch = epoch
        log.info("committed", extra={"epoch": epoch, "batches": stage.books.num_batches})

    async def _share(self, epoch: Epoch, stage: HeldStage) -> bool:
        """Do the next piece of sharing; False when there is none to do now."""
        directive = self.directive
        if directive is None or stage.anchor is None or directive.epoch != epoch:
            return False
        owes_upload = directive.has_committed and not directive.has_uploaded and stage.uploaded_epoch != epoch
        if directive.phase is not Phase.COMMITTING and owes_upload and stage.upload:
            await self._sharing.upload(epoch, stage.upload)
            stage.uploaded_epoch = epoch
            return True
        if not directive.is_merging:
            return False
        if stage.plan is None or stage.plan.epoch != epoch:
            plan = await self._ports.control.call(wire.GetMergePlan(epoch=epoch))
            if isinstance(plan, wire.MergePlan):
                await self._sharing.reduce(plan)
                stage.plan = plan
                return True
        if directive.merged and stage.plan is not None and stage.outer_epoch != epoch:
            merged = await self._sharing.download_merged(stage.plan, directive.merged)
            data = await self._sharing.apply_outer(stage.anchor, stage.plan, merged)
            await self._sharing.report_outer(epoch, data, must_upload=directive.must_upload_snapshot)
            params, momentum = decode_snapshot(data, stage.plan.num_elements)
            stage.anchor = Anchor(params=params, momentum=momentum, digest=digest(data))
            stage.outer_epoch = epoch
            return True
        return False

    # ---- beside the epochs -------------------------------------------------------------------------------------

    async def _post_receipts(self) -> None:
        while True:
            await self._ports.clock.sleep(RECEIPTS_EVERY_S)
            if self._stage is None:
                continue
            try:
                await self._flush(self._stage)
            except (TransientFailure, Refused) as error:
                log.info("receipts not taken", extra={"reason": str(error)})

    async def _flush(self, stage: HeldStage) -> None:
        """Post what is not acknowledged; one post at a time, so that the chain is extended in order."""
        async with stage.posting:
            request = stage.books.unacked()
            if request is None:
                return
            answer = await self._ports.control.call(request)
            if isinstance(answer, wire.Ack) and answer.epoch == stage.books.epoch:
                stage.books.acknowledged(answer.num_receipts)
                await stage.books.keep_ack(answer)

    async def _answer_challenges(self) -> None:
        answered: dict[tuple[Epoch, int], None] = {}
        while True:
            directive, stage = self.directive, self._stage
            todo = [c for c in (directive.challenges if directive else ()) if (c.epoch, c.segment) not in answered]
            if not todo or stage is None:
                await self._wait()
                continue
            challenge = todo[0]
            try:
                await self._sharing.answer(challenge, stage.books)
                log.info("challenge answered", extra={"epoch": challenge.epoch, "segment": challenge.segment})
            except (TransientFailure, ProtocolViolation) as error:
                log.warning("challenge not answered yet", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)
                continue
            except (NotFound, Refused) as error:
                log.error("challenge cannot be answered", extra={"reason": str(error)})
            answered[challenge.epoch, challenge.segment] = None
