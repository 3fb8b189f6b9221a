"""`strata audit`: recompute every score from the public record, and compare it with what validators posted and the chain has."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from neurons import checks
from neurons.checks import Finding, History, read_history
from neurons.exit_codes import ExitCode
from neurons.local.chain import devnet_config, open_chain, read_genesis
from neurons.local.plan import Layout
from neurons.local.report import console, findings_table
from neurons.scoring import SEGMENT_LIMIT_BYTES, parse_discovery
from neurons.settings import load
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.chain import BittensorChain
from subnet.adapters.http_client import open_session
from subnet.adapters.public import HttpPublic
from subnet.devnet.journal import FILE_NAME
from subnet.devnet.node import Node
from subnet.errors import NotFound, ProtocolViolation, StartupRefused, TransientFailure
from subnet.types import Hotkey, Metagraph, Record, Uid


class Audit(Record, frozen=True):
    """What `--json` prints."""

    run_id: str
    is_equal: bool
    num_segments: int
    num_events: int
    scores: dict[Hotkey, float]
    weights: dict[Hotkey, float]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChain:
    """What the chain says of a run."""

    metagraph: Metagraph
    discovery: wire.Discovery
    weights: dict[Hotkey, dict[Uid, int]]


def run_audit(target: str, chain: str | None = None, netuid: int | None = None, is_json: bool = False) -> int:
    """Audit a local subnet's directory or a run's public URL; returns 0 only if all is equal. Raises StartupRefused."""
    if target.startswith(("http://", "https://")):
        found = asyncio.run(_audit_url(target, chain, netuid))
    else:
        found = asyncio.run(_audit_directory(Layout(Path(target).expanduser().resolve()), chain))
    out = console()
    if is_json:
        Console(soft_wrap=True, highlight=False).print(msgspec.json.encode(found).decode(), markup=False)
    else:
        _show(found, out)
    return ExitCode.OK if found.is_equal else ExitCode.CHECK_FAILED


async def _audit_directory(layout: Layout, chain_url: str | None) -> Audit:
    genesis = read_genesis(layout)
    segments = _stored_segments(layout)
    async with _chain_of(layout, chain_url) as url:
        chain = open_chain(url, netuid=genesis.netuid)
        try:
            on_chain = await _read_chain(chain)
        finally:
            await chain.close()
    return _judge(segments, genesis.owner_hotkey, on_chain)


async def _audit_url(url: str, chain_url: str | None, netuid: int | None) -> Audit:
    """The subnet is named as for every other command: by flags, or by the variables of the ecosystem."""
    flags = {"node.chain_endpoint": chain_url, "node.netuid": netuid}
    node = load({key: value for key, value in flags.items() if value is not None}).node
    if node.netuid == 0:
        raise StartupRefused(
            "which subnet does this run belong to? Name it with --netuid N, and its chain with --chain URL.",
            ExitCode.INVALID_CONFIG,
        )
    chain = open_chain(node.endpoint, netuid=node.netuid)
    try:
        on_chain = await _read_chain(chain)
    finally:
        await chain.close()
    async with open_session() as http:
        public = HttpPublic(http, url)
        try:
            segments = [
                await public.read(f"ledger/{index}", limit_bytes=SEGMENT_LIMIT_BYTES)
                for index in range(on_chain.discovery.n)
            ]
        except (NotFound, TransientFailure, ProtocolViolation) as error:
            raise StartupRefused(
                f"the record cannot be read from {url}: {error}.\n"
                f"The owner's record on chain names {on_chain.discovery.u}",
                ExitCode.UNAVAILABLE,
            ) from error
    return _judge(segments, on_chain.metagraph.owner_hotkey, on_chain)


def _stored_segments(layout: Layout) -> list[bytes]:
    """Sealed segments in order. Raises StartupRefused when there are none."""
    files = sorted(layout.runs.glob("*/ledger/*")) if layout.runs.is_dir() else []
    if not files:
        raise StartupRefused(
            f"{layout.root} has no sealed segment yet: a run's first epoch must end before there is something to check.",
            ExitCode.CHECK_FAILED,
        )
    return [path.read_bytes() for path in files]


@asynccontextmanager
async def _chain_of(layout: Layout, chain_url: str | None) -> AsyncIterator[str]:
    """The chain that was named, else the directory's own, opened from a copy and standing still."""
    if chain_url is not None:
        yield chain_url
        return
    file = layout.chain / FILE_NAME
    if not file.exists():
        raise StartupRefused(f"{file} is missing; name the chain with --chain URL.", ExitCode.DAMAGED_STATE)
    with tempfile.TemporaryDirectory(prefix="strata-audit-") as copy:
        shutil.copyfile(file, Path(copy) / FILE_NAME)
        node = Node(devnet_config(read_genesis(layout), directory=Path(copy), port=0))
        node.faults.is_stalled = True  # nothing happens on it any more: what is read is how the run ended
        async with node.running():
            yield node.url


async def _read_chain(chain: BittensorChain) -> OnChain:
    try:
        metagraph = await chain.fresh_metagraph()
        discovery = parse_discovery(await chain.commitment(metagraph.owner_hotkey))
        validators = [neuron.hotkey for neuron in metagraph.neurons if neuron.validator_permit]
        weights = {hotkey: await chain.weights(hotkey) for hotkey in validators}
    except TransientFailure as error:
        raise StartupRefused(
            f"the chain cannot be reached: {error}.\nCheck --chain and the connection.", ExitCode.CHAIN_UNREACHABLE
        ) from error
    except NotFound as error:
        raise StartupRefused(f"{error}.", ExitCode.NO_RUN) from error
    except ProtocolViolation as error:
        raise StartupRefused(f"what the owner committed is no Strata record: {error}.", ExitCode.NO_RUN) from error
    return OnChain(metagraph=metagraph, discovery=discovery, weights=weights)


def _judge(segments: list[bytes], owner: Hotkey, on_chain: OnChain) -> Audit:
    history, whole = read_history(segments, owner=owner)
    findings = [whole]
    if whole.holds:
        findings += _compared(history, on_chain)
    created = history.record.accounts.created
    return Audit(
        run_id=created.run_id if created else on_chain.discovery.r,
        is_equal=all(finding.holds is not False for finding in findings),
        num_segments=history.record.num_segments,
        num_events=len(history.record.entries),
        scores={hotkey: score.score for hotkey, score in history.final_scores().items()},
        weights=history.final_weights(),
        findings=tuple(findings),
    )


def _compared(history: History, on_chain: OnChain) -> list[Finding]:
    verify = KeypairSigner.from_uri("//audit").verify  # signs nothing; any key can verify
    return [
        checks.check_invariants(history),
        checks.check_verdicts(history, verify),
        checks.check_commit_roots(history),
        checks.check_posted(history),
        checks.check_roots(history, on_chain.discovery),
        checks.check_weights(history, on_chain.metagraph, on_chain.weights, names={}),
    ]


def _show(found: Audit, out: Console) -> None:
    out.print(f"Run {found.run_id}: {found.num_segments} segments, {found.num_events} events", markup=False)
    out.print(findings_table(found.findings))
    for hotkey, weight in found.weights.items():
        out.print(f"  {hotkey}  score {found.scores.get(hotkey, 0.0):10.3f}  weight {weight:.4%}", markup=False)
    first = next((finding for finding in found.findings if finding.holds is False), None)
    if first is None:
        out.print("Equal: every score and weight follows from the record, and the chain has them.", style="bold green")
    else:
        out.print(f"NOT equal: {first.name}: {first.detail}", style="bold red", markup=False)
