"""Validator: challenge and replay audited segments, attribute, score, post weights each tempo.

It never runs code it was sent, and its scores follow from the sealed ledger alone. It refuses to set weights when that
ledger does not match the root on chain, or lacks a verdict that it signed.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from neurons.flagging import find_flags
from neurons.roles.weights import PostedWeights
from neurons.scoring import Record, parse_discovery, scored, weighted
from subnet import receipts, wire
from subnet.config import RunConfig
from subnet.errors import InvariantBroken, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.frames import digest
from subnet.inference.published import published_loss
from subnet.lanes import lanes
from subnet.model.partition import num_elements
from subnet.orchestration.invariants import check_cases, check_record
from subnet.orchestration.ledger import VerdictRecorded
from subnet.ports import Blobs, Chain, Clock, Compute, Control, Corpus, PublicRecord, Signer
from subnet.training.neighbours import Neighbours, open_neighbours
from subnet.training.outer import decode_snapshot
from subnet.types import BlobRef, Epoch, Hotkey, LossFlag, Measures, Noise, Outcome, StageIndex, Verdict
from subnet.validation.ends import lies_at_an_end
from subnet.validation.judging import Presented, judge_segment
from subnet.validation.verdict import published_rule

log = logging.getLogger("strata.validator")

POLL_S = 10.0
RETRY_S = 0.5
REFUSED_S = 30.0
"""After a refusal of the chain's, unless the run moves on: it seldom changes its mind sooner."""
HELDOUT_BATCHES = 8
SEAL_SLACK = 1
"""A verdict acknowledged while a segment is being sealed may stand in the next one."""


_Job = tuple[Epoch, Hotkey, int] | None
"""A segment to judge, or an epoch to evaluate: None, there is one at a time."""


def _job(challenge: wire.Challenge | None) -> _Job:
    return None if challenge is None else (challenge.epoch, challenge.hotkey, challenge.segment)


@dataclass(frozen=True, slots=True)
class ValidatorPorts:
    """Adapters of one validator, picked by the wiring or by the simulation."""

    signer: Signer
    control: Control
    blobs: Blobs
    public: PublicRecord
    chain: Chain
    corpus: Corpus
    compute: Compute
    clock: Clock


@dataclass(slots=True)
class _Signed:
    """Verdicts this process has had acknowledged: key -> number of segments sealed by then."""

    verdicts: dict[tuple[Epoch, Hotkey, int], int] = field(default_factory=dict)


class Validator:
    """One hotkey with a permit. `noise` is what its machine measured, in the mode in which it replays."""

    def __init__(
        self,
        *,
        config: RunConfig,
        discovery: wire.Discovery,
        owner: Hotkey,
        noise: Noise,
        ports: ValidatorPorts,
    ) -> None:
        self.directive: wire.Directive | None = None
        self.record = Record()
        self._config = config
        self._run_id = discovery.r
        self._owner = owner
        self._noise = noise
        self._ports = ports
        self._changed = asyncio.Event()
        self._signed = _Signed()
        self._weights = PostedWeights(ports.chain)
        self.num_scored = 0
        self._unposted: wire.PostScores | None = None
        self.num_verdicts = dict.fromkeys(Outcome, 0)

    def health(self) -> dict[str, object]:
        """Where this validator is, for a monitor."""
        return {
            "epoch": self.directive.epoch if self.directive else None,
            "open_audits": self.num_open_audits,
            "segments_scored": self.num_scored,
        }

    @property
    def num_open_audits(self) -> int:
        """Challenges assigned to this validator and not answered yet."""
        return len(self.directive.challenges) if self.directive else 0

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="follow")
            group.create_task(self._replay(), name="replay")
            group.create_task(self._weigh(), name="weigh")

    async def _enlist(self) -> None:
        """Offer to audit; a permit comes with the chain's next epoch, and the orchestrator's metagraph a moment later."""
        while True:
            try:
                await self._ports.control.call(wire.Enlist())
                return
            except (TransientFailure, Refused) as error:
                if isinstance(error, Refused) and error.code not in ("permit", "not-registered"):
                    raise
                log.warning("not admitted yet", extra={"reason": str(error)})
                await self._ports.clock.sleep(4 * RETRY_S)

    async def _publish_noise(self) -> None:
        """Say how far honest work lies from a replay here; the network's limit on distances follows from what all say."""
        while True:
            try:
                await self._ports.control.call(wire.PostNoise(noise=self._noise))
                return
            except TransientFailure as error:
                log.warning("noise not published yet", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)

    async def _follow(self) -> None:
        await self._enlist()
        await self._publish_noise()
        while True:
            known = self.directive.version if self.directive else 0
            try:
                answer = await self._ports.control.call(
                    wire.Poll(known_version=known, wait_s=POLL_S), timeout_s=3 * POLL_S
                )
            except TransientFailure as error:
                log.warning("orchestrator not reached", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)
                continue
            if isinstance(answer, wire.Directive):
                self.directive = answer
                self._changed.set()
                self._changed = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return

    # ---- audits and evaluation ---------------------------------------------------------------------------------

    async def _replay(self) -> None:
        done: dict[_Job, None] = {}
        interrupted: dict[_Job, int] = {}
        evaluated = -1
        while True:
            directive = self.directive
            jobs: list[wire.Challenge | None] = []
            if directive is not None:
                jobs = [None] if directive.evaluate_epoch not in (None, evaluated) else []
                jobs += [found for found in directive.challenges if _job(found) not in done]
            if directive is None or not jobs:
                await self._wait(POLL_S)
                continue
            # what cannot be had now, for whatever reason, holds up nothing else
            job = min(jobs, key=lambda found: interrupted.get(_job(found), 0))
            try:
                if job is None:
                    evaluated = await self._evaluate(directive)
                else:
                    await self._audit(job)
                    done[_job(job)] = None
            except (TransientFailure, NotFound, ProtocolViolation) as error:
                interrupted[_job(job)] = interrupted.get(_job(job), 0) + 1
                log.warning("audit interrupted", extra={"reason": str(error)})
                await self._ports.clock.sleep(RETRY_S)

    async def _audit(self, challenge: wire.Challenge) -> None:
        outcome, reason, measures = await self._judge(challenge)
        self.num_verdicts[outcome] += 1
        verdict = Verdict(
            run_id=self._run_id,
            epoch=challenge.epoch,
            hotkey=challenge.hotkey,
            segment=challenge.segment,
            validator=self._ports.signer.hotkey,
            outcome=outcome,
            reason=reason,
            measures=measures,
            published_rule_passes=published_rule(measures) if measures else None,
            mode=self._noise.mode,
        )
        signature = self._ports.signer.sign(receipts.verdict_bytes(verdict))
        signed = msgspec.structs.replace(verdict, signature=signature)
        log.info(
            "audited",
            extra={"hotkey": challenge.hotkey, "epoch": challenge.epoch, "outcome": outcome, "reason": reason},
        )
        try:
            await self._ports.control.call(wire.PostVerdict(verdict=signed))
        except Refused as error:
            log.warning("verdict not taken", extra={"reason": str(error)})
            return
        sealed = self.directive.sealed_segments if self.directive else 0
        self._signed.verdicts[challenge.epoch, challenge.hotkey, challenge.segment] = sealed

    async def _judge(self, challenge: wire.Challenge) -> tuple[Outcome, str, Measures | None]:
        """Replay a segment. What is presented but does not hold together is a fail; what we cannot get is not."""
        start, end, evidence = challenge.start, challenge.end, challenge.evidence
        if start is None or end is None or evidence is None:
            raise TransientFailure("the challenge is not answered yet")
        anchor = await self._anchor(challenge)
        try:
            parts = [await self._object(ref) for ref in (start, end, evidence)]
        except ProtocolViolation as error:
            return Outcome.FAIL, str(error), None
        neighbours = await self._neighbours(challenge)
        presented = Presented(start=parts[0], end=parts[1], evidence=parts[2], anchor=anchor, neighbours=neighbours)
        return await self._ports.compute.run(
            lambda: judge_segment(self._config, challenge, presented, self._ports.corpus, self._noise.mode)
        )

    async def _anchor(self, challenge: wire.Challenge) -> bytes | None:
        """The snapshot that the epoch began from, where the segment touches it."""
        if challenge.anchor is None or not lies_at_an_end(challenge):
            return None
        return await self._published(challenge.anchor)

    async def _neighbours(self, challenge: wire.Challenge) -> Neighbours:
        """What the stages that the challenged one computes with began the epoch from."""
        snapshots = [await self._published(ref) for ref in challenge.neighbours]
        try:
            return open_neighbours(self._config, challenge.stage, snapshots)
        except ProtocolViolation as error:
            raise TransientFailure(str(error)) from error

    async def _published(self, ref: BlobRef) -> bytes:
        """A snapshot; a store that garbles it is no miner's fault."""
        try:
            return await self._object(ref)
        except ProtocolViolation as error:
            raise TransientFailure(str(error)) from error

    async def _object(self, ref: BlobRef) -> bytes:
        grant = await self._ports.control.call(wire.RequestDownload(keys=(ref.key,)))
        if not isinstance(grant, wire.DownloadGrant) or len(grant.urls) != 1:
            raise TransientFailure("the orchestrator did not answer with a URL")
        data = await self._ports.blobs.get(grant.urls[0], limit_bytes=max(1, ref.size_bytes))
        if digest(data) != ref.digest:
            raise ProtocolViolation(f"object {ref.key} is not the one announced")
        return data

    async def _evaluate(self, directive: wire.Directive) -> int:
        """Held-out loss of the newest published epoch, and without what its parts add."""
        epoch = directive.evaluate_epoch
        if epoch is None:
            return -1
        params = []
        for stage, ref in enumerate(directive.snapshots):
            data = await self._object(ref)
            params.append(decode_snapshot(data, num_elements(self._config, StageIndex(stage)))[0])
        result = await self._ports.compute.run(
            lambda: published_loss(self._config, params, self._ports.corpus, HELDOUT_BATCHES)
        )
        request = wire.PostEvaluation(epoch=epoch, loss=result.loss, loss_wires_zeroed=result.loss_wires_zeroed)
        try:
            await self._ports.control.call(request)
        except Refused as error:
            log.warning("evaluation not taken", extra={"reason": str(error)})
        return int(epoch)

    # ---- scores and weights ------------------------------------------------------------------------------------

    async def _weigh(self) -> None:
        while True:
            try:
                is_new = await self._score()
                await self._post_scores()
                if not is_new and await self._weights.renew() is not None:
                    log.info("weights set again", extra={"segment": self.num_scored - 1})
            except Refused as error:
                log.warning("weights not set", extra={"reason": str(error)})
                await self._wait(REFUSED_S)
                continue
            except (TransientFailure, NotFound, ProtocolViolation) as error:
                log.warning("weights not set", extra={"reason": str(error)})
                is_new = False
            except InvariantBroken as error:
                log.error("weights refused: the record does not hold", extra={"reason": str(error)})
                is_new = False
            if not is_new:
                await self._wait(4 * RETRY_S)

    async def _score(self) -> bool:
        """Follow the ledger to the root on chain, and post the weights it yields; False when there is nothing new."""
        ports = self._ports
        if self.directive is None or self.directive.sealed_segments <= self.num_scored:
            return False
        discovery = parse_discovery(await ports.chain.commitment(self._owner))
        if discovery.n <= self.num_scored:
            return False
        await self.record.follow(ports.public, discovery.n)
        if self.record.num_segments != discovery.n or self.record.head != discovery.s:
            raise InvariantBroken(f"the ledger's head after segment {discovery.n - 1} is not the one on chain")
        check_record(self.record.entries, lanes(self._config))
        check_cases(self.record.entries, self._config.audit)
        self._check_own_verdicts()
        weights = weighted(self.record, burn_hotkey=self._owner)
        if weights:
            at_block = await self._weights.put(weights)
            log.info("weights set", extra={"segment": discovery.n - 1, "at_block": at_block, "miners": len(weights)})
        self.num_scored = discovery.n
        self._unposted = wire.PostScores(
            segment=discovery.n - 1,
            ledger_head=self.record.head,
            scores={hotkey: score.score for hotkey, score in scored(self.record).items()},
            weights=weights,
        )
        return True

    async def _post_scores(self) -> None:
        """Say what weights were set from, and whom the record flags; again until it is heard. Raises TransientFailure."""
        if self._unposted is None:
            return
        try:
            await self._ports.control.call(self._unposted)
        except Refused as error:
            log.warning("scores not taken", extra={"reason": str(error)})
        self._unposted = None
        await self._flag()

    async def _flag(self) -> None:
        """Post whom CLASP flags by the newest published epoch. What does not get through is found again an epoch later."""
        published, clasp = self.record.accounts.published(), self.record.incentives().clasp
        if not published:
            return
        epoch, accounts = published[-1].epoch, self.record.accounts
        found = await self._ports.compute.run(lambda: find_flags(accounts, epoch, clasp))
        if not found:
            return
        unsigned = [
            LossFlag(
                run_id=self._run_id,
                epoch=epoch,
                hotkey=flag.hotkey,
                stage=flag.stage,
                validator=self._ports.signer.hotkey,
                effect=flag.effect,
                standard_error=flag.standard_error,
                z=flag.z,
                num_samples=flag.num_samples,
            )
            for flag in found
        ]
        signed = tuple(
            msgspec.structs.replace(flag, signature=self._ports.signer.sign(receipts.flag_bytes(flag)))
            for flag in unsigned
        )
        log.info("flagged", extra={"epoch": epoch, "hotkeys": [flag.hotkey for flag in signed]})
        try:
            await self._ports.control.call(wire.PostFlags(flags=signed))
        except (Refused, TransientFailure) as error:
            log.warning("flags not taken", extra={"reason": str(error)})

    def _check_own_verdicts(self) -> None:
        recorded = {
            (fact.verdict.epoch, fact.verdict.hotkey, fact.verdict.segment)
            for fact in (entry.fact for entry in self.record.entries)
            if isinstance(fact, VerdictRecorded) and fact.verdict.validator == self._ports.signer.hotkey
        }
        for key, sealed in self._signed.verdicts.items():
            if key not in recorded and self.record.num_segments > sealed + SEAL_SLACK:
                raise InvariantBroken(
                    f"a verdict that this validator signed is missing: epoch {key[0]}, miner {key[1]}"
                )
