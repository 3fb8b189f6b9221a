"""A subnet small enough to run hundreds of times: three stages of a tiny model, every miner audited in every epoch."""

from itertools import combinations
from typing import Any

import msgspec

from incentives.config import IncentiveConfig
from incentives.weights import to_u16
from neurons.roles.miner import MakeWorker
from neurons.scoring import scored
from neurons.virtual import VirtualPlan, VirtualResult, run_virtual
from subnet.adapters.corpus import make_corpus
from subnet.config import (
    AuditConfig,
    DeadlineConfig,
    MergeConfig,
    ModelConfig,
    OptimizerKind,
    RunConfig,
    TrainingConfig,
)
from subnet.orchestration.accounts import EpochAccount
from subnet.orchestration.invariants import check_weights
from subnet.orchestration.ledger import (
    AnyFact,
    Assigned,
    CaseClosed,
    Committed,
    Leased,
    ReducerConvicted,
    VerdictRecorded,
)
from subnet.training.pipeline import StageWorker
from subnet.types import Hotkey, NumericMode, Outcome, StageIndex, Verdict

NUM_STAGES = 3

CONFIG = RunConfig(
    model=ModelConfig(width=32, num_layers=3, num_heads=2, num_kv_heads=2, ffn_width=64, bottleneck_width=1),
    training=TrainingConfig(
        num_stages=NUM_STAGES,
        microbatch_size=2,
        num_tokens=16,
        accumulate=2,
        max_in_flight=4,
        warmup_steps=2,
        min_batches=4,
        target_batches=8,
        min_miners=3,
        num_epochs=2,
    ),
    merge=MergeConfig(chunk_bytes=1024),
    audit=AuditConfig(probability=1.0, checkpoint_every=2),
    deadlines=DeadlineConfig(
        gathering_s=30.0,
        training_s=90.0,
        committing_s=20.0,
        uploading_s=30.0,
        merging_s=30.0,
        ready_s=15.0,
        sample_s=20.0,
        challenge_s=30.0,
        verdict_s=40.0,
        silent_s=10.0,
    ),
)
INCENTIVES = IncentiveConfig()


def altered(config: RunConfig = CONFIG, **parts: dict[str, Any]) -> RunConfig:
    """`altered(training={"num_epochs": 3})`: the config with a few knobs turned."""
    changed = {part: msgspec.structs.replace(getattr(config, part), **knobs) for part, knobs in parts.items()}
    return msgspec.structs.replace(config, **changed)


QUICK = altered(training={"optimizer": OptimizerKind.ADAMW, "adamw_learning_rate": 0.003})
"""The same with a cheaper inner step, for tests that run many seeds and look at the protocol."""


def simulate(plan: VirtualPlan, config: RunConfig = CONFIG) -> VirtualResult:
    """A whole run; every invariant is checked before it returns."""
    result = run_virtual(config, INCENTIVES, make_corpus(config), plan)
    check_holds(result, config)
    return result


def epochs(result: VirtualResult) -> list[EpochAccount]:
    """Published epochs, oldest first."""
    return result.record.accounts.published()


def facts(result: VirtualResult) -> list[AnyFact]:
    """Everything recorded, in order."""
    return [entry.fact for entry in result.record.entries]


def stages(result: VirtualResult) -> dict[str, StageIndex]:
    """The stage each miner was given first, by name."""
    names = {hotkey: name for name, hotkey in result.hotkeys.items()}
    given: dict[str, StageIndex] = {}
    for fact in facts(result):
        if isinstance(fact, Assigned):
            given.setdefault(names[fact.hotkey], fact.stage)
    return given


def cheat_at(stage: int, cheat: MakeWorker, *, num_miners: int) -> dict[str, MakeWorker]:
    """Workers of a plan in which the first miner to be given `stage` cheats, and nobody else does."""
    cheats: list[str] = []

    def chooser(name: str) -> MakeWorker:
        def make(config: RunConfig, at: StageIndex, mode: NumericMode) -> StageWorker:
            if at == stage and not cheats:
                cheats.append(name)
            return cheat(config, at, mode) if cheats == [name] else StageWorker(config, at, mode)

        return make

    return {f"m{n + 1}": chooser(f"m{n + 1}") for n in range(num_miners)}


def verdicts_on(result: VirtualResult, hotkey: Hotkey) -> list[Verdict]:
    """Verdicts about one miner, in the order they were posted."""
    posted = [fact.verdict for fact in facts(result) if isinstance(fact, VerdictRecorded)]
    return [verdict for verdict in posted if verdict.hotkey == hotkey]


def convicted(result: VirtualResult) -> set[Hotkey]:
    """Hotkeys whose audit failed and was confirmed, or who agreed on a false shard."""
    closed = {fact.hotkey for fact in facts(result) if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL}
    return closed | {fact.hotkey for fact in facts(result) if isinstance(fact, ReducerConvicted)}


# ---- what every run must come to, whatever happened in it (trust.md 8) ----


def check_holds(result: VirtualResult, config: RunConfig) -> None:
    """The record is whole and in order, pay follows from it, and what stands on chain is that pay."""
    check_epochs(result, config)
    check_bans(result)
    check_pay(result)


def check_epochs(result: VirtualResult, config: RunConfig) -> None:
    """Every epoch came, in order, each with every shard of one manifest, and one commitment for each miner."""
    published = epochs(result)
    assert [account.epoch for account in published] == list(range(config.training.num_epochs))
    commits = [(fact.epoch, fact.hotkey) for fact in facts(result) if isinstance(fact, Committed)]
    assert len(commits) == len(set(commits))
    for account in published:
        assert account.snapshots is not None and len(account.snapshots.snapshots) == config.training.num_stages
        merged = sorted((shard.stage, shard.shard) for shard in account.shards)
        assert len(merged) == len(set(merged)), "a shard was accepted twice"
        for stage, participants in enumerate(account.snapshots.participants):
            reducers = sorted({shard.reducers for shard in account.shards if shard.stage == stage})
            miners = sorted({hotkey for pair in reducers for hotkey in pair})
            assert set(participants) <= set(miners)
            pairs: list[tuple[Hotkey, ...]] = [*combinations(miners, 2)]
            assert reducers == (pairs or [(hotkey,) for hotkey in miners])


def check_bans(result: VirtualResult) -> None:
    """A banned hotkey holds no lease: none is given while the ban lasts."""
    banned_until: dict[Hotkey, int] = {}
    for fact in facts(result):
        if isinstance(fact, ReducerConvicted) or (isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL):
            banned_until[fact.hotkey] = fact.banned_until
        if isinstance(fact, Leased):
            for hotkey in fact.hops:
                assert banned_until.get(hotkey, -1) < fact.epoch, f"{hotkey} holds a lease while it is banned"


def check_pay(result: VirtualResult) -> None:
    """Weights are valid, and each validator's on chain are those of the record within the rounding to u16."""
    check_weights(result.expected)
    expected = {result.uids[hotkey]: value for hotkey, value in to_u16(result.expected).items()}
    assert expected, "somebody earned something"
    for on_chain in result.weights.values():
        assert on_chain == expected
    scores = scored(result.record)
    assert all(score.score >= 0.0 and score.score < float("inf") for score in scores.values())
