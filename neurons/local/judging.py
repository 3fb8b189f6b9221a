"""What must hold at the end of a local subnet, each as a finding; exit code 0 stands for all of them."""

from collections.abc import Iterator

from neurons import checks, limit_checks, trust_checks
from neurons.checks import Finding, Verify
from neurons.local.apart import can_be_repeated, every_stage_learns, is_apart, together_say_more
from neurons.local.evidence import CheatRow, Evidence, cheat_rows, loss_rows, miner_rows, plane_bytes
from neurons.local.traffic import expected_bytes
from subnet.config import WIRE_COMPRESSION, Bottleneck, Objective

MAX_UNIGRAM_SHARE = 0.85
MAX_MERGE_RATIO = 1.05
STORE_SLACK = 0.01
ZERO_WITHIN_EPOCHS = 2
_MIN_EPOCHS_TO_COMPARE = 3
_MIN_EPOCHS_FOR_BOUND = 4
"""The bound on the loss, and that the wires help, are promises about the default length of a run: ids alone learn first."""


def judge(evidence: Evidence, verify: Verify) -> tuple[Finding, ...]:
    """Every finding, in the order in which it is shown."""
    return (*_record_findings(evidence, verify), *_training_findings(evidence), *_pay_findings(evidence))


def _record_findings(evidence: Evidence, verify: Verify) -> Iterator[Finding]:
    history = evidence.history
    yield evidence.whole
    yield checks.check_invariants(history)
    yield checks.check_verdicts(history, verify)
    yield checks.check_outcomes(history)
    yield checks.check_commit_roots(history)
    yield trust_checks.check_audit_draws(history)
    yield limit_checks.check_limits(history)
    yield trust_checks.check_flags(history, verify)
    yield trust_checks.check_shard_audits(history)
    yield checks.check_posted(history)
    name = "roots on chain are the record's"
    if evidence.discovery is None:
        yield Finding(name=name, holds=False, detail="the owner has no record on chain")
    else:
        yield checks.check_roots(history, evidence.discovery, is_final=True)


def _training_findings(evidence: Evidence) -> Iterator[Finding]:
    yield _all_epochs(evidence)
    yield _loss_bound(evidence)
    yield _params_moved(evidence)
    if is_apart(evidence):
        yield every_stage_learns(evidence)
        yield together_say_more(evidence)
        yield can_be_repeated(evidence)
    else:
        yield _loss_falls(evidence)
        yield _wires_matter(evidence)
        yield _activation_bytes(evidence)
    yield _merge_bytes(evidence)
    yield _store_bytes(evidence)


def _pay_findings(evidence: Evidence) -> Iterator[Finding]:
    yield checks.check_weights(
        evidence.history, evidence.metagraph, evidence.weights, names=evidence.names, is_final=True
    )
    yield _all_validators_weigh(evidence)
    yield _honest_are_paid(evidence)
    yield _honest_are_not_convicted(evidence)
    for row in cheat_rows(evidence):
        yield _cheat_is_caught(evidence, row)


def _all_epochs(evidence: Evidence) -> Finding:
    wanted, found = evidence.config.run.training.num_epochs, len(checks.published_epochs(evidence.history))
    return Finding(
        name="every epoch is published", holds=found == wanted, detail=f"{found} of {wanted}, every shard merged"
    )


def _loss_bound(evidence: Evidence) -> Finding:
    name = f"held-out loss at the end is at most {MAX_UNIGRAM_SHARE} of the unigram entropy"
    rows, config = loss_rows(evidence), evidence.config.run
    if not rows or rows[-1].share is None:
        return Finding(name=name, holds=False, detail="it was not measured")
    shown = f"{rows[-1].loss:.3f} = {rows[-1].share:.3f} of {evidence.unigram:.3f}"
    if config.model.bottleneck is Bottleneck.K0:
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply to k0, whose cuts carry nothing")
    if is_apart(evidence) and config.blocktrain.objective is Objective.DIFFUSION:
        why = "denoising stages learn slowly what can be said before the target is seen"
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply: {why}")
    if config.training.num_epochs < _MIN_EPOCHS_FOR_BOUND:
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply: {_too_short(evidence)}")
    return Finding(name=name, holds=rows[-1].share <= MAX_UNIGRAM_SHARE, detail=shown)


def _too_short(evidence: Evidence) -> str:
    return f"{evidence.config.run.training.num_epochs} epochs are fewer than {_MIN_EPOCHS_FOR_BOUND}"


def _loss_falls(evidence: Evidence) -> Finding:
    name = "each epoch's held-out loss is below that of two epochs before"
    losses = [row.loss for row in loss_rows(evidence)]
    shown = " ".join(f"{loss:.3f}" for loss in losses) or "none measured"
    if evidence.config.run.training.num_epochs < _MIN_EPOCHS_TO_COMPARE:
        return Finding(
            name=name,
            holds=None,
            detail=f"{shown}; does not apply: there are fewer than {_MIN_EPOCHS_TO_COMPARE} epochs",
        )
    is_whole = len(losses) == evidence.config.run.training.num_epochs
    falls = all(later < earlier for earlier, later in zip(losses, losses[2:], strict=False))
    return Finding(name=name, holds=is_whole and falls, detail=shown)


def _params_moved(evidence: Evidence) -> Finding:
    name = "every stage's params moved"
    accounts = evidence.history.record.accounts
    published = [account.snapshots for account in accounts.published() if account.snapshots is not None]
    if accounts.created is None or not published:
        return Finding(name=name, holds=False, detail="no epoch is published")
    pairs = zip(accounts.created.snapshots, published[-1].snapshots, strict=True)
    still = [str(stage) for stage, (before, after) in enumerate(pairs) if before.digest == after.digest]
    num_stages = len(accounts.created.snapshots)
    detail = f"stages that did not: {', '.join(still)}" if still else f"{num_stages} of {num_stages}"
    return Finding(name=name, holds=not still, detail=detail)


def _wires_matter(evidence: Evidence) -> Finding:
    name = "with the wires zeroed the loss is worse"
    rows = loss_rows(evidence)
    if not rows:
        return Finding(name=name, holds=False, detail="it was not measured")
    shown = f"{rows[-1].loss_wires_zeroed:.3f} against {rows[-1].loss:.3f}"
    if evidence.config.run.model.bottleneck is Bottleneck.K0:
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply to k0, whose cuts carry nothing")
    if evidence.config.run.training.num_stages == 1:
        return Finding(name=name, holds=None, detail="does not apply: one stage has no cut")
    if evidence.config.run.training.num_epochs < _MIN_EPOCHS_FOR_BOUND:
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply: {_too_short(evidence)}")
    return Finding(name=name, holds=rows[-1].loss_wires_zeroed > rows[-1].loss, detail=shown)


def _activation_bytes(evidence: Evidence) -> Finding:
    name = f"a pass between stages is 1/{WIRE_COMPRESSION} of full width in fp32"
    found, model = plane_bytes(evidence), evidence.config.run.model
    if not found.passes:
        holds = None if evidence.config.run.training.num_stages == 1 or _lost_counters(evidence) else False
        return Finding(name=name, holds=holds, detail=f"no pass between stages was counted{_lost_counters(evidence)}")
    sent = found.activation_payload + found.gradient_payload
    heads = f"{sent} bytes in {found.passes} passes (headers {found.frame_heads} apart)"
    ratio = f"1/{found.full_width_fp32 / sent:.1f}" if sent else "nothing"
    if model.bottleneck not in (Bottleneck.RESBM, Bottleneck.IOTA):
        return Finding(name=name, holds=None, detail=f"{ratio}; does not apply to {model.bottleneck.value}; {heads}")
    if model.width * 2 != model.bottleneck_width * WIRE_COMPRESSION:
        why = f"does not apply: model.bottleneck_width is {model.bottleneck_width}, not width / 64"
        return Finding(name=name, holds=None, detail=f"{ratio}; {why}; {heads}")
    return Finding(name=name, holds=sent * WIRE_COMPRESSION == found.full_width_fp32, detail=f"{ratio}: {heads}")


def _merge_bytes(evidence: Evidence) -> Finding:
    name = f"a miner's bytes in a merge are at most {MAX_MERGE_RATIO} of 4W + 2W/N"
    ratio = plane_bytes(evidence).worst_merge_ratio
    if ratio is None:
        is_possible = len(evidence.miners) > evidence.config.run.training.num_stages
        detail = "no merge was counted" if is_possible else "does not apply: no stage has two miners"
        lost = _lost_counters(evidence)
        return Finding(name=name, holds=False if is_possible and not lost else None, detail=detail + lost)
    return Finding(name=name, holds=ratio <= MAX_MERGE_RATIO, detail=f"the worst is {ratio:.4f}")


def _store_bytes(evidence: Evidence) -> Finding:
    name = f"what miners moved through the store is what the protocol asks for, within {STORE_SLACK:.0%}"
    if any(evidence.restarts.values()):
        return Finding(
            name=name, holds=None, detail="does not apply: a process was restarted, and something sent twice"
        )
    moved, asked, worst = 0, 0, 0.0
    for hotkey, part in evidence.miners.items():
        counters = evidence.counters.get(part.name)
        counted = counters.moved.total if counters is not None and not part.cheat else 0
        if counted:
            expected = expected_bytes(evidence.history.record, hotkey).total
            moved, asked = moved + counted, asked + expected
            worst = max(worst, abs(counted - expected) / max(1, expected))
    if not moved:
        return Finding(name=name, holds=None, detail="nothing was counted")
    detail = f"{moved:,} bytes both ways, {asked:,} by the record; the worst miner is {worst:.2%} off"
    return Finding(name=name, holds=worst <= STORE_SLACK, detail=detail)


def _lost_counters(evidence: Evidence) -> str:
    """A miner counts from the start of its process."""
    miners = [part.name for part in evidence.miners.values()]
    is_lost = any(evidence.restarts.get(name) for name in miners)
    return "; miners were restarted, and what they had counted is lost" if is_lost else ""


def _all_validators_weigh(evidence: Evidence) -> Finding:
    validators = [hotkey for hotkey, part in evidence.parts.items() if part.role == "validator"]
    silent = [evidence.names[hotkey] for hotkey in validators if not evidence.weights.get(hotkey)]
    detail = f"without: {', '.join(silent)}" if silent else f"{len(validators)} of {len(validators)}"
    return Finding(name="every validator has weights on chain", holds=not silent, detail=detail)


def _honest_are_paid(evidence: Evidence) -> Finding:
    honest = [row for row in miner_rows(evidence) if not row.cheat]
    unpaid = [f"{row.name} ({row.reason or 'no score'})" for row in honest if row.earned_alpha <= 0.0]
    detail = f"unpaid: {'; '.join(unpaid)}" if unpaid else f"{len(honest)} of {len(honest)}"
    return Finding(name="every honest miner is paid on chain", holds=not unpaid, detail=detail)


def _honest_are_not_convicted(evidence: Evidence) -> Finding:
    accounts = evidence.history.record.accounts.epochs.values()
    honest = {hotkey: part for hotkey, part in evidence.miners.items() if not part.cheat}
    accused = sorted(
        {part.name for hotkey, part in honest.items() if any(hotkey in account.failed for account in accounts)}
    )
    detail = f"convicted: {', '.join(accused)}" if accused else f"{len(honest)} miners"
    return Finding(name="no honest miner is convicted", holds=not accused, detail=detail)


def _cheat_is_caught(evidence: Evidence, row: CheatRow) -> Finding:
    name = f"{row.name} cheats ({row.kind}): convicted, score 0 within {ZERO_WITHIN_EPOCHS} epochs"
    if evidence.config.run.audit.probability < 1.0:
        detail = f"does not apply: audit.probability is {evidence.config.run.audit.probability}"
        return Finding(name=name, holds=None, detail=detail)
    if row.convicted_in_epoch is None:
        return Finding(name=name, holds=False, detail="it was never convicted")
    after = row.score_zero_after_epochs
    detail = f"for epoch {row.convicted_in_epoch}; {row.reason}; score 0 after {after} epochs"
    return Finding(name=name, holds=after is not None and after <= ZERO_WITHIN_EPOCHS, detail=detail)
