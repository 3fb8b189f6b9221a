"""What CLASP finds and whom it blames: power against the formula, false positives, framing, twins, cost. Prints a report."""

import argparse
import math
import resource
import time

import numpy as np

from incentives.clasp import Batch, Moments, paper_z
from incentives.config import ClaspConfig
from incentives.flags import Attribution, anytime_limit, attribute, flags, samples_needed, stage_test, twin_scores
from incentives.scenarios import Routing, Scenario
from subnet.types import Hotkey

HONEST_Z = 3.0902  # one-sided 1e-3


def fitted(scenario: Scenario, batch: Batch) -> Attribution:
    return attribute(lambda: [batch], scenario.sizes, num_stages=scenario.num_stages)


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


def power(rounds: int) -> None:
    print("\n== power at alpha 1e-3 with the formula's samples, M = 5, sigma 0.2 (times 1.0, 1.1, 1.2, 1.5)")
    for stages, harm in ((1, 1.05), (2, 1.02), (5, 1.02), (5, 1.01)):
        formula = samples_needed(0.2, 4.5 * (harm - 1.0), 5)
        # the harmful miner stands in stage 0; with one stage it is the last one too, which changes nothing here
        scenario = Scenario(num_stages=stages, harm={(0, 0): harm})
        found = []
        for factor in (1.0, 1.1, 1.2, 1.5):
            batches = [
                scenario.draw(round(factor * formula), np.random.default_rng([3, seed])) for seed in range(rounds)
            ]
            hits = sum(stage_test(fitted(scenario, batch), 0).z_m[0] > HONEST_Z for batch in batches)
            found.append(f"{hits / rounds:.3f}")
        print(f"{stages} stages, +{100 * (harm - 1):.0f} %, {formula:.0f} samples: {', '.join(found)}")


def false_positives(rounds: int) -> None:
    print("\n== honest miners above the 1e-3 threshold, one bad miner (+10 %) in stage 2, 3,000 samples a round")
    settings = {
        "balanced": Scenario(),
        "sticky": Scenario(routing=Routing.STICKY),
        "unbalanced": Scenario(routing=Routing.UNBALANCED),
        "heavy-tailed": Scenario(is_heavy_tailed=True),
        "trending": Scenario(trend=1.0),
        "sticky and trending": Scenario(routing=Routing.STICKY, trend=1.0),
    }
    for label, base in settings.items():
        scenario = Scenario(
            routing=base.routing, is_heavy_tailed=base.is_heavy_tailed, trend=base.trend, harm={(2, 1): 1.1}
        )
        paper = ours = tests = 0
        condition = 0.0
        for seed in range(rounds):
            batch = scenario.draw(3_000, np.random.default_rng([7, seed]))
            fit = fitted(scenario, batch)
            condition = max(condition, fit.fit.condition)
            moments = Moments(scenario.sizes)
            moments.add(batch)
            means = moments.mean_losses()[:25]
            errors = 0.2 / np.sqrt(3_000 / 5)
            for stage in range(5):
                z = stage_test(fit, stage).z_m
                rows = slice(stage * 5, stage * 5 + 5)
                plain = (means[rows] - np.median(means[rows])) / errors
                honest = [at for at in range(5) if (stage, at) != (2, 1)]
                ours += int((z[honest] > HONEST_Z).sum())
                paper += int((plain[honest] > HONEST_Z).sum())
                tests += len(honest)
        sampling = 2.0 * math.sqrt(1e-3 / tests)
        print(
            f"{label:20s} least squares {100 * ours / tests:.3f} % (nominal 0.100 +- {100 * sampling:.3f}), "
            f"plain mean {100 * paper / tests:.2f} %, of {tests} tests, condition <= {condition:.1f}"
        )


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
                if hit is None and test.z_m[1] > anytime_limit(test.errors_m[1], alpha=0.01, effect=0.05):
                    hit = stop
                is_peeked = is_peeked or test.z_m[1] > 2.3263
            peeked += is_peeked
            times += [hit] if hit is not None else []
        middle = f", median after {np.median(times):.0f} samples" if times else ""
        print(
            f"{label:7s} flagged {len(times) / rounds:.3f}{middle}; by a fixed test looked at as often: {peeked / rounds:.3f}"
        )


def twins() -> None:
    print("\n== twins: an identity cheat (+1 nat) among 5 miners, text noise 0.2 cancels, 0.02 remains")
    rng = np.random.default_rng(17)
    for pairs in (2, 4):
        found = 0
        for _ in range(200):
            first = np.concatenate([np.zeros(pairs, np.int64), rng.integers(1, 5, 30)])
            second = np.array([rng.choice([at for at in range(5) if at != one]) for one in first])
            difference = 1.0 * (first == 0) - 1.0 * (second == 0) + 0.02 * rng.standard_normal(len(first))
            found += twin_scores(first, second, difference, 5)[0] > HONEST_Z
        print(f"{pairs} pairs of the cheat among {30 + pairs}: found in {found / 200:.3f} of runs")


def cost() -> None:
    print("\n== cost: 1,000,000 samples x 8 stages")
    for miners in (32, 256):
        scenario = Scenario(num_stages=8, num_miners=miners)
        batch = scenario.draw(1_000_000, np.random.default_rng(19))
        parts = [
            Batch(members_kf=batch.members_kf[at : at + 65_536], loss_k=batch.loss_k[at : at + 65_536])
            for at in range(0, 1_000_000, 65_536)
        ]
        started = time.process_time()
        fit = attribute(lambda parts=parts: parts, scenario.sizes, num_stages=8)
        flags(fit, names(scenario), ClaspConfig())
        elapsed = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{miners} miners a stage: {elapsed:.2f} s of one core, peak memory {peak:.2f} GB, condition {fit.fit.condition:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of each random experiment")
    rounds = parser.parse_args().rounds
    toy()
    power(rounds)
    false_positives(rounds)
    framing(rounds)
    sequential(rounds)
    twins()
    cost()


if __name__ == "__main__":
    main()
