"""How soon is each attack found, and what would the published rule have said? Whole subnets in virtual time; prints a table.

    python -m scripts.study_attacks --seeds 8 --out docs/results/attacks.jsonl

Every miner is audited in every epoch, so that what is counted is the chance that the audit of an epoch finds what was done in
it. A run has one attacker in each stage beside honest replicas, or two that act together beside one. What stands in `--out` is
not done again. `docs/attacks.md` holds the table.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from incentives.economy import StrategyPay, epochs_to_detect
from incentives.economy import simulate as simulate_economy
from incentives.strategies import HONEST
from neurons import settings
from neurons.roles.miner import MakeWorker
from neurons.roles.ports import MinerPorts
from neurons.simulate import Options, economy_of
from neurons.virtual import VirtualPlan, VirtualResult
from subnet.orchestration.ledger import CaseClosed
from subnet.sim.strategies import STRATEGIES
from subnet.training.pipeline import StageWorker
from subnet.types import Hotkey, Outcome
from tests import strategies as lies
from tests.coordinated import Gossip, LittleIsEnough, colluding, copying
from tests.sim.world import CONFIG, NUM_STAGES, altered, convicted, epochs, facts, simulate, verdicts_on

NUM_EPOCHS = 2
TRAINING_S = 20.0
"""An undisturbed epoch takes half of it."""
JOIN_EVERY_S = 0.5
"""Between two miners' starts, so that who gets which stage follows from its name."""
PROBABILITY = 0.1
"""Of an audit, by default and after probation."""
ALL, SENDING, LAST = (0, 1, 2), (0, 1), (2,)

MakePorts = Callable[[MinerPorts], MinerPorts]


class Part(NamedTuple):
    """What one attacker computes and how it deals."""

    worker: MakeWorker = StageWorker
    ports: MakePorts | None = None


class Attack(NamedTuple):
    """One row of the table. `parts` makes the attackers of one run anew."""

    name: str
    stages: tuple[int, ...]
    parts: Callable[[], tuple[Part, ...]]
    seen: str
    """How it shows."""
    test: str
    """In tests/attacks."""
    begins: int = 0
    """First epoch in which it cheats."""
    pays_as: str = ""
    """Its name in the economy, where it has another there."""


def working(worker: MakeWorker) -> Callable[[], tuple[Part, ...]]:
    return lambda: (Part(worker=worker),)


def dealing(ports: MakePorts) -> Callable[[], tuple[Part, ...]]:
    return lambda: (Part(ports=ports),)


def talking(factor: float) -> tuple[Part, ...]:
    gossip = Gossip(factor)
    return (Part(gossip.worker, gossip.ports),)


def little_is_enough() -> tuple[Part, ...]:
    ring = LittleIsEnough(2, z=1.5, chunk_bytes=CONFIG.merge.chunk_bytes)
    return (Part(ring.worker, ring.ports),) * 2


NUMBERS, DEALINGS, RECORD, RINGS = (
    f"test_{name}.py" for name in ("lying_numbers", "lying_dealings", "seen_in_the_record", "coordinated")
)
PASSES, CHANGE = "replay: activations, gradients", "replay: change of params"
REFEREE, LOSSES = "two copies differ; the referee's sum", "replay of the last stage's loss; CLASP flags"
UPLOAD, START = (
    "last checkpoint against the upload, to the bit",
    "first checkpoint against the published params, to the bit",
)

LONE = (
    Attack("identity stage", ALL, working(STRATEGIES["identity"]), PASSES, NUMBERS),
    Attack("stale params", ALL, working(STRATEGIES["stale"]), PASSES, NUMBERS),
    Attack("skipped layer", ALL, working(STRATEGIES["skip"]), PASSES, NUMBERS),
    Attack("truncated tokens", ALL, working(STRATEGIES["truncate"]), PASSES, NUMBERS),
    Attack("scaled output", ALL, working(STRATEGIES["scale"]), PASSES, NUMBERS),
    Attack("never trains", ALL, working(STRATEGIES["zero"]), CHANGE, NUMBERS),
    Attack("half the steps", ALL, working(lies.HalfSteps), CHANGE, NUMBERS),
    Attack("a fifth of the samples", ALL, working(lies.Sometimes), PASSES, NUMBERS),
    Attack("other start", ALL, working(lies.OtherStart), START, NUMBERS, begins=1),
    Attack("poisoned upload", ALL, working(lies.PoisonedUpload), UPLOAD, NUMBERS),
    Attack("zero upload", ALL, working(lies.ZeroUpload), UPLOAD, NUMBERS),
    Attack("replayed activation", SENDING, working(lies.ReplayedActivation), "the same output twice; replay", RINGS),
    Attack("poison along the gradient", SENDING, working(lies.PoisonAlongGradient), PASSES, NUMBERS),
    Attack("false loss", LAST, working(lies.FalseLoss), LOSSES, RECORD),
    Attack("framing", LAST, partial(talking, 1.1), LOSSES, RINGS),
    Attack("hiding", LAST, partial(talking, 0.9), LOSSES, RINGS, pays_as="framing"),
    Attack(
        "never answers challenges", ALL, dealing(lies.absent_from_challenges), "absence: void, then a fail", DEALINGS
    ),
    Attack("forged evidence", ALL, dealing(lies.forging_evidence), "digests committed before the draw", DEALINGS),
    Attack("corrupt reducer", ALL, dealing(lies.storing_zeros("shard")), REFEREE, DEALINGS),
    Attack("missing reducer", ALL, dealing(lies.silent_reducer), "not there at half time of the merge", DEALINGS),
    Attack(
        "missing outer step",
        ALL,
        dealing(lies.silent_after_the_merge),
        "not there at half time of the merge",
        DEALINGS,
        pays_as="missing reducer",
    ),
    Attack(
        "contradicts its commitment",
        ALL,
        dealing(lies.contradicting_itself),
        "left out by reducers and referee",
        DEALINGS,
    ),
)
TOGETHER = (
    Attack("a little is enough", ALL, little_is_enough, UPLOAD, RINGS),
    Attack(
        "colluding reducers", ALL, lambda: (Part(ports=colluding()),) * 2, "8 % of agreeing shards recomputed", RINGS
    ),
    Attack(
        "copied update",
        ALL,
        lambda: tuple(Part(ports=ports) for ports in copying()),
        "equal chunks in commitments",
        RECORD,
    ),
)


class Row(msgspec.Struct, frozen=True):
    """One attack in one run; counts are over all of its attackers."""

    attack: str
    stage: int
    seed: int
    num_audits: int
    num_failed: int
    convicted_in: int | None
    """First epoch for which an attacker was convicted, counted from the first in which it cheated."""
    num_epochs: int
    """Epochs an attacker was credited for or voided in."""
    num_unpaid: int
    """Of these, epochs whose credit is void or that it was convicted for."""
    num_judged: int
    """Replays that came to figures."""
    num_published: int
    """Of these, accepted by the published rule."""
    pay: float
    """Weight at the end, over that of honest miners of the stage."""


class Line(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    attacks: tuple[tuple[str, int], ...]
    """Name and stage."""
    rows: tuple[Row, ...]
    honest_audits: int
    honest_failed: int
    honest_unpaid: int


# ---- running -------------------------------------------------------------------------------------------------------


def runs(seeds: Sequence[int]) -> Iterator[tuple[int, tuple[tuple[Attack, int], ...]]]:
    """Seeds, each with what is tried in which stage; over the seeds every attack comes to every stage it can be made in."""
    for seed in seeds:
        left = [*LONE[seed % len(LONE) :], *LONE[: seed % len(LONE)]]
        while left:
            chosen = []
            for stage in range(NUM_STAGES):
                fitting = [attack for attack in left if stage in attack.stages]
                if fitting:
                    attack = min(fitting, key=lambda attack: len(attack.stages))
                    left.remove(attack)
                    chosen.append((attack, stage))
            yield seed, tuple(chosen)
        yield seed, tuple((attack, (at + seed) % NUM_STAGES) for at, attack in enumerate(TOGETHER))


def name_of(stage: int, place: int) -> str:
    """Who joins as the `place`-th of a stage: the last stage is filled first."""
    return f"m{place * NUM_STAGES + NUM_STAGES - stage}"


def run_one(seed: int, attacks: Sequence[tuple[Attack, int]]) -> Line:
    made = [(attack, stage, attack.parts()) for attack, stage in attacks]
    num_miners = NUM_STAGES * (1 + max(len(parts) for _, _, parts in made))
    parts = {name_of(stage, place): part for _, stage, found in made for place, part in enumerate(found)}
    plan = VirtualPlan(
        seed=seed,
        num_miners=num_miners,
        late_s={f"m{n + 1}": JOIN_EVERY_S * n for n in range(num_miners)},
        workers={name: part.worker for name, part in parts.items()},
        miner_ports={name: part.ports for name, part in parts.items() if part.ports is not None},
    )
    config = altered(
        CONFIG, training={"min_miners": num_miners, "num_epochs": NUM_EPOCHS}, deadlines={"training_s": TRAINING_S}
    )
    result = simulate(plan, config)
    by_stage = {stage: [result.hotkeys[name_of(stage, n)] for n in range(num_miners // NUM_STAGES)] for stage in ALL}
    assert all(epochs(result)[0].stage_of[hotkey] == stage for stage in ALL for hotkey in by_stage[stage])
    cheats = {stage: by_stage[stage][: len(found)] for _, stage, found in made}
    honest = [hotkey for stage in ALL for hotkey in by_stage[stage] if hotkey not in cheats.get(stage, ())]
    audits, failed = outcomes(result, honest)
    return Line(
        seed=seed,
        attacks=tuple((attack.name, stage) for attack, stage in attacks),
        rows=tuple(
            measured(result, seed, attack, stage, cheats[stage], by_stage[stage][len(found) :])
            for attack, stage, found in made
        ),
        honest_audits=audits,
        honest_failed=max(failed, len(convicted(result).intersection(honest))),
        honest_unpaid=unpaid(result, honest)[1],
    )


def outcomes(result: VirtualResult, hotkeys: Sequence[Hotkey], *, since: int = 0) -> tuple[int, int]:
    """Audits of epochs from `since` on that came to a verdict, and how many of them failed."""
    closed = [fact for fact in facts(result) if isinstance(fact, CaseClosed) and fact.hotkey in hotkeys]
    judged = [fact for fact in closed if fact.epoch >= since and fact.outcome != Outcome.INCONCLUSIVE]
    return len(judged), sum(fact.outcome == Outcome.FAIL for fact in judged)


def unpaid(result: VirtualResult, hotkeys: Sequence[Hotkey]) -> tuple[int, int]:
    """Epochs worked in, and those of them that are not paid."""
    worked = [(account, hotkey) for account in epochs(result) for hotkey in hotkeys if account.units.get(hotkey)]
    return len(worked), sum(hotkey in account.voided + account.failed for account, hotkey in worked)


def measured(
    result: VirtualResult, seed: int, attack: Attack, stage: int, cheats: Sequence[Hotkey], honest: Sequence[Hotkey]
) -> Row:
    audits, failed = outcomes(result, cheats, since=attack.begins)
    judged = [verdict for cheat in cheats for verdict in verdicts_on(result, cheat) if verdict.measures]
    worked, not_paid = unpaid(result, cheats)
    guilty = [account.epoch for account in epochs(result) if set(account.failed) & set(cheats)]
    pay, usual = (sum(result.expected.get(one, 0.0) for one in found) / len(found) for found in (cheats, honest))
    return Row(
        attack=attack.name,
        stage=stage,
        seed=seed,
        num_audits=audits,
        num_failed=failed,
        convicted_in=min(guilty) - attack.begins if guilty else None,
        num_epochs=worked,
        num_unpaid=not_paid,
        num_judged=len(judged),
        num_published=sum(verdict.published_rule_passes is True for verdict in judged),
        pay=pay / usual if usual > 0.0 else math.nan,
    )


# ---- what came of it -----------------------------------------------------------------------------------------------


def least_detection(num_failed: int, num_audits: int) -> float:
    """Lower end of the 95 % interval of a chance (Wilson)."""
    if num_audits == 0:
        return 0.0
    z, share = 1.96, num_failed / num_audits
    middle = share + z * z / (2 * num_audits)
    spread = z * math.sqrt(share * (1 - share) / num_audits + z * z / (4 * num_audits**2))
    return max(0.0, (middle - spread) / (1 + z * z / num_audits))


def table(lines: Sequence[Line], pays: Mapping[str, StrategyPay]) -> Iterator[str]:
    """Markdown: what the runs came to, beside what the economy pays for it."""
    rows = sorted((row for line in lines for row in line.rows), key=lambda row: row.attack)
    yield (
        "| attack | seen by | d: failed of audited | d, at least | epochs to conviction: median, worst "
        "| 95 % by formula, p 1; .1 "
        "| unpaid epochs | published rule accepts | pay | test |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    groups = {name: list(found) for name, found in groupby(rows, key=lambda row: row.attack)}
    for attack in (*LONE, *TOGETHER):
        if attack.name in groups:
            yield row_of(attack, groups[attack.name], pays[attack.pays_as or attack.name])
    named = {HONEST.name, *(attack.pays_as or attack.name for attack in (*LONE, *TOGETHER))}
    for name in [name for name in pays if name not in named]:
        yield f"| {name} | | | | | | | | {pay_text(pays[name])} | |"
    audits, failed, lost = (
        sum(getattr(line, field) for line in lines) for field in ("honest_audits", "honest_failed", "honest_unpaid")
    )
    yield f"\nHonest miners beside them: {audits} audits, {failed} convicted, {lost} epochs unpaid; {len(lines)} runs."


def row_of(attack: Attack, found: Sequence[Row], pay: StrategyPay) -> str:
    audits, failed = sum(row.num_audits for row in found), sum(row.num_failed for row in found)
    when = sorted(math.inf if row.convicted_in is None else row.convicted_in + 1 for row in found)
    delays = f"{when[(len(when) - 1) // 2]:g}, {when[-1]:g}" if when[0] < math.inf else "-"
    formula = "-"
    if failed:
        certain = 1.0 if failed == audits else epochs_to_detect(1.0, failed / audits)
        formula = f"{certain:.1f}; {epochs_to_detect(PROBABILITY, failed / audits):.0f}"
    worked, not_paid = sum(row.num_epochs for row in found), sum(row.num_unpaid for row in found)
    judged, published = sum(row.num_judged for row in found), sum(row.num_published for row in found)
    least = f"{least_detection(failed, audits):.2f}" if failed else "-"
    return (
        f"| {attack.name} | {attack.seen} | {failed} of {audits} | {least} | {delays} | {formula} "
        f"| {not_paid} of {worked} | {published} of {judged} | {pay_text(pay)} | {attack.test} |"
    )


def pay_text(pay: StrategyPay) -> str:
    net = f", net {pay.net_pay:.2f}" if pay.net_pay < pay.pay - 0.01 else ""
    return f"{pay.pay:.3f} +- {pay.pay_error:.3f}{net}"


def simulated_pay(num_rounds: int) -> dict[str, StrategyPay]:
    """What each strategy is paid at the knobs of the main network, relative to honest miners of the same machine."""
    economy = economy_of(settings.load({}, preset="mainnet"), Options())
    return {row.name: row for row in simulate_economy(economy, num_rounds=num_rounds).strategies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20, help="of the economy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.out.read_bytes().splitlines() if options.out.exists() else []
    lines = [msgspec.json.decode(line, type=Line) for line in text]
    done = {(line.seed, line.attacks) for line in lines}
    with options.out.open("ab") as out:
        for seed, attacks in runs(range(options.first, options.first + options.seeds)):
            if (seed, tuple((attack.name, stage) for attack, stage in attacks)) in done:
                continue
            line = run_one(seed, attacks)
            lines.append(line)
            out.write(msgspec.json.encode(line) + b"\n")
            out.flush()
            print(".", end="", flush=True)
    print("\n" + "\n".join(table(lines, simulated_pay(options.rounds))))


if __name__ == "__main__":
    main()
