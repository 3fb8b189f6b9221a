"""What the chain says about a node's chances, as findings with remedies; the chain's part of `strata doctor` (users.md 35-40).

Facts are read once (`read_facts`); what follows from them is decided by pure functions.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from bittensor import storage

from neurons.discovery import obstacles_to_pay
from neurons.findings import Finding, Level, Role, problems_first
from subnet.adapters.chain import BittensorChain
from subnet.types import Hotkey, Metagraph, Neuron

_MAX_SKEW_S = 5.0
"""Clocks further apart than this have requests refused: a signature is good for 10 s, and 2 s ahead (btauth/1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """One look at the chain, for one hotkey. Amounts in TAO and alpha, times in blocks."""

    metagraph: Metagraph
    hotkey: Hotkey | None
    is_started: bool
    has_run: bool
    price: float
    balance: float | None
    """Free TAO of the coldkey, None when it is not known."""
    stake_threshold: float
    """Stake that setting weights needs."""
    weights_version: int
    immunity_period: int
    is_commit_reveal: bool
    reveal_period: int
    blocks_to_epoch: int | None
    freeze_window: int
    skew_s: float
    """This machine's time minus the newest block's, less the block time; negative is certainly wrong."""
    block_time_s: float
    flags: str = ""
    """What btcli has to be told besides the netuid: network and wallet, with a space in front."""

    @property
    def neuron(self) -> Neuron | None:
        """The hotkey's neuron, if it is registered."""
        return None if self.hotkey is None else self.metagraph.by_hotkey().get(self.hotkey)

    @property
    def blocks_to_first_pay(self) -> int:
        """Two tempos of work and weights, and those that a reveal adds."""
        return self.metagraph.tempo * (2 + (self.reveal_period if self.is_commit_reveal else 0))


def findings(facts: ChainFacts, role: Role, *, version_key: int) -> list[Finding]:
    """Everything worth saying to this role, problems first."""
    found = [*_about_subnet(facts, role), *_about_clock(facts)]
    if role is Role.OWNER:
        found += [*_about_owner(facts), *_about_knobs(facts), *_about_immunity(facts, role)]
    else:
        found += _about_registration(facts)
    if role is Role.MINER:
        found += _about_immunity(facts, role)
    if role is Role.VALIDATOR:
        found += _about_permit(facts, version_key)
    return problems_first(found)


_OWNERS_REMEDIES = {
    "not_started": "btcli tx start-call --netuid {netuid}{flags}",
    "no_validator": "stake on a validator's hotkey: btcli stake add --netuid {netuid}{flags}",
    "no_weights": "look at the validators' logs, and at the chain: strata chain --netuid {netuid}",
    "burns_all": "lower incentives.burn_share in the run's configuration, or let miners in",
}


def _about_subnet(facts: ChainFacts, role: Role) -> list[Finding]:
    netuid = facts.metagraph.netuid
    found = []
    for code, reason in obstacles_to_pay(facts.metagraph, is_started=facts.is_started).items():
        remedy = "nothing on this machine changes that; ask the subnet's owner"
        if role is Role.OWNER:
            remedy = _OWNERS_REMEDIES[code].format(netuid=netuid, flags=facts.flags)
        is_in_own_hands = role is Role.VALIDATOR and code in ("no_validator", "no_weights")
        found.append(Finding(code, Level.WARNING if is_in_own_hands else Level.PROBLEM, reason, remedy))
    if not facts.has_run:
        text = f"the owner of netuid {netuid} has announced no Strata run"
        found.append(Finding("no_run", Level.PROBLEM, text, "its owner types: strata init-run"))
    return found or [Finding("subnet", Level.OK, f"netuid {netuid} is started and has a run")]


def _about_clock(facts: ChainFacts) -> list[Finding]:
    limit_s = 3 * facts.block_time_s + _MAX_SKEW_S
    if -_MAX_SKEW_S <= facts.skew_s <= limit_s:
        return [Finding("clock", Level.OK, "this machine's clock agrees with the chain's")]
    side = "ahead of" if facts.skew_s > 0 else "behind"
    text = f"this machine's clock is {abs(facts.skew_s):.0f} s {side} the newest block; signed requests will be refused"
    return [Finding("clock_skew", Level.PROBLEM, text, "set the clock by NTP: timedatectl set-ntp true")]


def _about_registration(facts: ChainFacts) -> list[Finding]:
    netuid = facts.metagraph.netuid
    if facts.hotkey is None:
        return [Finding("price", Level.OK, f"registering a hotkey on netuid {netuid} costs {facts.price:.9g} TAO now")]
    if facts.neuron is not None:
        return [Finding("registered", Level.OK, f"the hotkey has uid {facts.neuron.uid} on netuid {netuid}")]
    remedy = f"btcli subnets register --netuid {netuid}{facts.flags}"
    text = f"the hotkey is not registered on netuid {netuid}; that costs {facts.price:.9g} TAO now"
    found = [Finding("not_registered", Level.PROBLEM, text, remedy)]
    if facts.balance is not None and facts.balance <= facts.price:
        text = f"the coldkey has {facts.balance:.9g} TAO, registering costs {facts.price:.9g} and a fee"
        found.append(Finding("balance", Level.PROBLEM, text, "send TAO to the coldkey first"))
    return found


def _about_owner(facts: ChainFacts) -> list[Finding]:
    owner = facts.metagraph.owner_hotkey
    if facts.hotkey in (None, owner):
        return []
    text = f"netuid {facts.metagraph.netuid} belongs to hotkey {owner}, this is {facts.hotkey}"
    return [Finding("not_owner", Level.PROBLEM, text, "name the owner's key with --wallet.name and --wallet.hotkey")]


def _about_immunity(facts: ChainFacts, role: Role) -> list[Finding]:
    """Newcomers that are pruned before their first pay work for nothing (users.md 40)."""
    needed = facts.blocks_to_first_pay
    if facts.immunity_period >= needed:
        return [
            Finding("immunity", Level.OK, f"immune for {facts.immunity_period} blocks, first pay in about {needed}")
        ]
    text = f"the first pay comes after about {needed} blocks, immunity ends after {facts.immunity_period}"
    remedy = "on a full subnet you may be pruned before it; ask the owner to raise immunity_period"
    if role is Role.OWNER:
        remedy = f"raise immunity_period to {needed} or more, or miners leave unpaid: btcli sudo set --help"
    return [Finding("immunity_short", Level.WARNING, text, remedy)]


def _about_permit(facts: ChainFacts, version_key: int) -> list[Finding]:
    """A permit and the stake that weights need are two things (users.md 38)."""
    neuron = facts.neuron
    found = []
    if facts.weights_version > version_key:
        text = f"the subnet takes weights of version key {facts.weights_version} and later, this build is {version_key}"
        found.append(Finding("version_key", Level.PROBLEM, text, "update Strata, then restart the validator"))
    if neuron is None:
        return found
    if not neuron.validator_permit:
        least = min((n.stake for n in facts.metagraph.neurons if n.validator_permit), default=0.0)
        text = f"the hotkey has no validator permit: {neuron.stake:.9g} alpha staked, the last permit has {least:.9g}"
        remedy = f"btcli stake add --netuid {facts.metagraph.netuid}{facts.flags}   then wait for the next epoch"
        found.append(Finding("no_permit", Level.PROBLEM, text, remedy))
    elif neuron.stake < facts.stake_threshold:
        text = (
            f"the permit is there, but weights need {facts.stake_threshold:.9g} staked and there are {neuron.stake:.9g}"
        )
        remedy = f"btcli stake add --netuid {facts.metagraph.netuid}{facts.flags}"
        found.append(Finding("permit_without_stake", Level.PROBLEM, text, remedy))
    else:
        found.append(Finding("permit", Level.OK, f"permit with {neuron.stake:.9g} alpha staked"))
    return found


def _about_knobs(facts: ChainFacts) -> list[Finding]:
    """A knob turned in the frozen last blocks of an epoch is lost (users.md 37)."""
    left = facts.blocks_to_epoch
    if left is None or left >= facts.freeze_window:
        return [Finding("knobs", Level.OK, "hyperparameters can be changed now")]
    wait_s = (left + 1) * facts.block_time_s
    text = f"hyperparameters are frozen: {left} blocks to the epoch, and the last {facts.freeze_window} allow no change"
    return [Finding("knobs_frozen", Level.WARNING, text, f"wait {left + 1} blocks (about {wait_s:.0f} s)")]


async def read_facts(
    chain: BittensorChain, hotkey: Hotkey | None, *, coldkey: str | None, now_s: float, flags: str = ""
) -> ChainFacts:
    """Read what the findings need. Raises NotFound (no such netuid), TransientFailure."""
    metagraph = await chain.fresh_metagraph()
    item = storage.SubtensorModule
    session = chain.session

    def value(name: str, *params: object) -> Awaitable[int]:
        return session.read(name, lambda client: client.query(getattr(item, name), list(params)))

    netuid = chain.netuid
    knobs, status, stamp, threshold, freeze_window, record = await asyncio.gather(
        chain.hyperparameters(),
        session.read("epoch", lambda client: client.epochs.epoch_status(netuid)),
        session.read("time", lambda client: client.timestamp()),
        value("StakeThreshold"),
        value("AdminFreezeWindow"),
        chain.commitment(metagraph.owner_hotkey),
    )
    block_time_s = await session.block_time_s()
    return ChainFacts(
        metagraph=metagraph,
        hotkey=hotkey,
        is_started=await chain.is_started(),
        has_run=record is not None,
        price=await chain.registration_price(),
        balance=None if coldkey is None else await chain.balance(coldkey),
        stake_threshold=int(threshold) / 1e9,
        weights_version=int(knobs["weights_version"]),
        immunity_period=int(knobs["immunity_period"]),
        is_commit_reveal=bool(knobs["commit_reveal_weights_enabled"]),
        reveal_period=int(knobs["commit_reveal_period"]),
        blocks_to_epoch=status["blocks_remaining"],
        freeze_window=int(freeze_window),
        skew_s=now_s - stamp.timestamp() - block_time_s,
        block_time_s=block_time_s,
        flags=flags,
    )
