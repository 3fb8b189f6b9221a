"""What CLASP finds and whom it blames: power against the formula, false positives, framing, twins, cost. Prints a report."""

import argparse
import math
import resource
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from incentives.clasp import Batch, Moments, paper_z
from incentives.config import ClaspConfig
from incentives.flags import Attribution, attribute, flags, stage_test
from incentives.power import pairs_to_find, samples_needed, samples_to_find
from incentives.scenarios import Routing, Scenario
from incentives.tails import anytime_limit, quantile
from incentives.twins import twin_scores
from neurons.plots import MinerLoss, miner_losses
from subnet.types import Hotkey

HONEST_Z = 3.0902  # one-sided 1e-3


def fitted(scenario: Scenario, batch: Batch) -> Attribution:
    return attribute(
        lambda: [batch],
        scenario.sizes,
        num_stages=scenario.num_stages,
        epoch_of_block=scenario.epoch_of_block,
        usual_wander=ClaspConfig().wander,
    )


def names(scenario: Scenario) -> list[list[Hotkey]]:
    return [[Hotkey(f"{stage}-{at}") for at in range(scenario.num_miners)] for stage in range(scenario.num_stages)]


def toy() -> None:
    print("\n== the paper's toy: 5 stages x 5 miners, N(4.5, 0.2), +10 %, 20,000 samples")
    for harm in ({(2, 1): 1.1}, {(2, 1): 1.1, (2, 3): 1.1}):
        scenario = Scenario(harm=harm)
        batch = scenario.draw(20_000, np.random.default_rng(1))
        moments = Moments(scenario.sizes)
        moments.add(batch)
        z = paper_z(moments.mean_losses())
        bad = [2 * 5 + at for _, at in harm]
        mates = [2 * 5 + at for at in range(5) if (2, at) not in harm]
        found = flags(fitted(scenario, batch), names(scenario), ClaspConfig())
        print(
            f"bad {sorted(harm)}: paper z of bad {np.round(z[bad], 2)}, of stage mates {np.round(z[mates], 2)}; "
            f"least squares flags {[(flag.hotkey, round(flag.z)) for flag in found]}"
        )


def plot(path: str) -> None:
    """The toy as a picture: one bad miner, two of one stage, and one where routing is sticky."""
    panels = []
    for title, scenario in {
        "one miner +10 %": Scenario(harm={(2, 1): 1.1}),
        "two of one stage": Scenario(harm={(2, 1): 1.1, (2, 3): 1.1}),
        "one, sticky routing": Scenario(routing=Routing.STICKY, harm={(2, 1): 1.1}),
    }.items():
        fit = fitted(scenario, scenario.draw(20_000, np.random.default_rng(1)))
        found = {flag.hotkey for flag in flags(fit, names(scenario), ClaspConfig())}
        rows = []
        for stage, hotkeys in enumerate(names(scenario)):
            test, means_m = stage_test(fit, stage), fit.fit.means_p[fit.fit.rows(stage)]
            rows += [
                MinerLoss(
                    stage, float(means_m[at]), float(test.effects_m[at]), float(test.errors_m[at]), hotkey in found
                )
                for at, hotkey in enumerate(hotkeys)
            ]
        panels.append((f"{title}; flagged: {len(found)}", rows))
    miner_losses(panels, path)
    print(f"plot written to {path}")


def power(rounds: int) -> None:
    print(
        "\n== samples for 90 % power at alpha 1e-3, M = 5, sigma 0.2; the harmful miner's losses also vary more, as in the toy"
    )
    print(
        "limit: 19.1*(sigma/delta)^2*M^2/(M-1); formula: what the test as made needs; needed: found here, and over the formula"
    )
    for routing in (Routing.BALANCED, Routing.RANDOM):
        for stages, harm in ((1, 1.1), (1, 1.05), (2, 1.02), (5, 1.02), (5, 1.01)):
            # the harmful miner stands in stage 0; with one stage it is the last one too, which changes nothing here
            scenario = Scenario(num_stages=stages, routing=routing, harm={(0, 0): harm})
            delta = 4.5 * (harm - 1.0)
            formula = samples_to_find(0.2 * harm, delta, 5, num_stages=stages)
            shares = {
                factor: found_share(scenario, round(factor * formula), rounds) for factor in (0.8, 0.9, 1.0, 1.1, 1.2)
            }
            curve = ", ".join(f"{factor:g}: {share:.3f}" for factor, share in shares.items())
            print(
                f"{routing}, {stages} stages, +{100 * (harm - 1):.0f} %: limit {samples_needed(0.2, delta, 5):.0f}, "
                f"formula {formula:.0f}; power at so many times the formula {curve}; needed {crossing(shares):.2f}"
            )


def found_share(scenario: Scenario, num_samples: int, rounds: int) -> float:
    """Share of networks in which the first miner of the first stage is found."""
    batches = (scenario.draw(num_samples, np.random.default_rng([3, seed])) for seed in range(rounds))
    return sum(bool(stage_test(fitted(scenario, batch), 0).z_m[0] > HONEST_Z) for batch in batches) / rounds


def crossing(shares: dict[float, float]) -> float:
    """Where the power reaches 90 %, on straight lines between the measured points; NaN outside of them."""
    factors, powers = np.array(list(shares)), np.maximum.accumulate(list(shares.values()))
    return float(np.interp(0.9, powers, factors, left=math.nan, right=math.nan))


LEVELS = (1e-2, 1e-3, 1e-4)
SETTINGS = {
    "balanced": Scenario(harm={(2, 1): 1.1}),
    "sticky": Scenario(routing=Routing.STICKY, harm={(2, 1): 1.1}),
    "unbalanced": Scenario(routing=Routing.UNBALANCED, harm={(2, 1): 1.1}),
    "heavy-tailed": Scenario(is_heavy_tailed=True, harm={(2, 1): 1.1}),
    "trending": Scenario(trend=1.0, harm={(2, 1): 1.1}),
    "sticky and trending": Scenario(routing=Routing.STICKY, trend=1.0, harm={(2, 1): 1.1}),
    "wandering by .01": Scenario(wander=0.01, harm={(2, 1): 1.1}),
    "wandering by .02": Scenario(wander=0.02, harm={(2, 1): 1.1}),
    "wandering by .05": Scenario(wander=0.05, harm={(2, 1): 1.1}),
}


def false_positives(rounds: int) -> None:
    print(f"\n== honest miners above a level, one bad miner (+10 %) in stage 2, 3,000 samples a round, {rounds} rounds")
    print(
        "counts against what the level promises and twice its sampling error; first the other stages, then the bad miner's mates"
    )
    for label, scenario in SETTINGS.items():
        others: list[np.ndarray] = []
        mates: list[np.ndarray] = []
        condition, num_blamed = 0.0, 0
        for seed in range(rounds):
            batch = scenario.draw(3_000, np.random.default_rng([7, seed]))
            fit = fitted(scenario, batch)
            condition = max(condition, fit.fit.condition)
            others += [stage_test(fit, stage).z_m for stage in range(5) if stage != 2]
            mates.append(np.delete(stage_test(fit, 2).z_m, 1))
            num_blamed += blamed_by_means(scenario, batch)
        cells = [counted(np.concatenate(scores), level) for scores in (others, mates) for level in LEVELS]
        print(
            f"{label:20s} {'; '.join(cells)}; plain mean at 1e-3: {num_blamed / (24 * rounds):.2%}; condition <= {condition:.1f}"
        )


def counted(scores: np.ndarray, level: float) -> str:
    expected = level * len(scores)
    return f"{level:g}: {int((scores > quantile(level)).sum())} of {expected:.0f} +- {2.0 * math.sqrt(expected):.0f}"


def blamed_by_means(scenario: Scenario, batch: Batch) -> int:
    """Honest miners that the paper's plain means put above 1e-3."""
    moments = Moments(scenario.sizes)
    moments.add(batch)
    means_sm = moments.mean_losses()[:25].reshape(5, 5)
    z_sm = (means_sm - np.median(means_sm, axis=1, keepdims=True)) / (0.2 / np.sqrt(3_000 / 5))
    z_sm[2, 1] = 0.0
    return int((z_sm > HONEST_Z).sum())


def framing(rounds: int) -> None:
    print("\n== a last-stage liar adds 1 nat to the samples of a victim in stage 1 (20,000 samples)")
    scenario = Scenario(framing=(3, 1, 2, 1.0))
    guarded = unguarded = liar = 0
    for seed in range(rounds):
        fit = fitted(scenario, scenario.draw(20_000, np.random.default_rng([11, seed])))
        found = {flag.hotkey for flag in flags(fit, names(scenario), ClaspConfig())}
        guarded += "1-2" in found
        liar += "4-3" in found
        unguarded += stage_test(fit, 1).z_m[2] > HONEST_Z
    print(
        f"victim convicted: without the median {unguarded / rounds:.3f}, with it {guarded / rounds:.3f}; liar {liar / rounds:.3f}"
    )


def sequential(rounds: int) -> None:
    print("\n== one miner looked at after every 500 of 10,000 samples, alpha 1e-2")
    for label, harm in (("honest", {}), ("+1 %", {(0, 1): 1.01}), ("+2 %", {(0, 1): 1.02})):
        scenario = Scenario(num_stages=2, harm=harm)
        peeked, times = 0, []
        for seed in range(rounds):
            batch = scenario.draw(10_000, np.random.default_rng([13, seed]))
            hit, is_peeked = None, False
            for stop in range(500, 10_001, 500):
                part = Batch(members_kf=batch.members_kf[:stop], loss_k=batch.loss_k[:stop])
                test = stage_test(fitted(scenario, part), 0)
                if hit is None and test.z_m[1] > anytime_limit(
                    test.errors_m[1], alpha=0.01, effect=ClaspConfig().effect
                ):
                    hit = stop
                is_peeked = is_peeked or test.z_m[1] > 2.3263
            peeked += is_peeked
            times += [hit] if hit is not None else []
        middle = f", median after {np.median(times):.0f} samples" if times else ""
        print(
            f"{label:7s} flagged {len(times) / rounds:.3f}{middle}; by a fixed test looked at as often: {peeked / rounds:.3f}"
        )


def twins(rounds: int) -> None:
    print("\n== twins of one stage of 5 against raw samples of the run, harm found with 90 % power at 1e-3")
    for noise in (0.02, 0.05, 0.1):
        cells = []
        for delta in (1.0, 0.09, 0.045):
            pairs, samples = pairs_to_find(noise, delta, 5), samples_to_find(0.2, delta, 5, num_stages=5)
            cells.append(f"+{delta:g} nats: {pairs:.0f} pairs or {samples:.0f} samples")
        print(f"noise of a pair {noise:g}, of a sample 0.2: {'; '.join(cells)}")
    print("an identity cheat (+1 nat) with few pairs of its own among 30 of others, noise 0.02, and its honest mates:")
    for pairs in (1, 2, 4):
        found = blamed = 0
        for seed in range(rounds):
            rng = np.random.default_rng([17, seed])
            first = np.concatenate([np.zeros(pairs, np.int64), rng.integers(1, 5, 30)])
            second = np.array([rng.choice([at for at in range(1, 5) if at != one]) for one in first])
            difference = 1.0 * (first == 0) + 0.02 * rng.standard_normal(len(first))
            z = twin_scores(first, second, difference, 5)
            found += bool(z[0] > HONEST_Z)
            blamed += int((z[1:] > HONEST_Z).sum())
        print(f"{pairs} pairs: found in {found / rounds:.3f} of runs, {blamed} of {4 * rounds} honest above 1e-3")


def cost() -> None:
    print("\n== cost: 1,000,000 samples x 8 stages")
    for miners in (32, 256):
        scenario = Scenario(num_stages=8, num_miners=miners, trend=0.5)
        batch = scenario.draw(1_000_000, np.random.default_rng(19))
        parts = [
            Batch(members_kf=batch.members_kf[at : at + 65_536], loss_k=batch.loss_k[at : at + 65_536])
            for at in range(0, 1_000_000, 65_536)
        ]
        started = time.process_time()
        fit = attribute(partial(iter, parts), scenario.sizes, num_stages=8, epoch_of_block=scenario.epoch_of_block)
        flags(fit, names(scenario), ClaspConfig())
        elapsed = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{miners} miners a stage: {elapsed:.2f} s of one core, peak memory {peak:.2f} GB, condition {fit.fit.condition:.2f}"
        )


PARTS: dict[str, Callable[[int], None]] = {
    "toy": lambda _: toy(),
    "power": power,
    "false-positives": false_positives,
    "framing": framing,
    "sequential": sequential,
    "twins": twins,
    "cost": lambda _: cost(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of each random experiment")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the toy and do nothing else")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options.rounds)


if __name__ == "__main__":
    main()
