"""How a miner comes to where an epoch begins: published params, those of its neighbours, or its own newest checkpoint."""

import asyncio
import logging
from dataclasses import dataclass

from neurons.roles.books import Books
from neurons.roles.ports import MinerPorts
from neurons.roles.sharing import Anchor, Sharing, upload_bytes
from neurons.roles.workbench import Workbench
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import Refused
from subnet.model.partition import num_elements
from subnet.orchestration.late import max_staleness
from subnet.training.neighbours import open_neighbours
from subnet.training.pipeline import StageWorker
from subnet.types import BlobRef, Epoch

log = logging.getLogger("strata.miner")


@dataclass(slots=True)
class HeldStage:
    """What belongs to the stage a miner holds now."""

    worker: StageWorker
    books: Books
    bench: Workbench
    posting: asyncio.Lock
    anchor: Anchor | None = None
    prepared_epoch: int = -1
    ready_epoch: int = -1
    """The epoch for which the orchestrator knows that this stage is ready."""
    upload: bytes = b""
    committed_epoch: int = -1
    uploaded_epoch: int = -1
    plan: wire.MergePlan | None = None
    outer_epoch: int = -1


class Starting:
    """Prepares a stage for the epoch that a directive names."""

    def __init__(self, *, config: RunConfig, sharing: Sharing, ports: MinerPorts) -> None:
        self._config = config
        self._sharing = sharing
        self._ports = ports

    async def prepare(self, directive: wire.Directive, stage: HeldStage) -> None:
        """Hold the epoch's starting params, or the newest checkpoint of it that an earlier process left.

        Raises Refused, NotFound, TransientFailure, ProtocolViolation: then nothing is trained on.
        """
        epoch, snapshot = directive.epoch, directive.snapshot
        if snapshot is None:
            return
        if stage.prepared_epoch != epoch:
            await self._load(directive, stage, snapshot)
        if stage.ready_epoch != epoch and stage.anchor is not None:
            # again until it is heard: an epoch begins with those who said so, and not at all while nobody has
            await self._ports.control.call(wire.Ready(epoch=epoch, anchor=stage.anchor.digest))
            stage.ready_epoch = epoch

    async def _load(self, directive: wire.Directive, stage: HeldStage, snapshot: BlobRef) -> None:
        """Come to where the epoch begins, or to where an earlier process was in it."""
        epoch = directive.epoch
        await self._hand_in_late(epoch, stage)
        if stage.anchor is None or stage.anchor.digest != snapshot.digest:
            count = num_elements(self._config, stage.books.stage)
            stage.anchor = await self._sharing.load_anchor(snapshot, count)
        anchor = stage.anchor
        await self._meet_neighbours(directive, stage)
        if stage.prepared_epoch < 0 and await self._take_up(directive, stage, anchor):
            return
        await self._ports.compute.run(lambda: stage.worker.load(anchor.params))
        await stage.books.open(epoch, await self._ports.compute.run(stage.worker.checkpoint))
        stage.upload = b""
        stage.bench.begin(epoch)
        stage.prepared_epoch = epoch

    async def _hand_in_late(self, epoch: Epoch, stage: HeldStage) -> None:
        """What was committed and could not be uploaded before its epoch ended may still be merged (papers.md B3)."""
        owed = stage.committed_epoch
        if owed in (-1, epoch, stage.uploaded_epoch) or epoch - owed > max_staleness(self._config):
            return
        stage.uploaded_epoch = owed
        try:
            await self._sharing.upload(Epoch(owed), stage.upload)
            log.info("handed in late", extra={"epoch": owed})
        except Refused as error:
            log.warning("late update not taken", extra={"epoch": owed, "reason": str(error)})

    async def _meet_neighbours(self, directive: wire.Directive, stage: HeldStage) -> None:
        """Load what the stages that ours computes with start this epoch from; in a pipeline there are none."""
        if not directive.snapshots:
            return
        snapshots = [await self._sharing.get("snapshot", ref) for ref in directive.snapshots]
        neighbours = open_neighbours(self._config, stage.books.stage, snapshots)
        await self._ports.compute.run(lambda: stage.worker.load_neighbours(neighbours))

    async def _take_up(self, directive: wire.Directive, stage: HeldStage, anchor: Anchor) -> bool:
        """Restore what an earlier process left; True when it was in this epoch and the miner is where that one was."""
        progress = await stage.books.progress()
        data = await stage.books.reopen(progress) if progress is not None else b""
        if progress is None or not data:
            return False
        await self._ports.compute.run(lambda: stage.worker.restore(data))
        if progress.epoch != directive.epoch or not directive.is_in_roster:
            return False
        if directive.has_committed:
            stage.books.acknowledged(stage.books.num_receipts)
            stage.upload, stage.committed_epoch = upload_bytes(anchor, stage.worker.params()), directive.epoch
        else:
            await stage.books.forget_ack()
            request = wire.Resume(epoch=directive.epoch, num_receipts=stage.books.num_receipts, head=stage.books.head)
            answer = await self._ports.control.call(request)
            if isinstance(answer, wire.Resumed):
                stage.books.acknowledged(answer.num_receipts)
        stage.bench.begin(directive.epoch)
        stage.prepared_epoch = stage.ready_epoch = directive.epoch  # in the roster, so ready it was
        log.info("resumed", extra={"epoch": directive.epoch, "receipts": stage.books.num_receipts})
        return True
