"""The live picture of a local subnet in a terminal."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from neurons.local.supervisor import ProcessNote
from neurons.local.watch import Snapshot
from subnet.dashboard.views import MinerView, RunView
from subnet.types import Hotkey

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60
_NUM_NEWS = 8
_OUTCOME_STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "": "dim"}


def screen(
    snapshot: Snapshot,
    *,
    names: Mapping[Hotkey, str],
    processes: Sequence[ProcessNote],
    news: Sequence[str],
    unigram: float | None,
) -> RenderableType:
    """Everything at once; what is not known yet is left out."""
    parts: list[RenderableType] = [_headline(snapshot)]
    if snapshot.run is not None:
        parts += [_stages(snapshot.run, names, processes), _losses(snapshot, unigram), _audits(snapshot.run, names)]
    if snapshot.metagraph is not None and any(snapshot.weights.values()):
        parts.append(_chain(snapshot, names))
    recent = Text("\n".join(news[-_NUM_NEWS:]), style="dim")
    parts.append(Panel(recent, title="news", title_align="left", border_style="dim"))
    return Group(*parts)


def _headline(snapshot: Snapshot) -> Text:
    run = snapshot.run
    line = Text()
    if run is None:
        return line.append("starting ...", style="bold")
    if snapshot.is_stale:
        line.append("the orchestrator does not answer, last seen in ", style="bold red")
    line.append(f"epoch {run.epoch}  {run.phase.value}", style="bold")
    left_s = run.phase_deadline_s - snapshot.at_s
    line.append(f"  {snapshot.at_s - run.phase_since_s:.0f} s, at most {max(0.0, left_s):.0f} s more")
    line.append(f"   samples {run.num_samples - run.num_open_samples} done, {run.num_open_samples} open")
    line.append(f"   ledger {run.num_ledger_entries} events, {run.sealed_segments} segments")
    if snapshot.metagraph is not None:
        line.append(f"   block {snapshot.metagraph.at_block}")
    return line


def _stages(run: RunView, names: Mapping[Hotkey, str], processes: Sequence[ProcessNote]) -> Table:
    table = Table(expand=True, box=None, pad_edge=False)
    restarts = {note.hotkey: note.restarts for note in processes}
    columns = [[miner for miner in run.miners if miner.stage == stage.stage] for stage in run.stages]
    for stage in run.stages:
        merged = f"  merged {stage.num_accepted}/{stage.num_shards}" if stage.num_shards else ""
        took = f"  took up {stage.num_merged}/{stage.num_assigned}" if stage.num_assigned else ""
        table.add_column(f"stage {stage.stage}{took}{merged}", header_style="bold cyan")
    for row in range(max((len(column) for column in columns), default=0)):
        cells = [_miner(column[row], names, restarts) if row < len(column) else Text() for column in columns]
        table.add_row(*cells)
    return table


def _miner(miner: MinerView, names: Mapping[Hotkey, str], restarts: Mapping[Hotkey, int]) -> Text:
    text = Text(f"{names.get(miner.hotkey, miner.hotkey[:8]):<4} {miner.units:>4} units")
    if miner.banned_until >= 0:
        return text.append(f"  banned until epoch {miner.banned_until}", style="bold red")
    if not miner.is_live:
        text.append("  silent", style="yellow")
    elif not miner.is_in_roster:
        text.append("  next epoch", style="dim")
    done = [word for word, is_so in (("committed", miner.has_committed), ("uploaded", miner.has_uploaded)) if is_so]
    text.append(f"  {' '.join(done[-1:])}", style="green")
    if restarts.get(miner.hotkey):
        text.append(f"  restarted {restarts[miner.hotkey]}x", style="yellow")
    return text


def _losses(snapshot: Snapshot, unigram: float | None) -> Text:
    text = Text("loss ", style="bold")
    if snapshot.losses:
        text.append(curve(snapshot.losses, _CURVE_WIDTH), style="cyan")
        text.append(f" {snapshot.losses[-1]:.3f}\n", style="bold")
    evaluations = [view for view in (snapshot.run.evaluations if snapshot.run else ()) if view.loss is not None]
    for view in evaluations:
        share = f" ({view.loss / unigram:.2f})" if unigram and view.loss is not None else ""
        text.append(f"  e{view.epoch} {view.loss:.3f}{share}")
    if evaluations and unigram:
        text.append(f"   held-out, of unigram {unigram:.3f}", style="dim")
    return text


def curve(values: Sequence[float], width: int) -> str:
    """The newest `width` values as a line of bars, lowest to highest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def _audits(run: RunView, names: Mapping[Hotkey, str]) -> Text:
    text = Text("audits ", style="bold")
    for audit in run.audits:
        who = f"e{audit.epoch} {names.get(audit.hotkey, audit.hotkey[:8])} "
        text.append(who + (audit.outcome or ("replaying" if audit.is_answered else "asked")) + "  ")
        text.stylize(_OUTCOME_STYLES.get(audit.outcome, ""), len(text) - len(audit.outcome) - 2)
    newest = max((flag.epoch for flag in run.flags), default=None)
    for flag in [flag for flag in run.flags if flag.epoch == newest]:
        who = names.get(flag.hotkey, flag.hotkey[:8])
        text.append(f"\nflag   e{flag.epoch} {who} loses {flag.effect:+.3f} nats (z {flag.z:.1f})", style="yellow")
    return text


def _chain(snapshot: Snapshot, names: Mapping[Hotkey, str]) -> Table:
    metagraph = snapshot.metagraph
    neurons = metagraph.neurons if metagraph else ()
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold magenta")
    table.add_column("on chain")
    validators = [hotkey for hotkey, row in snapshot.weights.items() if row]
    # by role, not by permit: whoever earns soon holds stake enough for one
    others = {*(snapshot.run.validators if snapshot.run else ()), metagraph.owner_hotkey if metagraph else None}
    paid = [neuron for neuron in neurons if neuron.hotkey in names and neuron.hotkey not in others]
    for neuron in paid:
        table.add_column(names[neuron.hotkey], justify="right")
    for validator in validators:
        row, total = snapshot.weights[validator], sum(snapshot.weights[validator].values())
        cells = [f"{row.get(neuron.uid, 0) / total:.1%}" for neuron in paid]
        table.add_row(f"weights of {names.get(validator, validator[:8])}", *cells)
    table.add_row("earned, alpha", *(f"{neuron.stake:.2f}" for neuron in paid))
    return table


def clock_line(line: str) -> str:
    """A line with the time in front."""
    return f"{time.strftime('%H:%M:%S')}  {line}"
