"""From what a challenged miner presented to an outcome: the same for the validator that is drawn and for who checks it later."""

from dataclasses import dataclass, field

import msgspec

from subnet.config import REL_D_LIMITS, RunConfig
from subnet.errors import ProtocolViolation
from subnet.ports import Corpus
from subnet.training.neighbours import Neighbours
from subnet.types import Measures, NumericMode, Outcome
from subnet.validation.ends import check_ends
from subnet.validation.evidence import decode_evidence
from subnet.validation.recording import Recording
from subnet.validation.replay import replay_segment
from subnet.validation.verdict import judge
from subnet.wire import Challenge


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """Bytes of a challenged segment. `anchor`, the snapshot the epoch began from, is needed where the segment touches an end.

    `neighbours` are the published params of other stages that this one computed with; nobody presents them, they are the run's.
    """

    start: bytes
    end: bytes
    evidence: bytes
    anchor: bytes | None
    neighbours: Neighbours = field(default_factory=dict)


def with_limit(config: RunConfig, challenge: Challenge) -> RunConfig:
    """The run's configuration with the network's limit on distances, as it was when the challenge was drawn (trust.md 2).

    A limit that no network can come to would shield or convict whom its author likes; the run's own stands then.
    """
    least, largest = REL_D_LIMITS
    if challenge.max_rel_d is None or not least <= challenge.max_rel_d <= largest:
        return config
    audit = msgspec.structs.replace(config.audit, max_rel_d=challenge.max_rel_d)
    return msgspec.structs.replace(config, audit=audit)


def judge_segment(
    config: RunConfig, challenge: Challenge, presented: Presented, corpus: Corpus, mode: NumericMode
) -> tuple[Outcome, str, Measures | None]:
    """Outcome, reason and measures of a replay in `mode`. What is presented but does not hold together is a fail.

    Measures that fail have to fail in the miner's own mode too: where training is at the edge of diverging, rounding alone drives
    two modes apart within a step (LOG), while the same mode repeats the work as exactly as ever.
    """
    start, end = presented.start, presented.end
    config = with_limit(config, challenge)
    modes = [mode, *(own for own in config.training.modes if own is challenge.mode and own is not mode)]
    try:
        records = decode_evidence(presented.evidence, limit_bytes=len(presented.evidence))
        made = Recording(challenge=challenge, start=start, end=end, evidence=records)
        if presented.anchor is not None:
            check_ends(config, challenge, presented.anchor, start, end)
        for replayed_in in modes:
            measures = replay_segment(config, made, corpus, replayed_in, presented.neighbours)
            outcome, reason = judge(measures, config.audit)
            if outcome is not Outcome.FAIL:
                break
    except ProtocolViolation as error:
        return Outcome.FAIL, str(error), None
    where = "" if replayed_in is mode else f" (in {replayed_in}, the miner's own mode)"
    return outcome, f"{reason}{where}", measures
