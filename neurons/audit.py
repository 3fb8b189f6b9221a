"""`strata audit`: recompute every score from the public record, and compare it with what validators posted and the chain has."""

import asyncio
from collections.abc import Sequence

import msgspec
from rich.console import Console

from neurons import checks, limit_checks, trust_checks
from neurons.ack_checks import check_acks, read_acks
from neurons.checks import Finding, History, read_history
from neurons.exit_codes import ExitCode
from neurons.local.chain import read_genesis
from neurons.local.plan import Layout
from neurons.local.report import console, findings_table
from neurons.settings import user_path
from neurons.sources import (
    OnChain,
    chain_of_directory,
    chain_of_url,
    is_url,
    layout_of,
    open_record,
    read_sealed,
    stored_segments,
)
from subnet.adapters.auth import KeypairSigner
from subnet.errors import InvalidConfig
from subnet.receipts import KeptAck
from subnet.types import Hotkey, Record

_VERIFY = KeypairSigner.from_uri("//audit").verify
"""Signs nothing; any key can verify."""


class Audit(Record, frozen=True):
    """What `--json` prints."""

    run_id: str
    is_equal: bool
    num_segments: int
    num_events: int
    scores: dict[Hotkey, float]
    weights: dict[Hotkey, float]
    findings: tuple[Finding, ...]
    replays: tuple[str, ...] = ()
    """What each segment that was replayed came to."""


def run_audit(
    target: str,
    chain: str | None = None,
    netuid: int | None = None,
    is_json: bool = False,
    num_replays: int = 0,
    acks: str | None = None,
) -> int:
    """Audit a local subnet's directory or a run's public URL; returns 0 only if all is equal. Raises StartupRefused."""
    kept = read_acks(user_path(acks)) if acks else []
    if is_url(target):
        if num_replays:
            raise InvalidConfig("--replay needs the run's objects: name the directory that holds them, not a URL")
        found = asyncio.run(_audit_url(target, chain, netuid, kept))
    else:
        found = asyncio.run(_audit_directory(layout_of(target), chain, kept))
        if num_replays and found.findings[0].holds:
            found = _with_replays(found, layout_of(target), num_replays)
    out = console()
    if is_json:
        Console(soft_wrap=True, highlight=False).print(msgspec.json.encode(found).decode(), markup=False)
    else:
        _show(found, out)
    return ExitCode.OK if found.is_equal else ExitCode.CHECK_FAILED


def _with_replays(found: Audit, layout: Layout, count: int) -> Audit:
    from neurons.replays import replayed  # torch is loaded only when something is replayed

    finding, lines = replayed(open_record(stored_segments(layout)), layout.runs.parent, count)
    return msgspec.structs.replace(
        found,
        is_equal=found.is_equal and finding.holds is not False,
        findings=(*found.findings, finding),
        replays=tuple(lines),
    )


async def _audit_directory(layout: Layout, chain_url: str | None, acks: Sequence[KeptAck]) -> Audit:
    segments = stored_segments(layout)
    on_chain = await chain_of_directory(layout, chain_url)
    return _judge(segments, read_genesis(layout).owner_hotkey, on_chain, acks)


async def _audit_url(url: str, chain_url: str | None, netuid: int | None, acks: Sequence[KeptAck]) -> Audit:
    on_chain = await chain_of_url(chain_url, netuid)
    segments = await read_sealed(url, on_chain.discovery)
    return _judge(segments, on_chain.metagraph.owner_hotkey, on_chain, acks)


def _judge(segments: list[bytes], owner: Hotkey, on_chain: OnChain, acks: Sequence[KeptAck]) -> Audit:
    history, whole = read_history(segments, owner=owner)
    findings = [whole]
    if whole.holds:
        findings += _compared(history, on_chain)
        if acks:
            findings.append(check_acks(history, acks, _VERIFY))
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
    return [
        checks.check_invariants(history),
        checks.check_verdicts(history, _VERIFY),
        checks.check_outcomes(history),
        checks.check_commit_roots(history),
        trust_checks.check_audit_draws(history),
        limit_checks.check_limits(history),
        trust_checks.check_flags(history, _VERIFY),
        trust_checks.check_shard_audits(history),
        checks.check_posted(history),
        checks.check_roots(history, on_chain.discovery),
        checks.check_weights(history, on_chain.metagraph, on_chain.weights, names={}),
    ]


def _show(found: Audit, out: Console) -> None:
    out.print(f"Run {found.run_id}: {found.num_segments} segments, {found.num_events} events", markup=False)
    out.print(findings_table(found.findings))
    for line in found.replays:
        out.print(f"  replayed {line}", markup=False)
    for hotkey, weight in found.weights.items():
        out.print(f"  {hotkey}  score {found.scores.get(hotkey, 0.0):10.3f}  weight {weight:.4%}", markup=False)
    first = next((finding for finding in found.findings if finding.holds is False), None)
    if first is None:
        out.print("Equal: every score and weight follows from the record, and the chain has them.", style="bold green")
    else:
        out.print(f"NOT equal: {first.name}: {first.detail}", style="bold red", markup=False)
