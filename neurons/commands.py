"""The command line's frame: the app, where each command leads, and how a flag names a key of the configuration."""

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from neurons.exit_codes import exit_code_table

ENTRIES = {
    "miner": "neurons.miner:main",
    "validator": "neurons.validator:main",
    "orchestrator": "neurons.orchestrator:main",
    "init-run": "neurons.orchestrator:init_run",
    "localnet": "neurons.localnet:run_localnet",
    "audit": "neurons.audit:run_audit",
    "explain": "neurons.explain:run_explain",
    "agreement": "neurons.agreement:run_agreement",
    "clasp": "neurons.attribution:run_clasp",
    "eval": "neurons.evaluation:run_eval",
    "export": "neurons.export:run_export",
    "serve": "neurons.server:run_serve",
    "simulate": "neurons.simulate:run_simulate",
    "devnet": "neurons.devnet:run_devnet",
    "yuma": "neurons.chain_tools:run_yuma",
    "chain": "neurons.chain_tools:run_chain",
    "doctor": "neurons.doctor:run_doctor",
}
"""Where each command goes: a function that takes checked values and returns an exit code."""


class Flag(NamedTuple):
    """A spelling, or several, of one key of the configuration."""

    key: str
    names: tuple[str, ...]
    metavar: str
    help: str


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
    "To check all pay:      strata audit DIR\n"
    "When something fails:  strata doctor --role miner --netuid N -w W -H H\n\n"
    "Every command explains itself: strata COMMAND --help",
)


def enter(name: str, *arguments: object) -> NoReturn:
    """Import a command's module, run it, and end with its exit code."""
    module, function = ENTRIES[name].split(":")
    entry: Callable[..., int] = getattr(importlib.import_module(module), function)
    raise typer.Exit(entry(*arguments))


def command(name: str, flags: tuple[Flag, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command that takes `flags` besides its own parameters; its `typed` gets what was said, by key."""

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        parameters = {flag.key.replace(".", "__"): flag for flag in flags}

        def typed_command(**values: Any) -> None:
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
        typed_command.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]  # what typer reads
        typed_command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
        typed_command.__doc__ = run.__doc__
        app.command(name)(typed_command)
        return run

    return decorate
