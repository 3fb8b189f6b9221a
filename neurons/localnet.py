"""`strata localnet`: a whole subnet on this machine, of real processes; the parts are in neurons/local."""

from neurons.claims import directory_claim
from neurons.lifecycle import run_role
from neurons.local.plan import make_plan, require_fresh
from neurons.local.session import Session
from neurons.settings import LocalnetOptions, NodeConfig
from subnet.errors import InvalidConfig

STOP_LIMIT_S = 20.0
"""Roles get 9 s after the signal, the chain 4 more, and then there is the state store."""


def run_localnet(config: NodeConfig, options: LocalnetOptions) -> int:
    """Start, show and judge a local subnet; returns 0 only if every invariant held. Raises StartupRefused."""
    _check_cheats(options)
    if options.is_virtual:
        from neurons.local.simulated import run_simulated

        return run_simulated(config, options)
    plan = make_plan(config, options)
    require_fresh(plan.layout)
    with directory_claim(plan.layout.root, "localnet", role="localnet", flag="--dir"):
        session = Session(plan)
        code = run_role(
            session.run,
            role="localnet",
            log_level="critical",  # what a person should know is shown as news, faults of ours are critical
            log_file=str(plan.layout.log("localnet")),
            limit_s=STOP_LIMIT_S,
        )
    return code or session.exit_code


def _check_cheats(options: LocalnetOptions) -> None:
    """Before anything starts. What cheats compute needs torch, which this process otherwise does without."""
    if not options.cheats:
        return
    from subnet.sim.strategies import STRATEGIES

    for kind in options.cheat_of.values():
        if kind not in STRATEGIES:
            raise InvalidConfig(f"--cheat KIND:MINER takes a kind of {', '.join(STRATEGIES)}, got {kind!r}")


if __name__ == "__main__":
    from neurons.cli import main_as

    main_as("localnet")
