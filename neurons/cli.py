"""`strata`: one command for each role and tool. Nothing heavy is imported before a command needs it.

A flag only names a key of the configuration; reading and checking its value is `neurons.settings`' work, so that a flag,
a variable and a line in a file meet the same rules.
"""

import sys
from importlib.metadata import version as installed_version
from types import TracebackType
from typing import Annotated, NoReturn

import typer

from neurons import settings
from neurons.chain_commands import devnet, yuma
from neurons.commands import Config, Flag, Preset, Set, app, command, enter
from neurons.look_commands import agreement, audit, clasp, eval_run, explain
from neurons.serve_commands import export, serve
from subnet.wire import PROTOCOL_VERSION

_CHAIN = (
    Flag("node.netuid", ("--netuid",), "N", "The subnet. Variable: STRATA_NETUID."),
    Flag(
        "node.network", ("--network", "-n", "--subtensor.network"), "NAME", "finney, test, local, or a websocket URL."
    ),
    Flag(
        "node.chain_endpoint",
        ("--chain-endpoint", "--subtensor.chain_endpoint"),
        "URL",
        "Websocket URL of a chain node of your choice.",
    ),
    Flag(
        "node.wallet", ("--wallet", "-w", "--wallet-name", "--wallet.name"), "NAME", "Wallet; only its hotkey is read."
    ),
    Flag("node.hotkey", ("--hotkey", "-H", "--wallet-hotkey", "--wallet.hotkey"), "NAME", "Hotkey of the wallet."),
    Flag("node.wallet_path", ("--wallet-path", "--wallet.path"), "DIR", "Where wallets are."),
)
_MACHINE = (
    Flag("node.listen_host", ("--host", "--axon.ip"), "ADDRESS", "Address to listen on."),
    Flag("node.port", ("--port", "--axon.port"), "PORT", "Port to listen on."),
    Flag("node.external_host", ("--external-host", "--axon.external_ip"), "ADDRESS", "Address peers dial, behind NAT."),
    Flag("node.external_port", ("--external-port", "--axon.external_port"), "PORT", "Port peers dial, behind NAT."),
    Flag("node.data_dir", ("--data-dir",), "DIR", "Checkpoints and journal of this node."),
    Flag("node.log_level", ("--log-level", "--logging.level"), "LEVEL", "debug, info, warning or error."),
    Flag("node.log_file", ("--log-file",), "FILE", "Also write the log here, as JSON lines."),
    Flag("node.metrics_port", ("--metrics-port",), "PORT", "Health and metrics on 127.0.0.1."),
)
_COMPUTE = (
    Flag("node.mode", ("--mode",), "MODE", "fp32 or bf16_autocast; the run says which it admits."),
    Flag("node.num_threads", ("--threads",), "N", "Cores for tensor work; 0: all."),
)
_STORES = (
    Flag("node.state_url", ("--state-url",), "URL", "redis://HOST:PORT/DB; without it an embedded store."),
    Flag("node.blob_url", ("--blob-url",), "URL", "s3://BUCKET/PREFIX; without it a directory."),
)
_URL = (Flag("node.url", ("--url",), "URL", "Where nodes reach it, if that changed since strata init-run."),)
_LOCALNET = (
    Flag("kind", ("--kind",), "KIND", "pipeline, or blocktrain: stages that train apart. Default: pipeline."),
    Flag(
        "localnet.num_miners", ("--miners",), "N", "Miners, at least one for each stage. Default: 9, for blocktrain 6."
    ),
    Flag("localnet.num_validators", ("--validators",), "N", "Validators with a permit. Default: 2."),
    Flag("training.num_stages", ("--stages",), "N", "Stages the model is cut into. Default: 3, for blocktrain 4."),
    Flag("training.num_epochs", ("--epochs",), "N", "Epochs to run; 0: until stopped. Default: 5, for blocktrain 6."),
    Flag("localnet.seed", ("--seed",), "N", "Of params, samples and keys. Default: 0."),
    Flag("localnet.directory", ("--dir",), "DIR", "Where everything goes. Default: ./localnet."),
    Flag("model.bottleneck", ("--bottleneck",), "KIND", "What crosses a cut: resbm, iota, none, k0. Default: resbm."),
    Flag("localnet.port_base", ("--port-base",), "PORT", "First of the ports to use. Default: free ones."),
    Flag("node.log_level", ("--log-level",), "LEVEL", "debug, info, warning or error."),
)


_SIMULATE = (
    Flag("simulate.num_epochs", ("--epochs",), "N", "Epochs. Default: ten days' worth."),
    Flag("simulate.num_miners", ("--miners",), "N", "Honest miners, beside one of each cheat. Default: 32."),
    Flag(
        "simulate.num_validators", ("--validators",), "N", "Honest validators, beside three that are not. Default: 4."
    ),
    Flag("simulate.num_rounds", ("--rounds",), "N", "Repetitions. Default: 5, in a sweep 2."),
    Flag("simulate.seed", ("--seed",), "N", "Same seed, same numbers. Default: 0."),
    Flag(
        "simulate.sweep",
        ("--sweep",),
        "KEY=V1,V2",
        "A run for each value of gamma, T_s, p, ban, miners, validators, or any knob.",
    ),
    Flag("simulate.csv", ("--csv",), "FILE", "Also write every number here."),
    Flag("simulate.png", ("--png",), "FILE", "Also draw pay and stability."),
)


def _node(
    typed: dict[str, object], config: str | None, preset: str | None, assignments: list[str] | None
) -> settings.NodeConfig:
    flags = settings.parse_assignments(assignments or []) | typed
    return settings.load(flags, preset=preset, file=config)


@command("miner", _CHAIN + _MACHINE + _COMPUTE)
def miner(typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None) -> None:
    """Hold a stage of the model, train it, be paid for it.

    \b
    strata miner --netuid 12 --wallet.name w --wallet.hotkey h
    strata miner --netuid 12 -w w -H h --port 8091 --external-host 203.0.113.7
    strata miner --netuid 2 -n ws://127.0.0.1:9944 -w w -H h      a local subnet

    The hotkey must be registered; if it is not, the command and the price are printed and nothing is spent.
    Ctrl-C or SIGTERM ends it within 8 seconds.
    """
    enter("miner", _node(typed, config, preset, assignments))


@command("validator", _CHAIN + _MACHINE + _COMPUTE)
def validator(typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None) -> None:
    """Audit miners, sign verdicts, score the record, set weights.

    \b
    strata validator --netuid 12 --wallet.name w --wallet.hotkey h
    strata validator --netuid 12 -w w -H h --mode fp32 --threads 8

    Weights need a validator permit; without one it audits and says what is missing.
    """
    enter("validator", _node(typed, config, preset, assignments))


@command("orchestrator", _CHAIN + _MACHINE + _STORES + _URL)
def orchestrator(
    typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None
) -> None:
    """Draw pathways and keep the record of a run (subnet owner).

    \b
    strata init-run     --config run.toml --netuid 12 -w owner -H owner --url https://strata.example.org
    strata orchestrator --config run.toml --netuid 12 -w owner -H owner
    strata orchestrator --config run.toml --state-url redis://10.0.0.5:6379/0 --blob-url s3://bucket/strata
    """
    enter("orchestrator", _node(typed, config, preset, assignments))


@command("init-run", _CHAIN + _STORES + _MACHINE[4:6])
def init_run(
    typed: dict[str, object],
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Where nodes will reach the orchestrator.")],
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Name of the run; drawn when not given.")
    ] = None,
    config: Config = None,
    preset: Preset = None,
    assignments: Set = None,
) -> None:
    """Publish epoch 0 and announce the run on chain, once.

    \b
    strata init-run --config run.toml --netuid 12 -w owner -H owner --url https://strata.example.org

    Nodes then find the run by netuid through the owner's commitment. Before the orchestrator starts.
    """
    enter("init-run", _node(typed | {"node.url": url}, config, preset, assignments), url, run_id)


@command("localnet", _LOCALNET)
def localnet(
    typed: dict[str, object],
    cheat: Annotated[
        list[str] | None,
        typer.Option(
            "--cheat",
            metavar="KIND:MINER",
            help="Let a miner cheat, counted from 1, such as identity:1; again for more.",
        ),
    ] = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="All roles in one process, in virtual time: same seed, same digest.")
    ] = False,
    config: Config = None,
    assignments: Set = None,
) -> None:
    """A whole subnet on this machine, chain included.

    \b
    strata localnet                                 9 miners in 3 stages, 2 validators, 5 epochs
    strata localnet --miners 3 --epochs 2           the smallest that trains
    strata localnet --kind blocktrain               6 miners in 4 stages that train apart, averaged in rounds
    strata localnet --cheat identity:1              miner 1 skips its layers; watch it lose its pay
    strata localnet --set audit.probability=0.2     change any knob
    strata audit localnet                           afterwards: recompute every score

    Orchestrator, miners and validators are real processes on loopback. Needs no network, no wallet and no money.
    Ctrl-C ends every process it started and none else.
    Exit code 0 only if every invariant held.
    """
    flags = settings.parse_assignments(assignments or []) | typed
    if cheat:
        flags["localnet.cheats"] = ",".join(cheat)
    if virtual:
        flags["localnet.is_virtual"] = True
    enter("localnet", *settings.load_localnet(flags, file=config))


for look in (audit, explain, agreement, clasp, export, serve):
    app.command()(look)
app.command("eval")(eval_run)


@command("simulate", _SIMULATE)
def simulate(typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None) -> None:
    """What knobs would pay honest work and each cheat.

    \b
    strata simulate                                     the main network's knobs
    strata simulate --config run.toml                   yours, before you publish them
    strata simulate --set audit.probability=0.02        one knob
    strata simulate --sweep gamma=2.5,5,10,20 --csv gamma.csv --png gamma.png
    strata simulate --sweep p=0.01,0.05,0.1 --miners 200

    By the scoring code that validators run and the chain's consensus, over days of virtual time; half a minute on one core.
    """
    enter("simulate", typed, settings.parse_assignments(assignments or []), preset, config)


app.add_typer(devnet, name="devnet")
app.command()(yuma)


@command("chain", _CHAIN[:3])
def chain(typed: dict[str, object]) -> None:
    """A subnet now: neurons, who set which weights when.

    \b
    strata chain --netuid 12
    strata chain --netuid 12 -n test
    strata chain --netuid 1 -n ws://127.0.0.1:9944

    And its hyperparameters. Needs no key.
    """
    enter("chain", settings.load(typed).node)


@command("doctor", _CHAIN + _MACHINE[:5] + _COMPUTE)
def doctor(
    typed: dict[str, object],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="miner, validator or owner.")] = "miner",
    config: Config = None,
    preset: Preset = None,
    assignments: Set = None,
) -> None:
    """What stands in the way of a role, and what to do.

    \b
    strata doctor --role miner --netuid 12 -w w -H h --external-host 203.0.113.7
    strata doctor --role validator --netuid 12 -w w -H h
    strata doctor --role owner --netuid 12 -w owner -H owner
    strata doctor                                       before there is a wallet: what this machine can do

    Spends nothing and asks for no password. Exit code 1: something has to be done first.
    """
    enter("doctor", _node(typed, config, preset, assignments), role)


@app.command()
def version() -> None:
    """Versions; what a report of a fault starts with."""
    print(f"strata {installed_version('strata')}, protocol {PROTOCOL_VERSION}")
    print(
        f"python {sys.version.split()[0]}, torch {installed_version('torch')}, bittensor {installed_version('bittensor')}"
    )


class _Ending:
    """Whatever a command raises becomes words and an exit code, by the rules that end a role (neurons.lifecycle)."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            from neurons.lifecycle import end_of  # brings the event loop, which --help does without

            sys.exit(end_of(error))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run `strata`; a known error becomes a line or two and its exit code, a fault of ours its traceback and code 70."""
    with _Ending():
        app(args=arguments, prog_name="strata")
    sys.exit(0)


def main_as(role: str) -> NoReturn:
    """What `python neurons/<role>.py ...` runs: `strata <role> ...`."""
    main([role, *sys.argv[1:]])


if __name__ == "__main__":
    main()
