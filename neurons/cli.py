"""`strata`: one command for each role and tool. Nothing heavy is imported before a command needs it.

A flag only names a key of the configuration; reading and checking its value is `neurons.settings`' work, so that a flag,
a variable and a line in a file meet the same rules.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from neurons import settings
from neurons.exit_codes import exit_code_table
from subnet.errors import StrataError
from subnet.wire import PROTOCOL_VERSION

ENTRIES = {
    "miner": "neurons.miner:main",
    "validator": "neurons.validator:main",
    "orchestrator": "neurons.orchestrator:main",
    "init-run": "neurons.orchestrator:init_run",
    "localnet": "neurons.localnet:run_localnet",
    "audit": "neurons.audit:run_audit",
    "explain": "neurons.explain:run_explain",
    "agreement": "neurons.agreement:run_agreement",
    "devnet": "neurons.devnet:run_devnet",
}
"""Where each command goes: a function that takes checked values and returns an exit code."""


class Flag(NamedTuple):
    """A spelling, or several, of one key of the configuration."""

    key: str
    names: tuple[str, ...]
    metavar: str
    help: str


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
_LOCALNET = (
    Flag("localnet.num_miners", ("--miners",), "N", "Miners, at least one for each stage. Default: 9."),
    Flag("localnet.num_validators", ("--validators",), "N", "Validators with a permit. Default: 2."),
    Flag("training.num_stages", ("--stages",), "N", "Stages the model is cut into. Default: 3."),
    Flag("training.num_epochs", ("--epochs",), "N", "Epochs to run. Default: 4."),
    Flag("localnet.seed", ("--seed",), "N", "Of params, samples and keys. Default: 0."),
    Flag("localnet.directory", ("--dir",), "DIR", "Where everything goes. Default: ./localnet."),
    Flag("model.bottleneck", ("--bottleneck",), "KIND", "What crosses a cut: resbm, iota, none, k0. Default: resbm."),
    Flag("localnet.port_base", ("--port-base",), "PORT", "First of the ports to use. Default: free ones."),
    Flag("node.log_level", ("--log-level",), "LEVEL", "debug, info, warning or error."),
)

Config = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="TOML file; only what differs from the preset.")
]
Preset = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help="local, testnet or mainnet; follows the network.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the configuration, such as audit.probability=1."),
]

_EPILOG = "\b\nExit codes:\n" + exit_code_table()

app = typer.Typer(
    name="strata",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=_EPILOG,
    help="Train one language model on many machines that do not trust each other, and pay each for work that can be proven.\n\n"
    "\b\nFirst five minutes:    strata localnet\n"
    "To mine:               strata miner --netuid N --wallet.name W --wallet.hotkey H\n"
    "To check all pay:      strata audit DIR\n\n"
    "Every command explains itself: strata COMMAND --help",
)


def _enter(command: str, *arguments: object) -> NoReturn:
    module, name = ENTRIES[command].split(":")
    entry: Callable[..., int] = getattr(importlib.import_module(module), name)
    raise typer.Exit(entry(*arguments))


def _command(name: str, flags: tuple[Flag, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command that takes `flags` besides its own parameters; its `typed` gets what was said, by key."""

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        parameters = {flag.key.replace(".", "__"): flag for flag in flags}

        def command(**values: Any) -> None:
            typed = {flag.key: values.pop(name) for name, flag in parameters.items()}
            run(typed={key: value for key, value in typed.items() if value is not None}, **values)

        options = [
            inspect.Parameter(
                parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, *flag.names, metavar=flag.metavar, help=flag.help, show_default=False),
                annotation=str | None,
            )
            for parameter, flag in parameters.items()
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(run).parameters.values()
            if parameter.name != "typed"
        ]
        command.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
        command.__doc__ = run.__doc__
        app.command(name)(command)
        return run

    return decorate


def _node(
    typed: dict[str, object], config: str | None, preset: str | None, assignments: list[str] | None
) -> settings.NodeConfig:
    flags = settings.parse_assignments(assignments or []) | typed
    return settings.load(flags, preset=preset, file=config)


@_command("miner", _CHAIN + _MACHINE + _COMPUTE)
def miner(typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None) -> None:
    """Hold a stage of the model, train it, be paid for it.

    \b
    strata miner --netuid 12 --wallet.name w --wallet.hotkey h
    strata miner --netuid 12 -w w -H h --port 8091 --external-host 203.0.113.7
    strata miner --netuid 2 -n ws://127.0.0.1:9944 -w w -H h      a local subnet

    The hotkey must be registered; if it is not, the command and the price are printed and nothing is spent.
    Ctrl-C or SIGTERM ends it within 8 seconds.
    """
    _enter("miner", _node(typed, config, preset, assignments))


@_command("validator", _CHAIN + _MACHINE + _COMPUTE)
def validator(typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None) -> None:
    """Audit miners, sign verdicts, score the record, set weights.

    \b
    strata validator --netuid 12 --wallet.name w --wallet.hotkey h
    strata validator --netuid 12 -w w -H h --mode fp32 --threads 8

    Weights need a validator permit; without one it audits and says what is missing.
    """
    _enter("validator", _node(typed, config, preset, assignments))


@_command("orchestrator", _CHAIN + _MACHINE + _STORES)
def orchestrator(
    typed: dict[str, object], config: Config = None, preset: Preset = None, assignments: Set = None
) -> None:
    """Draw pathways and keep the record of a run (subnet owner).

    \b
    strata init-run     --config run.toml --netuid 12 -w owner -H owner --url https://strata.example.org
    strata orchestrator --config run.toml --netuid 12 -w owner -H owner
    strata orchestrator --config run.toml --state-url redis://10.0.0.5:6379/0 --blob-url s3://bucket/strata
    """
    _enter("orchestrator", _node(typed, config, preset, assignments))


@_command("init-run", _CHAIN + _STORES + _MACHINE[4:6])
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
    _enter("init-run", _node(typed, config, preset, assignments), url, run_id)


@_command("localnet", _LOCALNET)
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
    strata localnet                                 9 miners in 3 stages, 2 validators, 4 epochs
    strata localnet --miners 3 --epochs 2           the smallest that trains
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
    _enter("localnet", *settings.load_localnet(flags, file=config))


@app.command()
def audit(
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ],
    chain: Annotated[
        str | None,
        typer.Option("--chain", metavar="URL", help="Chain to compare with; without it DIR's own, or the network's."),
    ] = None,
    netuid: Annotated[int | None, typer.Option("--netuid", metavar="N", help="The run's subnet, with a URL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    replay: Annotated[
        int,
        typer.Option("--replay", metavar="N", min=0, help="Also replay N drawn audited segments from DIR's objects."),
    ] = 0,
) -> None:
    """Recompute every score from the public record; needs no key.

    \b
    strata audit localnet
    strata audit localnet --replay 5
    strata audit https://strata.example.org --netuid 12

    Exit code 0: all equal. 1: not equal, and it says which event.
    """
    _enter("audit", target, chain, netuid, as_json, replay)


@app.command()
def explain(
    hotkey: Annotated[str, typer.Argument(metavar="HOTKEY", help="Address, or as much of its beginning as is unique.")],
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ] = "localnet",
    chain: Annotated[
        str | None,
        typer.Option("--chain", metavar="URL", help="Chain to read; without it DIR's own, or the network's."),
    ] = None,
    netuid: Annotated[int | None, typer.Option("--netuid", metavar="N", help="The run's subnet, with a URL.")] = None,
) -> None:
    """Why a hotkey earns what it earns, or 0.

    \b
    strata explain 5GrwvaEF
    strata explain 5GrwvaEF localnet
    strata explain 5GrwvaEF https://strata.example.org --netuid 12

    From passes to emission, epoch by epoch, each number with the events of the record that say so.
    """
    _enter("explain", hotkey, target, chain, netuid)


@app.command()
def agreement(
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ] = "localnet",
    epoch: Annotated[int | None, typer.Option("--epoch", metavar="N", help="One epoch only.")] = None,
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Also draw it as a heat map.")] = None,
) -> None:
    """Who merged what others merged, by pair.

    \b
    strata agreement localnet
    strata agreement https://strata.example.org --epoch 12 --png agreement.png

    Both copies of every shard are compared. A miner that corrupts its copies is a row out of consensus.
    """
    _enter("agreement", target, epoch, png)


@app.command()
def devnet(
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port on 127.0.0.1; 0: a free one.")] = 9944,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Keep the chain here; without it, in memory.")
    ] = None,
    block_time_s: Annotated[
        float, typer.Option("--block-time", metavar="SECONDS", help="Seconds between blocks.")
    ] = 12.0,
) -> None:
    """A development chain for the Bittensor SDK and btcli.

    \b
    strata devnet --block-time 1
    btcli subnets list -n ws://127.0.0.1:9944

    Money on it is worth nothing. //Alice has some, and owns netuid 1.
    """
    from pathlib import Path

    from subnet.devnet.config import DevnetConfig

    _enter(
        "devnet",
        DevnetConfig(
            port=port, block_time_s=block_time_s, directory=Path(directory).expanduser() if directory else None
        ),
    )


@app.command()
def version() -> None:
    """Versions; what a report of a fault starts with."""
    print(f"strata {installed_version('strata')}, protocol {PROTOCOL_VERSION}")
    print(
        f"python {sys.version.split()[0]}, torch {installed_version('torch')}, bittensor {installed_version('bittensor')}"
    )


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run `strata`; a known error becomes a line or two and its exit code."""
    try:
        app(args=arguments, prog_name="strata")
    except StrataError as error:
        from neurons.lifecycle import tell

        sys.exit(tell(error))
    sys.exit(0)


def main_as(role: str) -> NoReturn:
    """What `python neurons/<role>.py ...` runs: `strata <role> ...`."""
    main([role, *sys.argv[1:]])


if __name__ == "__main__":
    main()
