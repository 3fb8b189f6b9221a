"""What an owner sees of other knobs: as numbers, as a table in a file, as a picture."""

import csv
from pathlib import Path

import pytest

from incentives.stability import StabilityPoint
from incentives.strategies import ATTACKS
from neurons import settings
from neurons.exit_codes import ExitCode
from neurons.simulate import (
    Options,
    best_attack,
    economy_of,
    parse_options,
    parse_sweep,
    run_points,
    run_simulate,
    stability,
    write_csv,
)
from subnet.errors import InvalidConfig, StartupRefused

QUICK = Options(num_miners=4, num_validators=2, num_epochs=60, num_rounds=2)
FEW = {"simulate.num_epochs": "30", "simulate.num_rounds": "1", "simulate.num_miners": "4"}
NOTHING: dict[str, str] = {}


def test_the_economy_takes_its_knobs_from_the_configuration() -> None:
    knobs = {"incentives.gamma_hours": 5.0, "audit.probability": 0.02, "incentives.ban_epochs": 7}
    economy = economy_of(settings.load(knobs, preset="mainnet", environment=NOTHING), Options())
    assert economy.incentives.window_epochs == 15
    assert (economy.audit_probability, economy.probation_audit_probability) == (0.02, 0.5)
    assert economy.incentives.ban_epochs == 7
    assert economy.num_epochs == 720, "ten days of twenty minutes"
    assert [population.count for population in economy.miners] == [32, *[1] * len(ATTACKS)]
    local = economy_of(settings.load({}, preset="local", environment=NOTHING), QUICK)
    assert (local.probation_audit_probability, local.num_epochs) == (1.0, 60), "no probation, audited always"


def test_a_sweep_runs_each_value_and_more_audits_pay_cheats_less() -> None:
    options = parse_options(FEW | {"simulate.sweep": "p=0,0.3", "simulate.num_epochs": "150"})
    without, with_audits = run_points({"audit.probation_epochs": "0"}, options, preset="mainnet", file=None)
    assert (without.value, with_audits.economy.audit_probability) == ("0", 0.3)
    assert best_attack(without.report).net_pay > 1.0 > 0.5 > best_attack(with_audits.report).pay
    assert with_audits.report.false_convictions == 0


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("gamma=5,10", "incentives.gamma_hours", ("5", "10")),
        ("T_s = 10, 20", "incentives.sync_period_minutes", ("10", "20")),
        ("miners=3", "miners", ("3",)),
        ("incentives.decay=step,exponential", "incentives.decay", ("step", "exponential")),
        ("", "", ("",)),
    ],
)
def test_a_sweep_is_read(text: str, key: str, values: tuple[str, ...]) -> None:
    assert parse_sweep(text) == (key, values)


@pytest.mark.parametrize("text", ["gamma", "gamma=", "gamma=,"])
def test_a_sweep_without_values_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="such as gamma=5,10,20"):
        parse_sweep(text)


def test_numbers_of_miners_and_validators_are_swept_too() -> None:
    for key in ("miners", "validators"):
        first, second = run_points(
            {}, parse_options(FEW | {"simulate.sweep": f"{key}=1,3"}), preset="mainnet", file=None
        )
        assert len(first.economy.validators) + 2 * (key == "validators") == len(second.economy.validators)
        assert first.economy.miners[0].count + 2 * (key == "miners") == second.economy.miners[0].count
    with pytest.raises(InvalidConfig, match="num_miners"):
        run_points({}, parse_options(FEW | {"simulate.sweep": "miners=x"}), preset="mainnet", file=None)
    with pytest.raises(InvalidConfig, match="num_rounds"):
        parse_options({"simulate.num_rounds": "-1"})


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "a.csv", tmp_path / "a.png"
    files = {"simulate.csv": str(table), "simulate.png": str(picture)}
    assert run_simulate(FEW | files, {}, "mainnet") == ExitCode.OK
    shown = capsys.readouterr().out
    assert "false convictions: 0 in" in shown
    assert "No attack pays 0.5 of what honest work of the same machine pays." in shown
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["strategy"] for row in rows] == ["honest", *(attack.name for attack in ATTACKS)]
    assert float(rows[0]["pay"]) == pytest.approx(1.0, abs=0.05)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_prints_a_row_for_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"simulate.csv": str(tmp_path / "a.csv"), "simulate.png": str(tmp_path / "a.png")}
    swept = FEW | files | {"simulate.sweep": "incentives.decay=step,exponential"}
    assert run_simulate(swept, {}, "mainnet") == ExitCode.OK
    shown = capsys.readouterr().out
    assert "step " in shown and "exponential " in shown
    assert {row["value"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())} == {
        "step",
        "exponential",
    }


def test_an_attack_that_pays_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(FEW, {"audit.probability": "0", "audit.probation_epochs": "0"}, "mainnet") == ExitCode.OK
    shown = capsys.readouterr().out
    assert "An attack pays at least 0.5 of honest work: identity stage" in shown
    assert "without audits after probation no always-cheater is found" in shown


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupRefused, match="cannot be written"):
        write_csv([], "", str(tmp_path / "no" / "a.csv"))


def test_stability_falls_with_decay_time_and_rises_with_monitoring_time() -> None:
    economy = economy_of(settings.load({}, preset="mainnet", environment=NOTHING), QUICK)
    found = {(point.sync_period_minutes, point.gamma_hours): point for point in stability(economy, QUICK)}
    assert all(isinstance(point, StabilityPoint) and point.metered < point.tracked for point in found.values())
    assert found[20.0, 10.0].tracked < found[40.0, 10.0].tracked
    assert found[20.0, 20.0].tracked < found[20.0, 10.0].tracked
