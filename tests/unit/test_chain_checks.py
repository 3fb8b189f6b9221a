"""The doctor's findings about the chain: each case is told apart, with its remedy."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from neurons.chain_checks import ChainFacts, findings
from neurons.findings import Level, Role
from subnet.types import Hotkey, Metagraph, Neuron, Uid

ME, VALIDATOR, OWNER = Hotkey("me"), Hotkey("validator"), Hotkey("owner")


def neuron(uid: int, hotkey: Hotkey, **fields: Any) -> Neuron:
    made: dict[str, Any] = {
        "uid": Uid(uid),
        "hotkey": hotkey,
        "coldkey": "c",
        "stake": 0.0,
        "validator_permit": False,
        "registered_at_block": 1,
        "last_update_block": 995,
        "is_active": True,
        "incentive": 0.0,
        "dividends": 0.0,
        "emission": 0.0,
    }
    return Neuron(**{**made, **fields})


def facts(**fields: Any) -> ChainFacts:
    """A healthy subnet on which `ME` mines."""
    neurons = (
        neuron(0, OWNER),
        neuron(1, VALIDATOR, validator_permit=True, stake=900.0, dividends=1.0),
        neuron(2, ME, incentive=1.0),
    )
    metagraph = Metagraph(netuid=5, at_block=1_000, owner_hotkey=OWNER, tempo=100, neurons=neurons)
    made: dict[str, Any] = {
        "metagraph": metagraph,
        "hotkey": ME,
        "is_started": True,
        "has_run": True,
        "price": 0.5,
        "balance": 3.0,
        "stake_threshold": 100.0,
        "weights_version": 1,
        "immunity_period": 4_096,
        "is_commit_reveal": True,
        "reveal_period": 1,
        "blocks_to_epoch": 50,
        "freeze_window": 10,
        "skew_s": 1.0,
        "block_time_s": 12.0,
    }
    return ChainFacts(**{**made, **fields})


def with_neuron(base: ChainFacts, hotkey: Hotkey, **fields: Any) -> ChainFacts:
    neurons = tuple(msgspec.structs.replace(n, **fields) if n.hotkey == hotkey else n for n in base.metagraph.neurons)
    return replace(base, metagraph=msgspec.structs.replace(base.metagraph, neurons=neurons))


def problems(base: ChainFacts, role: Role, version_key: int = 1) -> dict[str, str]:
    found = findings(base, role, version_key=version_key)
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return {finding.code: finding.text for finding in found if finding.level is not Level.OK}


def test_a_healthy_miner_hears_of_no_problem() -> None:
    assert problems(facts(), Role.MINER) == {}
    assert {finding.code for finding in findings(facts(), Role.MINER, version_key=1)} == {
        "subnet",
        "clock",
        "registered",
        "immunity",
    }


@pytest.mark.parametrize(
    ("changed", "role", "code", "words"),
    [
        ({"hotkey": Hotkey("new")}, Role.MINER, "not_registered", "costs 0.5 TAO"),
        ({"hotkey": Hotkey("new"), "balance": 0.4}, Role.MINER, "balance", "has 0.4 TAO"),
        ({"is_started": False}, Role.MINER, "not_started", "never started"),
        ({"has_run": False}, Role.MINER, "no_run", "announced no Strata run"),
        ({"immunity_period": 250}, Role.MINER, "immunity_short", "after about 300 blocks"),
        ({"skew_s": -30.0}, Role.MINER, "clock_skew", "30 s behind"),
        ({"skew_s": 90.0}, Role.MINER, "clock_skew", "90 s ahead of"),
        ({"hotkey": ME}, Role.VALIDATOR, "no_permit", "the last permit has 900"),
        ({"hotkey": VALIDATOR, "stake_threshold": 1_000.0}, Role.VALIDATOR, "permit_without_stake", "need 1000"),
        ({"hotkey": VALIDATOR, "weights_version": 2}, Role.VALIDATOR, "version_key", "this build is 1"),
        ({"hotkey": OWNER, "blocks_to_epoch": 4}, Role.OWNER, "knobs_frozen", "4 blocks to the epoch"),
        ({"hotkey": OWNER, "immunity_period": 250}, Role.OWNER, "immunity_short", "ends after 250"),
        ({"hotkey": ME}, Role.OWNER, "not_owner", "belongs to hotkey owner, this is me"),
    ],
)
def test_each_case_is_told_apart(changed: dict[str, Any], role: Role, code: str, words: str) -> None:
    found = problems(facts(**changed), role)
    assert words in found[code]
    assert set(found) <= {code, "not_registered"}


def test_a_subnet_that_burns_everything_is_named() -> None:
    burning = with_neuron(with_neuron(facts(), ME, incentive=0.0), OWNER, incentive=1.0)
    assert "burns" in problems(burning, Role.MINER)["burns_all"]


def test_before_there_is_a_hotkey_the_price_is_told() -> None:
    found = {finding.code: finding.text for finding in findings(facts(hotkey=None), Role.MINER, version_key=1)}
    assert "costs 0.5 TAO now" in found["price"] and "not_registered" not in found


def test_commit_reveal_delays_the_first_pay() -> None:
    assert facts(is_commit_reveal=False).blocks_to_first_pay == 200
    assert facts(reveal_period=3).blocks_to_first_pay == 500
