"""`strata simulate`: what the knobs of a configuration would pay honest miners and each cheat (trust.md 3, 7).

Runs the scoring code that validators run, and the chain's consensus, over days of virtual time.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from incentives.economy import (
    Economy,
    EconomyReport,
    Population,
    Stake,
    StrategyPay,
    deterrence,
    epochs_to_detect,
    simulate,
)
from incentives.stability import StabilityPoint
from incentives.stability import sweep as stability_sweep
from incentives.strategies import ATTACKS, HONEST, ValidatorKind
from neurons import settings, tables
from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.plots import bars, curves, new_figure, save
from neurons.settings import NodeConfig, user_path
from neurons.tables import Setting
from subnet.errors import InvalidConfig, StartupRefused
from subnet.orchestration.audits import audit_probability
from subnet.types import Record

DAYS = 10.0
ROUNDS = 5
SWEEP_ROUNDS = 2
LIMIT = 0.5
"""Pay of an attack, over honest pay, above which it is pointed out."""
ALIASES = {
    "gamma": "incentives.gamma_hours",
    "t_s": "incentives.sync_period_minutes",
    "p": "audit.probability",
    "ban": "incentives.ban_epochs",
}
"""Short names of the knobs that owners ask about; `miners` and `validators` are no knobs of a run."""
_PERIODS_MINUTES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_GAMMAS_HOURS = (2.5, 5.0, 10.0, 20.0)
_MAX_MINUTES_A_DAY = 24.0 * 60.0
_NUM_SHOWN = 6


class Options(Record, frozen=True):
    """What is simulated beside the knobs."""

    num_miners: Annotated[int, Meta(ge=1, le=4096)] = 32
    """Honest miners; one of each cheat comes on top."""
    num_validators: Annotated[int, Meta(ge=1, le=64)] = 4
    """Honest validators; one that passes, one that fails and one that copies come on top."""
    num_epochs: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """0: ten days' worth."""
    num_rounds: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Repetitions with other draws; 0: 5, and 2 in a sweep."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    sweep: str = ""
    """KEY=V1,V2: one simulation for each value."""
    csv: str = ""
    png: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulation; `value` is what was swept, empty when nothing was."""

    value: str
    economy: Economy
    report: EconomyReport


def economy_of(config: NodeConfig, options: Options) -> Economy:
    """Honest machines, one of each attack, honest validators and one each of those who pass, fail or copy."""
    incentives, audit = config.incentives, config.run.audit
    days = max(1, round(DAYS * _MAX_MINUTES_A_DAY / incentives.sync_period_minutes))
    on_probation = audit_probability(audit, epochs_credited=0 if audit.probation_epochs else 1, is_flagged=False)
    others = (ValidatorKind.PASSING, ValidatorKind.FAILING, ValidatorKind.COPIER)
    return Economy(
        miners=(
            Population(strategy=HONEST, count=options.num_miners),
            *(Population(strategy=attack, count=1) for attack in ATTACKS),
        ),
        validators=(
            *(Stake(kind=ValidatorKind.HONEST, stake=1.0) for _ in range(options.num_validators)),
            *(Stake(kind=kind, stake=options.num_validators / 10) for kind in others),
        ),
        incentives=incentives,
        num_epochs=options.num_epochs or days,
        audit_probability=audit.probability,
        probation_audit_probability=on_probation,
    )


def run_points(flags: Mapping[str, object], options: Options, *, preset: str | None, file: str | None) -> list[Point]:
    """One point, or one for each value of the sweep. Raises InvalidConfig."""
    key, values = parse_sweep(options.sweep)
    rounds = options.num_rounds or (SWEEP_ROUNDS if key else ROUNDS)
    points = []
    for value in values:
        economy = _economy_at(flags, options, key, value, preset=preset, file=file)
        report = simulate(economy, seed=options.seed, num_rounds=rounds)
        points.append(Point(value=value, economy=economy, report=report))
    return points


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """`gamma=5,10,20` as key and values; no key and one empty value for no sweep. Raises InvalidConfig."""
    if not text:
        return "", ("",)
    key, equals, listed = text.partition("=")
    values = tuple(value.strip() for value in listed.split(",") if value.strip())
    if not equals or not values:
        raise InvalidConfig(f"--sweep takes KEY=V1,V2,..., such as gamma=5,10,20, got {text!r}")
    key = key.strip()
    return ALIASES.get(key.lower(), key), values


def _economy_at(
    flags: Mapping[str, object], options: Options, key: str, value: str, *, preset: str | None, file: str | None
) -> Economy:
    typed = dict(flags)
    if key in ("miners", "validators"):
        count = parse_options({f"simulate.num_{key}": value})
        options = msgspec.structs.replace(options, **{f"num_{key}": getattr(count, f"num_{key}")})
    elif key:
        typed[key] = value
    return economy_of(settings.load(typed, preset=preset, file=file), options)


def parse_options(typed: Mapping[str, object]) -> Options:
    """Flags as typed, by key. Raises InvalidConfig."""
    said = {key: Setting(value, "the flags", is_text=True) for key, value in typed.items()}
    return tables.build(Options, said, "simulate.")


def run_simulate(
    typed: Mapping[str, object], knobs: Mapping[str, object], preset: str | None = None, file: str | None = None
) -> int:
    """Print what the knobs pay; returns the exit code. Raises InvalidConfig, StartupRefused."""
    options = parse_options(typed)
    points = run_points(knobs, options, preset=preset, file=file)
    out = console()
    if options.sweep:
        _show_sweep(points, parse_sweep(options.sweep)[0], out)
    else:
        _show(points[0], out)
    if options.csv:
        write_csv(points, parse_sweep(options.sweep)[0], options.csv)
        out.print(f"table written to {options.csv}", markup=False)
    if options.png:
        draw(points, options)
        out.print(f"plots written to {options.png}", markup=False)
    return ExitCode.OK


def _show(point: Point, out: Console) -> None:
    economy, report = point.economy, point.report
    knobs, hours = economy.incentives, economy.incentives.sync_period_minutes / 60.0
    out.print(
        f"{economy.num_epochs} epochs of {knobs.sync_period_minutes:g} minutes ({economy.num_epochs * hours / 24:.1f} days); "
        f"gamma {knobs.gamma_hours:g} h, W {knobs.window_epochs}; audits {economy.audit_probability:g}, on probation "
        f"{economy.probation_audit_probability:g}; ban {knobs.ban_epochs} epochs",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy")
    for column in ("pay", "+-95 %", "net", "compute", "convictions", "found after"):
        table.add_column(column, justify="right")
    for row in report.strategies:
        found = row.epochs_to_detection
        table.add_row(
            row.name,
            f"{row.pay:.3f}",
            f"{row.pay_error:.3f}",
            f"{row.net_pay:.3f}",
            f"{row.cost:.2f}",
            f"{row.convictions:.1f}",
            "" if found is None else f"{found:.0f} epochs, {found * hours:.1f} h",
            style="bold red" if _is_paying(row) else "",
        )
    out.print(table)
    for line in _summary(economy, report):
        out.print(line, markup=False, soft_wrap=True)


def _is_paying(row: StrategyPay) -> bool:
    return row.name != HONEST.name and row.net_pay + row.pay_error >= LIMIT


def _summary(economy: Economy, report: EconomyReport) -> list[str]:
    knobs = economy.incentives
    bound = deterrence(economy.audit_probability, 1.0, window_epochs=knobs.window_epochs, ban_epochs=knobs.ban_epochs)
    dividends = ", ".join(f"{kind} {value:.3f}" for kind, value in report.dividends.items())
    paying = [row.name for row in report.strategies if _is_paying(row)]
    verdict = (
        f"An attack pays at least {LIMIT:g} of honest work: {', '.join(paying)}"
        if paying
        else f"No attack pays {LIMIT:g} of what honest work of the same machine pays."
    )
    return [
        "pay is relative to an honest miner on the same machine; net pays for new hotkeys; compute is what it spends",
        f"false convictions: {report.false_convictions} in {report.honest_audits} audits of honest miners",
        f"an honest miner's pay for the same speed varies by {report.honest_variation:.1%} (coefficient of variation)",
        f"validators, dividends for each unit of stake: {dividends}",
        f"bound for an always-cheater that audits always find (F): {bound:.4f}",
        _detection(economy.audit_probability),
        verdict,
    ]


def _detection(audit_probability: float) -> str:
    half, most = (epochs_to_detect(audit_probability, 1.0, confidence=share) for share in (0.5, 0.95))
    if math.isinf(most):
        return "without audits after probation no always-cheater is found"
    return f"half of them are found within {half:.0f} epochs after probation, 95 % within {most:.0f} (computed)"


def _show_sweep(points: Sequence[Point], key: str, out: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(key)
    for column in ("W", "best attack", "its pay", "+-95 %", "net", "found after", "honest varies", "false convictions"):
        table.add_column(column, justify="right")
    for point in points:
        best = best_attack(point.report)
        table.add_row(
            point.value,
            str(point.economy.incentives.window_epochs),
            best.name,
            f"{best.pay:.3f}",
            f"{best.pay_error:.3f}",
            f"{best.net_pay:.3f}",
            "" if best.epochs_to_detection is None else f"{best.epochs_to_detection:.0f} epochs",
            f"{point.report.honest_variation:.1%}",
            f"{point.report.false_convictions} in {point.report.honest_audits}",
            style="bold red" if _is_paying(best) else "",
        )
    out.print(table)


def best_attack(report: EconomyReport) -> StrategyPay:
    """The attack that nets most."""
    return max((row for row in report.strategies if row.name != HONEST.name), key=lambda row: row.net_pay)


def write_csv(points: Sequence[Point], key: str, path: str) -> None:
    """A row for each value and strategy. Raises StartupRefused when the file cannot be written."""
    head = (
        "key,value,strategy,pay,pay_error,net_pay,cost,convictions,epochs_to_detection,hours_to_detection,"
        "false_convictions,honest_audits,honest_variation"
    )
    rows = [
        (
            key,
            point.value,
            row.name,
            row.pay,
            row.pay_error,
            row.net_pay,
            row.cost,
            row.convictions,
            row.epochs_to_detection,
            None
            if row.epochs_to_detection is None
            else row.epochs_to_detection * point.economy.incentives.sync_period_minutes / 60.0,
            point.report.false_convictions,
            point.report.honest_audits,
            point.report.honest_variation,
        )
        for point in points
        for row in point.report.strategies
    ]
    try:
        with user_path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(head.split(","))
            writer.writerows(rows)
    except OSError as error:
        raise StartupRefused(f"{path} cannot be written: {error.strerror}.", ExitCode.INVALID_CONFIG) from error


def draw(points: Sequence[Point], options: Options) -> None:
    """Pay beside stability. Raises StartupRefused without matplotlib."""
    figure = new_figure(17.0, 5.2)
    pay, decay, period = figure.subplots(1, 3)
    if options.sweep:
        key = parse_sweep(options.sweep)[0]
        curves(pay, _pay_curves(points), x=key, y="pay, of honest pay", title="attacks that pay most")
    else:
        rows = points[0].report.strategies
        bars(pay, [(row.name, row.pay, row.pay_error) for row in rows], x="pay, of honest pay", title="pay by strategy")
    found = stability(points[0].economy, options)
    by_gamma: dict[str, list[tuple[float, float]]] = {}
    by_period: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        by_gamma.setdefault(f"tracked, gamma {one.gamma_hours:g} h", []).append((one.sync_period_minutes, one.tracked))
        by_period.setdefault(f"tracked, T_s {one.sync_period_minutes:g} min", []).append((one.gamma_hours, one.tracked))
    middle = points[0].economy.incentives
    by_gamma["metered"] = [
        (one.sync_period_minutes, one.metered)
        for one in found
        if one.gamma_hours == _nearest(_GAMMAS_HOURS, middle.gamma_hours)
    ]
    by_period["metered"] = [
        (one.gamma_hours, one.metered)
        for one in found
        if one.sync_period_minutes == _nearest(_PERIODS_MINUTES, middle.sync_period_minutes)
    ]
    title = f"variation of pay, {options.num_miners} miners, {options.num_validators} validators"
    curves(decay, by_gamma, x="monitoring time T_s, minutes", y="coefficient of variation", title=title)
    curves(period, by_period, x="decay time gamma, hours", y="coefficient of variation", title="the same, by decay")
    save(figure, options.png)


def stability(economy: Economy, options: Options) -> tuple[StabilityPoint, ...]:
    """Variance of pay over monitoring time and decay (papers.md A4)."""
    return stability_sweep(
        _PERIODS_MINUTES,
        _GAMMAS_HOURS,
        num_miners=options.num_miners,
        num_validators=options.num_validators,
        epoch_variation=economy.volume_noise,
        rng=np.random.default_rng(options.seed),
    )


def _nearest(values: Sequence[float], wanted: float) -> float:
    return min(values, key=lambda value: abs(value - wanted))


def _pay_curves(points: Sequence[Point]) -> dict[str, list[tuple[float, float]]]:
    """Pay by value, of the attacks that pay most anywhere; values that are no numbers are counted."""
    numbers = [_number(point.value) for point in points]
    places = [float(at) if None in numbers else float(number or 0.0) for at, number in enumerate(numbers)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for place, point in zip(places, points, strict=True):
        for row in point.report.strategies:
            if row.name != HONEST.name:
                lines.setdefault(row.name, []).append((place, row.pay))
    best = sorted(lines, key=lambda name: max(pay for _, pay in lines[name]), reverse=True)[:_NUM_SHOWN]
    return {name: lines[name] for name in best}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
