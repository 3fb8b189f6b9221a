"""Commands that read a run's record: whether it is right, why a hotkey earns what it earns, whose shards agree. No key needed."""

from typing import Annotated

import typer

from neurons.commands import enter


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
    acks: Annotated[
        str | None,
        typer.Option("--acks", metavar="FILE", help="Also compare with what a miner was acknowledged: its ack-*.json."),
    ] = None,
) -> None:
    """Recompute every score from the public record; needs no key.

    \b
    strata audit localnet
    strata audit localnet --replay 5
    strata audit localnet --acks localnet/nodes/m1/work
    strata audit https://strata.example.org --netuid 12

    Exit code 0: all equal. 1: not equal, and it says which event.
    """
    enter("audit", target, chain, netuid, as_json, replay, acks)


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
    enter("explain", hotkey, target, chain, netuid)


def clasp(
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ] = "localnet",
    epoch: Annotated[int | None, typer.Option("--epoch", metavar="N", help="As it was seen after epoch N.")] = None,
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Also draw it.")] = None,
) -> None:
    """What each miner adds to the loss of its samples.

    \b
    strata clasp localnet
    strata clasp https://strata.example.org --epoch 12 --png clasp.png

    A miner above its limit is flagged: its work is then audited with certainty, and nothing else follows.
    """
    enter("clasp", target, epoch, png)


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
    enter("agreement", target, epoch, png)


def eval_run(
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ] = "localnet",
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Every figure of stages that trained alone, and the test for leaks.")
    ] = False,
    epoch: Annotated[int | None, typer.Option("--epoch", metavar="N", help="The model after epoch N.")] = None,
    batches: Annotated[int, typer.Option("--batches", metavar="N", min=1, help="Held-out microbatches.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Loss of the published model on held-out text.

    \b
    strata eval localnet
    strata eval localnet --blocks
    strata eval https://strata.example.org --json

    Honest figures, leaky ones marked as such, and what tables of counts come to on the same text.
    Exit code 1: the test for leaks failed.
    """
    enter("eval", target, blocks, epoch, batches, as_json)
