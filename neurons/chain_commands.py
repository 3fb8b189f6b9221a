"""Commands about the chain that need no configuration of a node: the development chain, and what weights pay."""

import importlib
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from neurons.commands import enter
from neurons.settings import parse_assignments, user_path


class _DevnetCommands(TyperGroup):
    """What can be said to a running devnet; imported when one of it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return self._group().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._group().get_command(ctx, cmd_name)

    def _group(self) -> TyperGroup:
        group = typer.main.get_command(importlib.import_module("neurons.devnet").commands)
        assert isinstance(group, TyperGroup)
        return group


devnet = typer.Typer(cls=_DevnetCommands, rich_markup_mode=None, invoke_without_command=True)
"""`strata devnet`: by itself it runs a node, with a sub-command it speaks to one."""


@devnet.callback()
def start_devnet(  # noqa: PLR0913  # a flag each
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="TOML file with a table [devnet]; flags win.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Port on 127.0.0.1; 0: a free one. Default: 9944.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Keep the chain here; without it, in memory.")
    ] = None,
    block_time_s: Annotated[
        float | None, typer.Option("--block-time", metavar="SECONDS", help="Seconds between blocks. Default: 12.")
    ] = None,
    num_subnets: Annotated[
        int | None, typer.Option("--subnets", metavar="N", min=1, max=128, help="Netuids 1 to N. Default: 1.")
    ] = None,
    tempo: Annotated[
        str | None, typer.Option("--tempo", metavar="BLOCKS", help="Blocks of a subnet's epoch. Default: 20.")
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter of every subnet, raw; again for more."),
    ] = None,
    fund: Annotated[
        list[str] | None, typer.Option("--fund", metavar="ADDRESS=TAO", help="Money at block 0; again for more.")
    ] = None,
) -> None:
    """A development chain for the Bittensor SDK and btcli.

    \b
    strata devnet --block-time 1
    strata devnet --subnets 2 --tempo 40 --set immunity_period=100 --fund 5GrwvaEF...=50
    strata devnet --config devnet.toml --dir chain
    strata devnet status --url ws://127.0.0.1:9944      what it is doing
    strata devnet stall                                 faults on command: see the list below

    Money on it is worth nothing. //Alice has some, and owns every subnet. Try: btcli subnets list -n ws://127.0.0.1:9944
    """
    if ctx.invoked_subcommand is not None:
        return
    from subnet.devnet.config import load_config

    made = load_config(
        user_path(config) if config else None,
        num_subnets=num_subnets,
        hyperparameters=parse_assignments(knobs or [], "--set takes KEY=VALUE, such as tempo=40")
        | ({"tempo": tempo} if tempo else {}),
        funded=parse_assignments(fund or [], "--fund takes ADDRESS=TAO"),
        port=port,
        block_time_s=block_time_s,
        directory=user_path(directory) if directory else None,
    )
    enter("devnet", made)


def yuma(
    scenario: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON: stake by name, and each validator's weights by name.")
    ],
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Epochs of a tempo each.")] = 10,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Also draw pay by epoch (SVG).")] = None,
) -> None:
    """What weights pay each validator and miner on chain.

    \b
    strata yuma weights.json
    strata yuma weights.json --epochs 20 --plot pay.svg

    \b
    weights.json:  {"stake": {"v1": 600, "v2": 400},
                    "weights": {"v1": {"m1": 3, "m2": 1}, "v2": {"m1": 1}}}
    """
    enter("yuma", scenario, epochs, plot)
