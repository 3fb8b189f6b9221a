"""`strata devnet`: the development chain node as a process, what it is doing, and faults on command."""

import asyncio
import json
from typing import Annotated, Any

import typer
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from neurons.exit_codes import ExitCode
from neurons.lifecycle import Stop, run_role
from subnet.devnet.config import DevnetConfig
from subnet.devnet.node import Node
from subnet.errors import StartupRefused

_ANSWER_TIMEOUT_S = 10.0
_DEFAULT_URL = "ws://127.0.0.1:9944"

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The node's websocket.")]

commands = typer.Typer(
    help="What a running devnet is doing, and faults on command.", no_args_is_help=True, rich_markup_mode=None
)
"""Sub-commands of `strata devnet`, beside running one."""


def run_devnet(config: DevnetConfig) -> int:
    """Serve a chain until told to stop; returns the exit code."""

    async def serve(stop: Stop) -> None:
        async with Node(config).running() as node:
            print(f"devnet listens on {node.url}; try: btcli subnets list -n {node.url}", flush=True)  # noqa: T201  # the answer
            await stop.wait()

    return run_role(serve, role="devnet")


async def ask(url: str, method: str, *params: Any) -> Any:
    """One JSON-RPC call to a devnet. Raises StartupRefused when it does not answer, or answers with an error."""
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S), connect(url, compression=None) as socket:
            await socket.send(request)
            answer = json.loads(await socket.recv())
    except (OSError, TimeoutError, WebSocketException, json.JSONDecodeError) as error:
        reason = f"no devnet answers on {url} ({error}).\nStart one with: strata devnet   or name another with --url."
        raise StartupRefused(reason, ExitCode.CHAIN_UNREACHABLE) from error
    if "error" in answer:
        raise StartupRefused(f"the devnet refused {method}: {answer['error']['message']}", ExitCode.REFUSED)
    return answer["result"]


def _show(url: str, method: str, *params: Any) -> None:
    answer = asyncio.run(ask(url, method, *params))
    if isinstance(answer, dict):
        for name, value in answer.items():
            print(f"{name:>20}  {value}")  # noqa: T201  # the answer
    else:
        print(answer)  # noqa: T201  # the answer


@commands.command()
def status(url: Url = _DEFAULT_URL) -> None:
    """Block, finality, subnets, waiting transactions, connections."""
    _show(url, "devnet_status")


@commands.command()
def drop(url: Url = _DEFAULT_URL) -> None:
    """Cut every connection without a goodbye."""
    _show(url, "devnet_drop")


@commands.command()
def stall(
    url: Url = _DEFAULT_URL, end: Annotated[bool, typer.Option("--end", help="Make blocks again.")] = False
) -> None:
    """Stop making blocks; everything else goes on.

    \b
    strata devnet stall
    strata devnet stall --end
    """
    _show(url, "devnet_stall", not end)


@commands.command()
def freeze(url: Url = _DEFAULT_URL, end: Annotated[bool, typer.Option("--end", help="Answer again.")] = False) -> None:
    """Leave sockets open and say nothing more on them."""
    _show(url, "devnet_freeze", not end)


@commands.command()
def lossy(url: Url = _DEFAULT_URL, end: Annotated[bool, typer.Option("--end", help="Stop it.")] = False) -> None:
    """Take transactions, then drop the connection that sent them."""
    _show(url, "devnet_loseSubmissions", not end)


@commands.command()
def fail(
    method: Annotated[str, typer.Argument(help="JSON-RPC method, e.g. author_submitAndWatchExtrinsic.")],
    data: Annotated[str, typer.Argument(help="Reason, e.g. 'Transaction is outdated'.")],
    url: Url = _DEFAULT_URL,
    code: Annotated[int, typer.Option("--code", help="Error code.")] = 1010,
    message: Annotated[str, typer.Option("--message", help="Error message.")] = "Invalid Transaction",
    count: Annotated[int, typer.Option("--count", min=1, help="How often.")] = 1,
) -> None:
    """Answer the next calls of a method with an error.

    \b
    strata devnet fail author_submitAndWatchExtrinsic "Transaction is outdated" --count 2
    """
    _show(url, "devnet_failNext", method, code, message, data, count)


@commands.command()
def finality(blocks: Annotated[int, typer.Argument(metavar="BLOCKS", min=0, max=64)], url: Url = _DEFAULT_URL) -> None:
    """Set how many blocks finality stays behind."""
    _show(url, "devnet_setFinalityLag", blocks)


@commands.command()
def reorg(blocks: Annotated[int, typer.Argument(metavar="BLOCKS", min=1, max=64)], url: Url = _DEFAULT_URL) -> None:
    """Undo blocks that are not final; others take their place."""
    _show(url, "devnet_reorg", blocks)


@commands.command()
def upgrade(url: Url = _DEFAULT_URL) -> None:
    """Raise the runtime's spec version, as a runtime upgrade does."""
    _show(url, "devnet_upgrade")
