"""A devnet's configuration: defaults, a TOML document, and mistakes that are named before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from subnet.devnet.config import ALICE, DevnetConfig, SubnetGenesis, config_from_toml, load_config
from subnet.errors import InvalidConfig

DOCUMENT = f"""
[devnet]
block_time_s = 0.25
directory = "/tmp/chain"
finality_lag = 1
[devnet.prefunded]
{ALICE} = 5.0
[[devnet.subnets]]
netuid = 7
name = "seven"
[devnet.subnets.hyperparameters]
tempo = 40
immunity_period = 99
[[devnet.subnets]]
netuid = 8
is_started = false
"""


def test_a_document_becomes_a_configuration() -> None:
    config = config_from_toml(DOCUMENT, "file")
    assert (config.block_time_s, config.directory, config.port) == (0.25, Path("/tmp/chain"), 9_944)
    assert [subnet.netuid for subnet in config.subnets] == [7, 8]
    assert config.subnets[0].hyperparameters == {"tempo": 40, "immunity_period": 99}
    assert not config.subnets[1].is_started and config.prefunded == {ALICE: 5.0}
    assert config_from_toml("", "file") == DevnetConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[devnet]\nblock_tim_s = 1", "devnet.block_tim_s is no setting"),
        ("[[devnet.subnets]]\nnetuid = 1\nowner = 2", "devnet.subnets.owner is no setting"),
        ("[devnet]\nblock_time_s = 'fast'", "Expected `float`"),
        ("[devnet]\nblock_time_s = 0.001", "must be in 0.02..600"),
        ("[[devnet.subnets]]\nnetuid = 1\n[devnet.subnets.hyperparameters]\ntempi = 1", "no 'tempi'; known are"),
        ("[[devnet.subnets]]\nnetuid = 1\n[devnet.subnets.hyperparameters]\ntempo = 70000", "must be in 0..65535"),
        ("[[devnet.subnets]]\nnetuid = 1\nowner_hotkey = 'me'", "is not an SS58 address"),
        ("nonsense", "is no TOML"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        config_from_toml(text, "file")


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70_000},
        {"finality_lag": 65},
        {"kept_blocks": 3},
        {"alice_tao": -1.0},
        {"prefunded": {"nobody": 1.0}},
        {"subnets": (SubnetGenesis(netuid=1), SubnetGenesis(netuid=1))},
    ],
)
def test_values_out_of_range_do_not_start(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"devnet\."):
        DevnetConfig(**fields)
    with pytest.raises(InvalidConfig, match="netuid must be"):
        SubnetGenesis(netuid=0)


def test_what_is_said_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "devnet.toml"
    file.write_text(DOCUMENT)
    config = load_config(file, hyperparameters={"tempo": "50"}, funded={ALICE: "7"}, port=0, block_time_s=None)
    assert [dict(subnet.hyperparameters) for subnet in config.subnets] == [
        {"tempo": 50, "immunity_period": 99},
        {"tempo": 50},
    ]
    assert (config.port, config.block_time_s, config.prefunded) == (0, 0.25, {ALICE: 7.0})
    many = load_config(file, num_subnets=3)
    assert [subnet.netuid for subnet in many.subnets] == [1, 2, 3]
    assert load_config(None) == DevnetConfig()
    with pytest.raises(InvalidConfig, match="tempo must be a number, got 'fast'"):
        load_config(None, hyperparameters={"tempo": "fast"})
    with pytest.raises(InvalidConfig, match="cannot be read"):
        load_config(tmp_path / "none.toml")
