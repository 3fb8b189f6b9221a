"""The run as a person sees it: a pure view of the orchestrator's state, for the terminal, the page and scripts."""

import msgspec

from subnet import wire
from subnet.config import RunKind
from subnet.orchestration.state import State
from subnet.types import Epoch, Hotkey, LossFlag, Outcome, Phase, StageIndex


class View(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is shown."""


class MinerView(View, frozen=True):
    """One miner now. `units` are credited in this epoch; `banned_until` is -1 when it is not banned."""

    hotkey: Hotkey
    stage: StageIndex
    is_live: bool
    is_in_roster: bool
    units: int
    has_committed: bool
    has_uploaded: bool
    banned_until: int


class AuditView(View, frozen=True):
    """One audit of this or the previous epoch; `outcome` is "" while it is open. `rel_d` and `rel_dw` are the worst reported."""

    epoch: Epoch
    hotkey: Hotkey
    segment: int
    validators: tuple[Hotkey, ...]
    is_answered: bool
    outcome: str
    reasons: tuple[str, ...]
    rel_d: float | None
    rel_dw: float | None
    published_rule_passes: bool | None


class FlagView(View, frozen=True):
    """A miner whose samples lose more than chance explains, by how much (nats a token); the largest of the validators' z."""

    epoch: Epoch
    hotkey: Hotkey
    validators: tuple[Hotkey, ...]
    effect: float
    z: float


class StandingView(View, frozen=True):
    """What one hotkey has earned by the record, as a validator computed it; `weight` is its share of all."""

    hotkey: Hotkey
    score: float
    weight: float


class EvaluationView(View, frozen=True):
    """Held-out loss of a published epoch, nats per token; `loss_wires_zeroed` is without what crosses the cuts, and where stages
    train apart that of the first alone.
    """

    epoch: Epoch
    loss: float | None
    loss_wires_zeroed: float | None


class StageView(View, frozen=True):
    """One stage's merge: shards accepted of all, and whether the merged params are published.

    `num_merged` updates of `num_assigned` miners are in the newest published epoch.
    """

    stage: StageIndex
    num_live: int
    num_accepted: int
    num_shards: int
    is_published: bool
    num_assigned: int = 0
    num_merged: int = 0


class RunView(View, frozen=True):
    """The whole run at one moment (unix s)."""

    at_s: float
    run_id: str
    epoch: Epoch
    phase: Phase
    phase_since_s: float
    phase_deadline_s: float
    num_open_samples: int
    num_samples: int
    recent_loss: float | None
    stages: tuple[StageView, ...]
    miners: tuple[MinerView, ...]
    validators: tuple[Hotkey, ...]
    audits: tuple[AuditView, ...]
    evaluations: tuple[EvaluationView, ...]
    posted: dict[Hotkey, int]
    sealed_segments: int
    ledger_head: str
    num_ledger_entries: int
    flags: tuple[FlagView, ...] = ()
    kind: RunKind = RunKind.PIPELINE
    standings: tuple[StandingView, ...] = ()
    dissenting: tuple[Hotkey, ...] = ()
    """Validators that computed other weights from the same segment than those shown: whom to believe, `strata audit` tells."""


def run_view(state: State) -> RunView:
    """Everything at once; lists are in a fixed order."""
    current = state.current
    return RunView(
        at_s=state.now_s,
        run_id=state.run_id,
        kind=state.kind,
        epoch=state.epoch,
        phase=state.phase,
        phase_since_s=state.phase_since_s,
        phase_deadline_s=state.phase_deadline_s,
        num_open_samples=len(current.open_samples),
        num_samples=len(current.samples),
        recent_loss=_recent_loss(state),
        stages=tuple(_stage(state, StageIndex(stage)) for stage in range(len(state.num_elements))),
        miners=_miners(state),
        validators=state.validators,
        audits=_audits(state),
        flags=_flags(state),
        standings=_standings(state),
        dissenting=_dissenting(state),
        evaluations=tuple(
            EvaluationView(epoch=epoch, loss=found.loss, loss_wires_zeroed=found.loss_wires_zeroed)
            for epoch, found in sorted(state.evaluations.items())
        ),
        posted={hotkey: posted.segment for hotkey, posted in sorted(state.posted.items())},
        sealed_segments=state.ledger.num_segments,
        ledger_head=state.ledger.head,
        num_ledger_entries=state.ledger.num_entries,
    )


def _recent_loss(state: State) -> float | None:
    """Mean of the newest completed samples' losses."""
    losses = state.current.recent_losses
    if not state.current.samples and state.previous is not None:
        losses = state.previous.recent_losses
    return sum(losses) / len(losses) if losses else None


def _stage(state: State, stage: StageIndex) -> StageView:
    merges = state.current.merges
    merge = merges[stage] if stage < len(merges) else None
    before = state.previous
    plan = before.merges[stage].plan if before else None
    return StageView(
        stage=stage,
        num_live=len(state.live_members(stage)),
        num_accepted=len(merge.accepted) if merge else 0,
        num_shards=len(merge.plan.shards) if merge and merge.plan else 0,
        is_published=bool(merge and merge.snapshot),
        num_assigned=len(before.roster[stage]) if before else 0,
        num_merged=len(plan.uploads) if plan else 0,
    )


def _miners(state: State) -> tuple[MinerView, ...]:
    current = state.current
    roster = {hotkey for stage in current.roster for hotkey in stage}
    views = [
        MinerView(
            hotkey=hotkey,
            stage=member.stage,
            is_live=member.is_live,
            is_in_roster=hotkey in roster,
            units=len(current.work[hotkey].credited) if hotkey in current.work else 0,
            has_committed=hotkey in current.commits,
            has_uploaded=hotkey in current.uploaded,
            banned_until=member.banned_until if member.banned_until >= state.epoch else -1,
        )
        for hotkey, member in state.members.items()
    ]
    return tuple(sorted(views, key=lambda view: (view.stage, view.hotkey)))


def _audits(state: State) -> tuple[AuditView, ...]:
    views = []
    for (epoch, hotkey), case in sorted(state.cases.items()):
        measures = [verdict.measures for verdict in case.verdicts if verdict.measures is not None]
        rules = [
            verdict.published_rule_passes for verdict in case.verdicts if verdict.published_rule_passes is not None
        ]
        views.append(
            AuditView(
                epoch=epoch,
                hotkey=hotkey,
                segment=case.challenge.segment,
                validators=tuple(case.asked),
                is_answered=case.challenge.start is not None,
                outcome=Outcome(case.outcome) if case.outcome else "",
                reasons=tuple(verdict.reason for verdict in case.verdicts),
                rel_d=max((found.rel_d for found in measures), default=None),
                rel_dw=max((found.rel_dw for found in measures), default=None),
                published_rule_passes=all(rules) if rules else None,
            )
        )
    return tuple(views)


def _newest_posts(state: State) -> list[tuple[Hotkey, wire.PostScores]]:
    """What validators posted for the newest segment that any of them scored, by hotkey."""
    posts = [
        (hotkey, post) for hotkey, post in sorted(state.posted.items()) if post.segment < state.ledger.num_segments
    ]
    newest = max((post.segment for _, post in posts), default=None)
    return [(hotkey, post) for hotkey, post in posts if post.segment == newest]


def _standings(state: State) -> tuple[StandingView, ...]:
    posts = _newest_posts(state)
    if not posts:
        return ()
    _, shown = posts[0]
    return tuple(
        StandingView(hotkey=hotkey, score=score, weight=shown.weights.get(hotkey, 0.0))
        for hotkey, score in sorted(shown.scores.items())
    )


def _dissenting(state: State) -> tuple[Hotkey, ...]:
    posts = _newest_posts(state)
    return tuple(hotkey for hotkey, post in posts if post.weights != posts[0][1].weights)


def _flags(state: State) -> tuple[FlagView, ...]:
    """Flags that still make audits certain, one for each epoch and miner."""
    by_miner: dict[tuple[Epoch, Hotkey], list[LossFlag]] = {}
    for (epoch, hotkey, _), flag in sorted(state.flags.items()):
        by_miner.setdefault((epoch, hotkey), []).append(flag)
    return tuple(
        FlagView(
            epoch=epoch,
            hotkey=hotkey,
            validators=tuple(flag.validator for flag in found),
            effect=max(found, key=lambda flag: abs(flag.z)).effect,
            z=max(found, key=lambda flag: abs(flag.z)).z,
        )
        for (epoch, hotkey), found in by_miner.items()
    )
