"""The paper's full tracking, and validators that are too noisy to audit, in a whole run."""

import msgspec

from neurons.virtual import SILENT, VirtualPlan
from subnet.config import AuditMode
from subnet.orchestration.ledger import Calibrated, CaseClosed, Challenged, Committed
from subnet.sim.strategies import STRATEGIES
from subnet.types import NumericMode, Outcome
from tests.sim.world import QUICK, altered, cheat_at, convicted, epochs, facts, simulate

FULL = altered(QUICK, audit={"mode": AuditMode.FULL, "checkpoint_every": 1})


def test_in_full_every_segment_of_an_honest_epoch_is_replayed() -> None:
    result = simulate(VirtualPlan(seed=1, num_miners=3), FULL)
    found = facts(result)
    segments = {(fact.epoch, fact.hotkey): len(fact.checkpoints) - 1 for fact in found if isinstance(fact, Committed)}
    assert max(segments.values()) > 1
    closed = [(fact.epoch, fact.hotkey) for fact in found if isinstance(fact, CaseClosed)]
    assert {key: closed.count(key) for key in segments} == segments
    assert {fact.outcome for fact in found if isinstance(fact, CaseClosed)} == {Outcome.PASS}


def test_in_full_a_cheat_is_found_in_its_first_epoch() -> None:
    cheats = cheat_at(1, STRATEGIES["skip"], num_miners=6)
    result = simulate(VirtualPlan(seed=1, num_miners=6, workers=cheats), altered(FULL, training={"min_miners": 6}))
    (cheat,) = convicted(result)
    assert epochs(result)[0].stage_of[cheat] == 1
    failed = [fact.epoch for fact in facts(result) if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL]
    assert failed == [0]


def test_a_validator_above_the_limit_is_on_record_and_never_asked() -> None:
    noise = {
        "v1": msgspec.structs.replace(SILENT, rel_d=0.012),
        "v2": msgspec.structs.replace(SILENT, rel_d=0.9),
        "v3": msgspec.structs.replace(SILENT, rel_d_backward=0.014),
    }
    result = simulate(VirtualPlan(seed=1, num_miners=3, num_validators=3, noise=noise), QUICK)
    published = {fact.validator: fact.noise for fact in facts(result) if isinstance(fact, Calibrated)}
    assert published == {result.hotkeys[name]: found for name, found in noise.items()}
    challenges = [fact for fact in facts(result) if isinstance(fact, Challenged)]
    assert {fact.auditor for fact in challenges} == {result.hotkeys["v1"], result.hotkeys["v3"]}
    assert {(fact.max_rel_d, fact.mode) for fact in challenges} == {(3 * 0.014, NumericMode.FP32)}
