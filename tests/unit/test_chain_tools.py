"""`strata yuma`: what weights pay, read from a file, as a table and as a plot."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from neurons.chain_tools import Scenario, pay, pay_plot, pay_table, read_scenario, run_yuma
from subnet import yuma
from subnet.errors import InvalidConfig

TWO = Scenario(
    stake={"v1": 600.0, "v2": 400.0},
    weights={"v1": {"m1": 3.0, "m2": 1.0}, "v2": {"m1": 3.0, "m2": 1.0}},
    tempo=100,
)


def written(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"stake": {"v": 1.0}, "weights": {"v": {"m": 1.0}}, **fields}))
    return path


def test_agreeing_validators_share_by_stake_and_miners_by_weight() -> None:
    (paid,) = pay(TWO, epochs=1)
    half = 100 * (1 - yuma.OWNER_CUT / yuma.U16_MAX) / 2
    assert paid.incentive["m1"] == pytest.approx(0.75 * half, rel=1e-6)
    assert paid.dividends["v1"] == pytest.approx(0.6 * half, rel=1e-6)
    assert sum(paid.dividends.values()) + sum(paid.incentive.values()) == pytest.approx(2 * half, rel=1e-8)


def test_weights_may_change_by_epoch_and_bonds_follow_slowly() -> None:
    turned = {"v1": {"m2": 1.0}, "v2": {"m2": 1.0}}
    both = Scenario(stake=TWO.stake, weights=[{"v1": {"m1": 1.0}}, turned], tempo=100)
    first, second, third = pay(both, epochs=3)
    assert first.incentive["m2"] == 0 and second.incentive["m2"] > 0 == second.incentive["m1"]
    assert third.incentive == second.incentive


def test_the_owners_share_is_burned_and_shown_as_such() -> None:
    burning = Scenario(stake={"v": 1.0}, weights={"v": {"owner": 9.0, "m": 1.0}}, burn="owner", tempo=100)
    paid = pay(burning, epochs=2)
    assert paid[-1].incentive["owner"] == 0 and paid[-1].incentive["m"] > 0
    console = Console(width=160, record=True, quiet=True)
    console.print(pay_table(paid, burning))


def test_the_plot_is_an_image_with_a_line_for_each_key() -> None:
    root = ElementTree.fromstring(pay_plot(pay(TWO, epochs=4)))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and all(len(line.attrib["points"].split()) == 4 for line in lines)


def test_a_file_becomes_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_yuma(str(written(tmp_path)), 3, str(tmp_path / "pay.svg")) == 0
    assert "alpha over 3 epochs" in capsys.readouterr().out
    assert (tmp_path / "pay.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stake": {"v": -1.0}}, "stake of v must be a number of at least 0"),
        ({"weights": {"x": {"m": 1.0}}}, "x sets weights and has no stake"),
        ({"weights": {"v": {"m": -1.0}}}, "weight of v for m"),
        ({"tempo": 0}, "tempo must be in 1..50400"),
        ({"kappa": 2.0}, "kappa must be in 0..1"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        read_scenario(written(tmp_path, **fields))


def test_a_missing_file_and_a_bad_count_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_scenario(tmp_path / "none.json")
    with pytest.raises(InvalidConfig, match="--epochs"):
        run_yuma(str(written(tmp_path)), 0, None)
