"""`strata explain`: from a hotkey's passes to its emission, with the numbers and the events that say so (users.md 21)."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from incentives.config import Decay, IncentiveConfig
from incentives.reward import EpochOutcome, Score, Scoreboard, volumes
from incentives.weights import to_u16
from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.scoring import Record, outcomes, scored, weighted
from neurons.sources import OnChain, chain_of_directory, chain_of_url, is_url, layout_of, open_record, read_segments
from neurons.trail import EpochTrail, Trail, events
from subnet.config import RunConfig
from subnet.errors import InvalidConfig, StartupRefused
from subnet.orchestration.ledger import Assigned
from subnet.types import Hotkey, Metagraph, Neuron, Uid
from subnet.types import Record as Value

_ADDRESS_LENGTH = 48
_OWNER = Hotkey("the owner's hotkey")
"""Stands for the burn hotkey when no chain says who the owner is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """What is known of the chain; without a metagraph it was not reached, and `note` says why."""

    metagraph: Metagraph | None = None
    weights: Mapping[Hotkey, Mapping[Uid, int]] = field(default_factory=dict)
    note: str = ""

    def neuron(self, hotkey: Hotkey) -> Neuron | None:
        """The neuron of a hotkey, if it is registered."""
        return self.metagraph.by_hotkey().get(hotkey) if self.metagraph else None

    @property
    def owner(self) -> Hotkey:
        """Who gets what is burned."""
        return self.metagraph.owner_hotkey if self.metagraph else _OWNER


class Step(Value, frozen=True):
    """One condition of being paid. `holds` is None when the chain, which would know, was not reached."""

    name: str
    holds: bool | None
    detail: str


@dataclass(slots=True)
class _Standing:
    """Scores of everybody at the end of one epoch, and what this hotkey's work added."""

    volume: float
    scores: dict[Hotkey, Score]


def explanation(record: Record, hotkey: Hotkey, chain: ChainView) -> list[str]:
    """Lines for people. Raises InvariantBroken when the record has no beginning."""
    incentives = record.incentives()
    trail = Trail(hotkey).add(record.entries)
    standings = _standings(record, hotkey, incentives)
    lines = [f"Hotkey {hotkey}: {len(record.entries)} events in {record.num_segments} segments", *_joined(trail)]
    before = 0.0
    for _, epoch in sorted(trail.epochs.items()):
        standing = standings.get(int(epoch.epoch))
        lines += _epoch_lines(epoch, standing, hotkey, before=before, incentives=incentives)
        score = standing.scores.get(hotkey) if standing else None
        before = score.score if score else before
    lines += _weight_lines(record, hotkey, standings, chain)
    steps = ladder(record, trail, chain)
    lines += ["", "Is it paid?", *(_step_line(step) for step in steps)]
    failing = next((step for step in steps if step.holds is False), None)
    if failing is not None:
        lines += ["", f"First condition that does not hold: {failing.name}: {failing.detail}"]
    return lines


def _joined(trail: Trail) -> list[str]:
    return [f"  {trail.assigned.text('stages assigned')}"] if trail.assigned.count else ["  never assigned a stage"]


def _standings(record: Record, hotkey: Hotkey, incentives: IncentiveConfig) -> dict[int, _Standing]:
    """The scoreboard after each published epoch, by the same code that validators run."""
    board, found = Scoreboard(incentives), dict[int, _Standing]()
    for outcome in sorted(outcomes(record.accounts), key=lambda outcome: outcome.epoch):
        board.add(outcome)
        found[int(outcome.epoch)] = _Standing(_counted(outcome, hotkey, incentives), board.scores())
    return found


def _counted(outcome: EpochOutcome, hotkey: Hotkey, incentives: IncentiveConfig) -> float:
    if hotkey in outcome.voided or hotkey in outcome.failed:
        return 0.0
    return volumes(outcome, incentives).get(hotkey, 0.0)


def _epoch_lines(
    trail: EpochTrail, standing: _Standing | None, hotkey: Hotkey, *, before: float, incentives: IncentiveConfig
) -> list[str]:
    is_in = "not in its roster" if trail.stage is None else f"stage {trail.stage}"
    state = "published" + events(trail.published.first, trail.published.last) if trail.published.count else "not over"
    lines = ["", f"epoch {trail.epoch}: {is_in}; {state}", f"  leased     {trail.leased.text('samples')}"]
    lines.append(f"  credited   {trail.credited.text('units')}")
    if trail.voided.count:
        lines.append(f"  voided     {trail.voided.text('units')}")
    committed = trail.committed.text("batches") if trail.committed.first >= 0 else "no"
    lines.append(f"  committed  {committed}")
    lines.append(
        f"  upload     {'accepted' + events(trail.uploaded.first, trail.uploaded.last) if trail.uploaded.count else 'none'}"
    )
    lines += [f"  {note}" for note in trail.notes]
    score = standing.scores.get(hotkey) if standing else None
    if standing is not None and score is not None:
        lines += _score_lines(score, standing.volume, before=before, incentives=incentives)
    return lines


def _score_lines(score: Score, volume: float, *, before: float, incentives: IncentiveConfig) -> list[str]:
    window = incentives.window_epochs
    if incentives.decay is Decay.STEP:
        how = f"volume of the last {window} epochs, {volume:.3f} of it from this one"
    else:
        how = f"{before:.3f} x (1 - 1/{window}) + {volume:.3f}"
    is_banned = f", banned until epoch {score.banned_until}" if score.banned_until is not None else ""
    ramp = (
        f"{incentives.trust_floor:g} + {1.0 - incentives.trust_floor:g} x {score.clean_epochs}/{incentives.ramp_epochs}"
    )
    return [
        f"  score      {score.score:.3f} = {how}" if score.score else f"  score      0, {volume:.3f} from this epoch",
        f"  trust      {score.trust:.4f} = min(1, {ramp})" if not is_banned else f"  trust      0{is_banned}",
    ]


def _weight_lines(record: Record, hotkey: Hotkey, standings: Mapping[int, _Standing], chain: ChainView) -> list[str]:
    """Score, claim, weight, u16 on chain, emission."""
    scores = standings[max(standings)].scores if standings else {}
    score = scores.get(hotkey)
    claims = {name: found.score * found.trust for name, found in scores.items()}
    weights = weighted(record, burn_hotkey=chain.owner)
    lines = ["", f"now, after segment {record.num_segments - 1}"]
    if score is None:
        lines.append("  score      none: it never worked in a published epoch")
    else:
        lines.append(f"  claim      {claims[hotkey]:.3f} = score {score.score:.3f} x trust {score.trust:.4f}")
    total = sum(claims[name] for name in sorted(claims))
    lines.append(f"  weight     {weights.get(hotkey, 0.0):.4%} of all claims, {total:.3f}")
    expected = to_u16(weights).get(hotkey, 0)
    neuron = chain.neuron(hotkey)
    if chain.metagraph is None:
        lines.append(f"  on chain   u16 {expected} expected; {chain.note or 'the chain was not asked'}")
    elif neuron is None:
        lines.append("  on chain   not registered on the subnet")
    else:
        posted = [f"{row.get(neuron.uid, 0)} by {name[:8]}" for name, row in sorted(chain.weights.items()) if row]
        lines.append(f"  on chain   uid {neuron.uid}: u16 {', '.join(posted) or 'from nobody'}; expected {expected}")
        lines.append(f"  emission   {neuron.emission:.6f} alpha a tempo, incentive {neuron.incentive:.4f}")
    return lines


def ladder(record: Record, trail: Trail, chain: ChainView) -> list[Step]:
    """The conditions of being paid, in order (users.md 21). Those of work look at the epochs that still count."""
    window = record.incentives().window_epochs
    published = record.accounts.published()
    newest = published[-1].epoch if published else 0
    recent = [one for _, one in sorted(trail.epochs.items()) if one.epoch > newest - window and one.published.count]
    return [
        *_joining(trail, chain),
        *_working(record, recent, window),
        *_judged(record, trail, recent),
        *_paid(trail, chain),
    ]


def _joining(trail: Trail, chain: ChainView) -> list[Step]:
    neuron = chain.neuron(trail.hotkey)
    if chain.metagraph is None:
        registered = Step(name="registered", holds=None, detail=chain.note or "the chain was not asked")
    else:
        uid = f"uid {neuron.uid}" if neuron else "the subnet's metagraph does not have it: btcli subnet register"
        registered = Step(name="registered", holds=neuron is not None, detail=uid)
    given = trail.assigned.text("times") if trail.assigned.count else "it never joined the run: start strata miner"
    return [registered, Step(name="assigned", holds=trail.assigned.count > 0, detail=given)]


def _working(record: Record, recent: Sequence[EpochTrail], window: int) -> list[Step]:
    created = record.accounts.created
    config = msgspec.json.decode(created.config_json, type=RunConfig) if created else RunConfig()
    least = config.training.min_batches
    leased = sum(one.leased.count for one in recent)
    credited = sum(one.credited.count - one.voided.count for one in recent)
    commits = [one for one in recent if one.committed.first >= 0]
    enough = [one for one in commits if one.credited.count - one.voided.count >= least]
    uploads = [one for one in recent if one.uploaded.count]
    in_all = f"in the {len(recent)} published epochs of the last {window} that it was part of"
    return [
        Step(name="working", holds=leased > 0, detail=f"{leased} samples leased {in_all}"),
        Step(name="delivered", holds=credited > 0, detail=f"{credited} units credited {in_all}"),
        Step(
            name="qualified",
            holds=bool(enough),
            detail=f"{len(enough)} of {len(recent)} epochs committed with at least min_batches = {least} units",
        ),
        Step(name="merged", holds=bool(uploads), detail=f"{len(uploads)} of {len(recent)} uploads accepted"),
    ]


def _judged(record: Record, trail: Trail, recent: Sequence[EpochTrail]) -> list[Step]:
    epochs = record.accounts.epochs
    found = [epochs[one.epoch].outcomes[trail.hotkey] for one in recent if trail.hotkey in epochs[one.epoch].outcomes]
    score = scored(record).get(trail.hotkey)
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found)) or "no audit of it yet"
    is_banned = score is not None and score.banned_until is not None
    is_paid = score is not None and score.score * score.trust > 0.0
    reason = score.reason if score else "no credited work in a published epoch"
    return [
        Step(name="audited", holds=not is_banned, detail=score.reason if is_banned and score else counts),
        Step(name="scored", holds=is_paid, detail=reason or f"score {score.score:.3f}" if score else reason),
    ]


def _paid(trail: Trail, chain: ChainView) -> list[Step]:
    neuron = chain.neuron(trail.hotkey)
    if chain.metagraph is None or neuron is None:
        note = chain.note or ("not registered" if chain.metagraph else "the chain was not asked")
        return [Step(name=name, holds=None, detail=note) for name in ("weighted on chain", "emitted to")]
    posters = [name for name, row in sorted(chain.weights.items()) if row.get(neuron.uid, 0) > 0]
    has_emission = neuron.emission > 0.0 or neuron.incentive > 0.0
    no_pay = "the chain has not paid by these weights yet: it does at its next tempo"
    return [
        Step(name="weighted on chain", holds=bool(posters), detail=f"by {len(posters)} validators"),
        Step(name="emitted to", holds=has_emission, detail=f"{neuron.emission:.6f} alpha" if has_emission else no_pay),
    ]


def _step_line(step: Step) -> str:
    word = {True: "yes", False: "NO", None: "?"}[step.holds]
    return f"  {word:<4} {step.name:<18} {step.detail}"


def find_hotkey(record: Record, chain: ChainView, typed: str) -> Hotkey:
    """The hotkey that was typed in full, or the only one that begins so. Raises InvalidConfig."""
    known = {fact.hotkey for fact in (entry.fact for entry in record.entries) if isinstance(fact, Assigned)}
    known |= set(chain.metagraph.by_hotkey()) if chain.metagraph else set()
    fitting = sorted(hotkey for hotkey in known if hotkey.startswith(typed))
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and len(typed) == _ADDRESS_LENGTH:
        return Hotkey(typed)
    what = f"{len(fitting)} hotkeys begin" if fitting else "no hotkey begins"
    shown = ", ".join(hotkey[:12] for hotkey in fitting or sorted(known))
    raise InvalidConfig(f"{what} with {typed!r}; there are {shown or 'none'}")


def run_explain(hotkey: str, target: str, chain_url: str | None = None, netuid: int | None = None) -> int:
    """Print why a hotkey earns what it earns; returns the exit code. Raises StartupRefused."""
    record = open_record(asyncio.run(read_segments(target)))
    chain = _look(target, chain_url, netuid)
    lines = explanation(record, find_hotkey(record, chain, hotkey), chain)
    console().print("\n".join(lines), markup=False, soft_wrap=True)
    return ExitCode.OK


def _look(target: str, chain_url: str | None, netuid: int | None) -> ChainView:
    """The chain, or the reason why it is left out: the record alone explains the score."""
    try:
        found = asyncio.run(_read_chain(target, chain_url, netuid))
    except StartupRefused as error:
        return ChainView(note=str(error).splitlines()[0])
    return ChainView(metagraph=found.metagraph, weights=found.weights)


async def _read_chain(target: str, chain_url: str | None, netuid: int | None) -> OnChain:
    if is_url(target):
        return await chain_of_url(chain_url, netuid)
    return await chain_of_directory(layout_of(target), chain_url)
