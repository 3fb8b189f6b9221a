"""Leases, re-routes, receipts and credit: one unit of work is leased once, attested by neighbours, credited once.

A unit is one stage's completed backward of one sample (trust.md 3). It is credited when the miner's forward and backward
receipts stand under the newest lease, came before its deadline, and name the digests that both neighbours name.
"""

import msgspec

from subnet import receipts, wire
from subnet.config import Bottleneck
from subnet.errors import Refused
from subnet.lanes import lanes
from subnet.orchestration import pathways
from subnet.orchestration.events import Wake
from subnet.orchestration.ledger import Credited, Leased, LossRecorded, OutputRepeated, SampleDropped, Voided
from subnet.orchestration.membership import member_of
from subnet.orchestration.objects import is_digest
from subnet.orchestration.state import Sample, Turn, Work
from subnet.types import NO_DIGEST, Digest, Direction, Epoch, Hotkey, Lease, Phase, Receipt, SampleId, StageIndex

LEASES_AT_ONCE = 64
SPARE_TARGETS = 4
"""Samples that a miner may begin in an epoch and not be credited for, in multiples of its target: the record keeps each lease."""
RECEIPTS_PER_UNIT = 8
"""Most receipts for each sample, and for each backward of a segment's quota: two passes and steps, and room for dropped ones."""


def lease_samples(turn: Turn, sender: Hotkey, request: wire.LeaseSamples) -> wire.Response:
    """The next samples whose pathway begins at the sender. Raises Refused outside its epoch's training phase."""
    state, current = turn.state, turn.state.current
    check_epoch(turn, request.epoch, phase=Phase.TRAINING)
    begun = (lane for lane in lanes(turn.config) if current.roster and sender in current.roster[lane.start])
    lane = next(begun, None)
    if lane is None:
        raise Refused(
            "roster",
            f"not in a stage of epoch {current.epoch} where samples begin: the roster was fixed when the epoch began",
        )
    if member_of(turn, sender).banned_until >= state.epoch:
        raise Refused("banned", f"banned until epoch {state.members[sender].banned_until}: an audit of its work failed")
    leases = []
    for _ in range(min(max(request.count, 0), LEASES_AT_ONCE, _num_left(turn, sender, lane))):
        lease = _next_lease(turn, sender, lane)
        if lease is None:
            break
        leases.append(lease)
    return wire.Leases(leases=tuple(leases))


def _num_left(turn: Turn, sender: Hotkey, lane: range) -> int:
    """Samples that the sender may still begin: in a pipeline others wait for them as long as the epoch lasts, in a lane of
    one stage nobody does, and every miner does the same H local steps (papers.md B3). What came to nothing is given again,
    as long as that does not happen all the time. Raises Refused.
    """
    current, target = turn.state.current, turn.config.training.target_batches
    begun, work = current.cursors.get(sender, 0), current.work.get(sender)
    num_spare = LEASES_AT_ONCE + SPARE_TARGETS * target + (len(work.credited) if work else 0) - begun
    if num_spare <= 0:
        raise Refused("leases", f"too many of the {begun} samples that began with you in this epoch came to nothing")
    if len(lane) > 1:
        return num_spare
    return min(num_spare, target - begun + current.num_lost.get(sender, 0))


def _next_lease(turn: Turn, sender: Hotkey, lane: range) -> Lease | None:
    current = turn.state.current
    cycle = current.cursors.get(sender, 0)
    place = pathways.turn_of(
        current.roster, lane, beacon=current.beacon, epoch=current.epoch, hotkey=sender, cycle=cycle
    )
    hops = list(pathways.pathway(current.roster, lane, beacon=current.beacon, epoch=current.epoch, turn=place))
    sample = lanes(turn.config).sample(lane, place)
    for hop, stage in enumerate(lane[1:], start=1):
        if turn.state.is_at_work(hops[hop], stage):
            continue
        candidates = turn.state.live_roster(stage)
        if not candidates:
            return None
        hops[hop] = pathways.substitute(
            candidates,
            beacon=current.beacon,
            epoch=current.epoch,
            sample=sample,
            stage=StageIndex(stage),
            attempt=0,
        )
    current.cursors[sender] = cycle + 1
    return _lease(turn, sample, attempt=0, hops=tuple(hops))


def _lease(turn: Turn, sample: SampleId, *, attempt: int, hops: tuple[Hotkey, ...]) -> Lease:
    current = turn.state.current
    lease = Lease(
        run_id=turn.state.run_id,
        epoch=current.epoch,
        sample=sample,
        branch=0,
        attempt=attempt,
        hops=hops,
        deadline_s=turn.now_s + turn.config.deadlines.sample_s,
    )
    if attempt == 0:
        count = len(hops)
        current.samples[sample] = Sample(lease, [None] * count, [None] * count, [False] * count)
        current.open_samples[sample] = None
    else:
        current.samples[sample].lease = lease
    turn.record(Leased(epoch=current.epoch, sample=sample, attempt=attempt, hops=hops, deadline_s=lease.deadline_s))
    return lease


def reroute(turn: Turn, sender: Hotkey, request: wire.Reroute) -> wire.Response:
    """Replace a hop that could not be reached. Raises Refused; without a replica left, the sample is dropped."""
    current, stage = turn.state.current, request.stage
    check_epoch(turn, request.lease.epoch)
    sample = current.samples.get(request.lease.sample)
    if sample is None or not sample.is_open or sample.lease.attempt != request.lease.attempt:
        raise Refused("lease", "this lease is not the sample's newest, or the sample is closed")
    lane = lanes(turn.config).of_sample(request.lease.sample)
    hop = stage - lane.start
    if not 0 < hop < len(lane) or sample.lease.hops[hop - 1] != sender:
        raise Refused("lease", "only the miner before the hop that failed may ask for another")
    if sample.credited[hop]:
        raise Refused("lease", "that hop has done this sample's work and is credited for it")
    failed = sample.lease.hops[hop]
    edge = (sender, failed)
    current.reroutes[edge] = current.reroutes.get(edge, 0) + 1
    candidates = [hotkey for hotkey in turn.state.live_roster(stage) if hotkey != failed]
    is_choosy = current.reroutes[edge] > turn.config.training.max_reroutes
    if is_choosy or not candidates:
        drop(
            turn,
            request.lease.sample,
            "too many re-routes between two miners" if is_choosy else "no replica to re-route to",
        )
        raise Refused("no-replica", "the sample is dropped: no replica is left for it")
    attempt = sample.lease.attempt + 1
    replaced = pathways.substitute(
        candidates,
        beacon=current.beacon,
        epoch=current.epoch,
        sample=request.lease.sample,
        stage=stage,
        attempt=attempt,
    )
    hops = (*sample.lease.hops[:hop], replaced, *sample.lease.hops[hop + 1 :])
    sample.forward[hop] = sample.backward[hop] = None  # what the replaced miner attested earns the new one nothing
    return wire.Leases(leases=(_lease(turn, request.lease.sample, attempt=attempt, hops=hops),))


def drop(turn: Turn, sample: SampleId, reason: str) -> None:
    """Close a sample that will not finish."""
    current = turn.state.current
    current.samples[sample].is_open = False
    del current.open_samples[sample]
    _note_lost(turn, current.samples[sample].lease.hops[0], 1)
    turn.record(SampleDropped(epoch=current.epoch, sample=sample, reason=reason))
    _wake_when_settled(turn)


def drop_expired(turn: Turn) -> None:
    """Close samples whose lease ran out."""
    current = turn.state.current
    expired = [number for number in current.open_samples if current.samples[number].lease.deadline_s <= turn.now_s]
    for number in expired:
        drop(turn, number, "its lease ran out")


def drop_through(turn: Turn, hotkey: Hotkey) -> None:
    """Close the open samples of a miner that was banned: it holds no lease from now on."""
    current = turn.state.current
    for number in [n for n in current.open_samples if hotkey in current.samples[n].lease.hops]:
        drop(turn, number, "a miner on its pathway was banned")


def post_receipts(turn: Turn, sender: Hotkey, request: wire.PostReceipts) -> wire.Response:
    """Extend the sender's chain and credit what it completes. A batch that is already recorded is acknowledged again."""
    current = turn.state.current
    check_epoch(turn, request.epoch)
    member = member_of(turn, sender)
    if sender in current.commits:
        raise Refused("committed", "this epoch's chain is closed: it was committed")
    work = current.work.get(sender)
    if work is None:
        work = Work(head=receipts.first_head(turn.state.run_id, current.epoch, sender))
    known = len(work.receipts)
    if request.num_before > known or request.num_before < 0:
        raise Refused("chain", f"{known} receipts are recorded, the batch begins after {request.num_before}")
    overlap = known - request.num_before
    if tuple(work.receipts[request.num_before :]) != request.receipts[:overlap]:
        raise Refused("chain", f"receipt {request.num_before} and after differ from what is recorded: resume first")
    fresh = request.receipts[overlap:]
    heads = _heads(work.head, fresh)
    if (heads[-1] if heads else work.head) != request.head:
        raise Refused("chain", "the head does not follow from the receipts")
    if known + len(fresh) > RECEIPTS_PER_UNIT * (1 + len(current.samples)):
        raise Refused("receipt", f"more receipts than {len(current.samples)} samples of epoch {current.epoch} can have")
    _check_own(turn, member.stage, fresh)
    current.work[sender] = work
    for receipt, head in zip(fresh, heads, strict=True):
        work.receipts.append(receipt)
        work.heads.append(head)
        work.head = head
        _attest(turn, sender, receipt)
    return wire.Ack(epoch=current.epoch, num_receipts=len(work.receipts), head=work.head, signature="")


def _heads(head: Digest, fresh: tuple[Receipt, ...]) -> list[Digest]:
    heads = []
    for receipt in fresh:
        head = receipts.next_head(head, receipt)
        heads.append(head)
    return heads


def _check_own(turn: Turn, stage: StageIndex, fresh: tuple[Receipt, ...]) -> None:
    for receipt in fresh:
        if receipt.run_id != turn.state.run_id or receipt.epoch != turn.state.epoch or receipt.stage != stage:
            raise Refused(
                "receipt", f"a receipt names another run, epoch or stage than {stage} of epoch {turn.state.epoch}"
            )
        if not all(found == NO_DIGEST or is_digest(found) for found in (receipt.input_digest, receipt.output_digest)):
            raise Refused("receipt", "a digest of a receipt is 64 lower-case hex digits of blake3, or empty")


def _attest(turn: Turn, sender: Hotkey, receipt: Receipt) -> None:
    """Put a receipt beside its sample and see which units it completes."""
    current = turn.state.current
    sample = current.samples.get(receipt.sample)
    if receipt.direction in (Direction.STEP, Direction.DROP) or sample is None:
        return
    lane = lanes(turn.config).of_sample(receipt.sample)
    hop = receipt.stage - lane.start
    if receipt.stage not in lane or sample.lease.hops[hop] != sender:
        return
    column = sample.forward if receipt.direction is Direction.FORWARD else sample.backward
    is_last = hop == len(lane) - 1
    _note_repeated(turn, sender, receipt, is_last=is_last)
    if column[hop] is not None or _is_seen_before(turn, sender, receipt, is_last=is_last):
        return
    column[hop] = receipt
    for near in (hop - 1, hop, hop + 1):
        if 0 <= near < len(lane):
            _credit(turn, receipt.sample, near)


def _is_seen_before(turn: Turn, sender: Hotkey, receipt: Receipt, *, is_last: bool) -> bool:
    """An input worked for another sample earns nothing (trust.md 1.2). The last stage's backward starts from its own
    loss, a single number, and two honest samples may well have the same; in the k0 control all have.
    """
    if turn.config.model.bottleneck is Bottleneck.K0 or (receipt.direction is Direction.BACKWARD and is_last):
        return False
    seen = turn.state.current.work[sender].seen_inputs
    return seen.setdefault((receipt.direction.value, receipt.input_digest), receipt.sample) != receipt.sample


def _note_repeated(turn: Turn, sender: Hotkey, receipt: Receipt, *, is_last: bool) -> None:
    """Who sends the same for two samples has hardly computed both: its audits are certain from now on (trust.md 1.2)."""
    current, is_loss = turn.state.current, receipt.direction is Direction.FORWARD and is_last
    work = current.work[sender]
    if is_loss or receipt.output_digest == NO_DIGEST or turn.config.model.bottleneck is Bottleneck.K0:
        return
    first = work.seen_outputs.setdefault((receipt.direction.value, receipt.output_digest), receipt.sample)
    if first == receipt.sample or work.has_repeated:
        return
    work.has_repeated = True
    member = turn.state.members[sender]
    member.flagged_until = max(member.flagged_until, current.epoch + turn.config.audit.flag_epochs)
    turn.record(OutputRepeated(epoch=current.epoch, hotkey=sender, sample=receipt.sample, first=first))


def _credit(turn: Turn, number: SampleId, hop: int) -> None:
    current = turn.state.current
    sample = current.samples[number]
    if not sample.is_open or sample.credited[hop] or sample.lease.deadline_s < turn.now_s:
        return
    if not _is_attested(sample, hop):
        return
    hotkey = sample.lease.hops[hop]
    stage = StageIndex(lanes(turn.config).of_sample(number)[hop])
    sample.credited[hop] = True
    credited = current.work[hotkey].credited
    credited[number] = None
    if len(credited) == turn.config.training.target_batches:
        turn.may_advance = True
    turn.record(Credited(epoch=current.epoch, sample=number, stage=stage, hotkey=hotkey))
    if all(sample.credited):
        last = sample.forward[-1]
        sample.is_open = False
        del current.open_samples[number]
        if last is not None and last.loss is not None:
            turn.record(LossRecorded(epoch=current.epoch, sample=number, loss=last.loss))
        _wake_when_settled(turn)


def _is_attested(sample: Sample, hop: int) -> bool:
    """Whether the hop's own receipts are in and agree with what its neighbours sent and received."""
    forward, backward = sample.forward[hop], sample.backward[hop]
    if forward is None or backward is None:
        return False
    if hop > 0:
        before = sample.forward[hop - 1]
        if before is None or before.output_digest != forward.input_digest:
            return False
    if hop < len(sample.forward) - 1:
        after = sample.backward[hop + 1]
        if after is None or after.output_digest != backward.input_digest:
            return False
    return True


def _wake_when_settled(turn: Turn) -> None:
    """The last open sample of an epoch that is being committed lets everybody commit at once."""
    if not turn.state.current.open_samples and turn.state.phase is Phase.COMMITTING:
        turn.ask(Wake())


def resume(turn: Turn, sender: Hotkey, request: wire.Resume) -> wire.Response:
    """A restarted miner goes on from its checkpoint: receipts after it are cut off, units they earned are void."""
    current = turn.state.current
    check_epoch(turn, request.epoch)
    member = member_of(turn, sender)
    if sender in current.commits:
        raise Refused("committed", "this epoch was committed already: wait for the next")
    work = current.work.get(sender)
    first = receipts.first_head(turn.state.run_id, current.epoch, sender)
    heads = [first, *(work.heads if work else ())]
    num_recorded = min(request.num_receipts, len(heads) - 1)
    if request.num_receipts < 0 or (num_recorded == request.num_receipts and heads[num_recorded] != request.head):
        raise Refused(
            "chain", f"the first {num_recorded} receipts are recorded under another head: load the snapshot again"
        )
    if work is not None:
        _cut(turn, sender, work, num_recorded)
        work.head = heads[num_recorded]
    member.ready_epoch = current.epoch
    turn.ask(Wake())
    return wire.Resumed(num_receipts=num_recorded)


def _cut(turn: Turn, sender: Hotkey, work: Work, num_receipts: int) -> None:
    current = turn.state.current
    lost = work.receipts[num_receipts:]
    del work.receipts[num_receipts:], work.heads[num_receipts:]
    void = sorted({receipt.sample for receipt in lost if receipt.direction is Direction.BACKWARD} & set(work.credited))
    for number in void:
        del work.credited[number]
    for receipt in lost:
        is_open = receipt.sample in current.open_samples
        if is_open and sender in current.samples[receipt.sample].lease.hops:  # a receipt may name anybody's sample
            drop(turn, receipt.sample, "a miner that held it restarted")
    if void:
        _note_lost(turn, sender, len(void))
        turn.record(Voided(epoch=current.epoch, hotkey=sender, samples=tuple(void)))


def _note_lost(turn: Turn, hotkey: Hotkey, count: int) -> None:
    lost = turn.state.current.num_lost
    lost[hotkey] = lost.get(hotkey, 0) + count


def check_epoch(turn: Turn, epoch: Epoch, *, phase: Phase | None = None) -> None:
    """Refuse what belongs to another epoch or phase."""
    state = turn.state
    if epoch != state.epoch:
        raise Refused("epoch", f"epoch {state.epoch} is being worked on, not {epoch}")
    working = (Phase.TRAINING, Phase.COMMITTING) if phase is None else (phase,)
    if state.phase not in working:
        raise Refused("phase", f"epoch {epoch} is in phase {state.phase}, this belongs to {working[0]}")


def sign_leases(leases: tuple[Lease, ...], signatures: tuple[str, ...]) -> wire.Leases:
    """Leases with their signatures, in order."""
    pairs = zip(leases, signatures, strict=True)
    return wire.Leases(leases=tuple(msgspec.structs.replace(lease, signature=signature) for lease, signature in pairs))
