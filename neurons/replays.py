"""`strata audit --replay`: some of the audited segments once more, from the objects that are still there (trust.md 1, 2)."""

from pathlib import Path

import msgspec

from neurons.checks import Finding
from neurons.exit_codes import ExitCode
from neurons.scoring import Record
from neurons.trail import measures_text
from subnet import draws, wire
from subnet.adapters.corpus import make_corpus
from subnet.config import RunConfig
from subnet.errors import InvariantBroken, StartupRefused
from subnet.frames import digest
from subnet.model.partition import neighbours_of
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.ledger import Answered, CaseClosed, Challenged
from subnet.ports import Corpus
from subnet.training.neighbours import open_neighbours
from subnet.types import NO_DIGEST, BlobRef, Epoch, Hotkey, NumericMode, Outcome
from subnet.validation.ends import lies_at_an_end
from subnet.validation.judging import Presented, judge_segment

NAME = "replayed segments come to the recorded outcome"


def answered_challenges(record: Record) -> list[tuple[wire.Challenge, Outcome]]:
    """Every challenge that was answered and closed with a pass or a fail, as its validator got it, in order of the record."""
    challenged: dict[tuple[Epoch, Hotkey, int], Challenged] = {}
    answers: dict[tuple[Epoch, Hotkey, int], Answered] = {}
    outcomes: dict[tuple[Epoch, Hotkey, int], Outcome] = {}
    for fact in (entry.fact for entry in record.entries):
        match fact:
            case Challenged():
                challenged[fact.epoch, fact.hotkey, fact.segment] = fact
            case Answered():
                answers[fact.epoch, fact.hotkey, fact.segment] = fact
            case CaseClosed():
                outcomes[fact.epoch, fact.hotkey, fact.segment] = Outcome(fact.outcome)
            case _:
                pass
    created = record.accounts.created
    config = msgspec.json.decode(created.config_json, type=RunConfig) if created else RunConfig()
    return [
        (_challenge(config, record.accounts, challenged[key], answer), outcomes[key])
        for key, answer in answers.items()
        if key in challenged and outcomes.get(key, Outcome.INCONCLUSIVE) is not Outcome.INCONCLUSIVE
    ]


def _challenge(config: RunConfig, accounts: Accounts, drawn: Challenged, answer: Answered) -> wire.Challenge:
    commit, began = accounts.epochs[drawn.epoch].committed[drawn.hotkey], _snapshots(accounts, drawn.epoch)
    is_last = drawn.segment == len(commit.checkpoints) - 2
    return wire.Challenge(
        epoch=drawn.epoch,
        hotkey=drawn.hotkey,
        stage=drawn.stage,
        segment=drawn.segment,
        start_checkpoint=commit.checkpoints[drawn.segment],
        end_checkpoint=commit.checkpoints[drawn.segment + 1],
        deadline_s=0.0,
        mode=drawn.mode,
        max_rel_d=drawn.max_rel_d,
        start=answer.start,
        end=answer.end,
        evidence=answer.evidence,
        anchor=began[drawn.stage],
        neighbours=tuple(began[other] for other in neighbours_of(config, drawn.stage)),
        upload_digest=commit.upload_digest if is_last else NO_DIGEST,
    )


def _snapshots(accounts: Accounts, epoch: Epoch) -> tuple[BlobRef, ...]:
    """What an epoch began from. Raises InvariantBroken when the record does not say."""
    before = accounts.epochs.get(Epoch(epoch - 1))
    if epoch == 0 and accounts.created is not None:
        return accounts.created.snapshots
    if before is None or before.snapshots is None:
        raise InvariantBroken(f"the record does not say what epoch {epoch} began from")
    return before.snapshots.snapshots


def replayed(record: Record, blobs: Path, count: int) -> tuple[Finding, list[str]]:
    """Replay `count` segments drawn from those whose objects lie under `blobs`; a line for each. Raises StartupRefused."""
    created = record.accounts.created
    if created is None:
        return Finding(name=NAME, holds=None, detail="the record is empty"), []
    challenges = answered_challenges(record)
    present = [(challenge, outcome) for challenge, outcome in challenges if _is_whole(blobs, challenge)]
    if not present:
        detail = f"of {len(challenges)} closed audits no objects are left: they are kept for a few epochs only"
        return Finding(name=NAME, holds=None, detail=detail), []
    config = msgspec.json.decode(created.config_json, type=RunConfig)
    corpus = make_corpus(config)
    if corpus.digest != created.corpus_digest:
        raise StartupRefused(
            f"the text of this run, corpus {created.corpus_digest[:16]}, is not on this machine ({corpus.digest[:16]} is).",
            ExitCode.DAMAGED_STATE,
        )
    lines, differing = list[str](), list[str]()
    for challenge, outcome in draws.chosen(present, count, record.head, "replay"):
        found, line = _replay(config, corpus, blobs, challenge)
        said = f"{line}; recorded: {outcome}"
        differing += [said] if found is not outcome else []
        lines.append(said + ("" if found is outcome else "  DIFFERS"))
    first = f"; first {differing[0]}" if differing else ""
    detail = f"{len(lines)} of {len(challenges)} closed audits replayed, {len(differing)} differ{first}"
    return Finding(name=NAME, holds=not differing, detail=detail), lines


def _replay(config: RunConfig, corpus: Corpus, blobs: Path, challenge: wire.Challenge) -> tuple[Outcome, str]:
    shown, published = _refs(challenge)
    data = {ref: (blobs / ref.key).read_bytes() for ref in (*shown, *published)}
    garbled = [ref.key for ref, found in data.items() if digest(found) != ref.digest]
    if garbled:
        outcome, reason, measures = Outcome.FAIL, f"object {garbled[0]} is not the one announced", None
    else:
        start, end, evidence = (data[ref] for ref in shown)
        anchor = challenge.anchor
        neighbours = open_neighbours(config, challenge.stage, [data[ref] for ref in challenge.neighbours])
        presented = Presented(
            start=start,
            end=end,
            evidence=evidence,
            anchor=data[anchor] if anchor is not None and anchor in published else None,
            neighbours=neighbours,
        )
        outcome, reason, measures = judge_segment(config, challenge, presented, corpus, NumericMode.FP32)
    measured = f" ({measures_text(measures)})" if measures else ""
    who = f"epoch {challenge.epoch}, {challenge.hotkey[:8]}, stage {challenge.stage}, segment {challenge.segment}"
    return outcome, f"{who}: {outcome}, {reason}{measured}"


def _refs(challenge: wire.Challenge) -> tuple[list[BlobRef], list[BlobRef]]:
    """What the miner presented, start, end and evidence; and the snapshots that a judge needs beside them."""
    presented = [ref for ref in (challenge.start, challenge.end, challenge.evidence) if ref is not None]
    anchor = [challenge.anchor] if challenge.anchor is not None and lies_at_an_end(challenge) else []
    return presented, [*anchor, *challenge.neighbours]


def _is_whole(blobs: Path, challenge: wire.Challenge) -> bool:
    return all((blobs / ref.key).is_file() for refs in _refs(challenge) for ref in refs)
