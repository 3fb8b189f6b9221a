"""Running cheats among honest miners, and what came of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from neurons.roles.miner import MakeWorker
from neurons.roles.ports import MinerPorts
from neurons.virtual import VirtualPlan, VirtualResult
from subnet.config import RunConfig
from subnet.orchestration.ledger import AnyFact, CaseClosed
from subnet.training.pipeline import StageWorker
from subnet.types import Hotkey, Outcome, Verdict
from tests.sim.world import CONFIG, altered, cheat_at, convicted, facts, simulate, stages, verdicts_on

NUM_MINERS = 6
TWO_A_STAGE = altered(CONFIG, training={"min_miners": NUM_MINERS})


@dataclass(frozen=True, slots=True)
class Trial:
    """One run with cheats in it."""

    result: VirtualResult
    cheats: frozenset[Hotkey]

    @property
    def facts(self) -> list[AnyFact]:
        """The whole record."""
        return facts(self.result)

    @property
    def convicted_in(self) -> int | None:
        """Epoch whose audit convicted the first cheat, None when none did."""
        closed = [f for f in self.facts if isinstance(f, CaseClosed) and f.outcome == Outcome.FAIL]
        return min((int(fact.epoch) for fact in closed if fact.hotkey in self.cheats), default=None)

    @property
    def verdicts(self) -> list[Verdict]:
        """What validators found about the cheats."""
        return [verdict for cheat in sorted(self.cheats) for verdict in verdicts_on(self.result, cheat)]

    @property
    def pay(self) -> tuple[float, float]:
        """Mean weight of a cheat, and of an honest miner of the same stages."""
        at = stages(self.result)
        names = {hotkey: name for name, hotkey in self.result.hotkeys.items()}
        where = {at[names[cheat]] for cheat in self.cheats}
        honest = [hotkey for name, hotkey in self.result.hotkeys.items() if at.get(name) in where]
        honest = [hotkey for hotkey in honest if hotkey not in self.cheats]
        weights = self.result.expected
        return _mean(weights, sorted(self.cheats)), _mean(weights, honest)

    def check_honest_are_safe(self) -> None:
        """No honest miner is convicted, whatever its neighbours do."""
        assert convicted(self.result) <= self.cheats

    def check_cheat_earns_less(self) -> None:
        """Nor does a cheat out-earn the honest miner beside it."""
        cheat, honest = self.pay
        assert cheat < honest


def _mean(weights: dict[Hotkey, float], hotkeys: list[Hotkey]) -> float:
    return sum(weights.get(hotkey, 0.0) for hotkey in hotkeys) / len(hotkeys)


def with_worker(cheat: MakeWorker, stage: int, *, seed: int = 1, config: RunConfig = TWO_A_STAGE) -> Trial:
    """The first miner that is given `stage` computes as `cheat` does."""
    plan = VirtualPlan(seed=seed, num_miners=NUM_MINERS, workers=cheat_at(stage, cheat, num_miners=NUM_MINERS))
    result = simulate(plan, config)
    return Trial(result, frozenset({_holders(result, stage)[0]}))


def _holders(result: VirtualResult, stage: int) -> list[Hotkey]:
    """Miners of a stage, in the order in which they were given it."""
    return [result.hotkeys[name] for name, at in stages(result).items() if at == stage]


def with_ports(
    *cheats: Callable[[MinerPorts], MinerPorts],
    stage: int,
    seed: int = 1,
    config: RunConfig = TWO_A_STAGE,
    num_miners: int = NUM_MINERS,
    num_validators: int = 2,
    worker: MakeWorker = StageWorker,
) -> Trial:
    """The first miners that are given `stage` deal as `cheats` do, and compute as `worker`.

    Who they are is seen in an honest run of the same seed.
    """
    plan = VirtualPlan(seed=seed, num_miners=num_miners, num_validators=num_validators)
    # joining comes first, so that a seed's stages do not depend on how many epochs follow
    given = stages(simulate(plan, altered(config, training={"num_epochs": 1})))
    names = [name for name, at in given.items() if at == stage][: len(cheats)]
    liars = replace(plan, miner_ports=dict(zip(names, cheats, strict=True)), workers=dict.fromkeys(names, worker))
    result = simulate(liars, config)
    assert [stages(result)[name] for name in names] == [stage] * len(cheats)
    return Trial(result, frozenset(result.hotkeys[name] for name in names))
