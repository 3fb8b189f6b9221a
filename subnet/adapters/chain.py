"""The chain through the Bittensor SDK (ports.Chain): metagraph, commitments, weights, axon (chain.md)."""

import asyncio
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bittensor as bt
from bittensor.intents import ServeAxon, SetWeights

from subnet.adapters.chain_session import ChainLimits, ChainSession
from subnet.adapters.commitment_fields import from_fields, to_fields
from subnet.adapters.weights_alert import WeightsAlert, WeightsAlerts
from subnet.adapters.weights_conform import ConformedWeights, WeightRules, conform
from subnet.adapters.weights_memory import WeightsMemory
from subnet.errors import NotFound, Refused, TransientFailure
from subnet.types import Endpoint, Hotkey, Metagraph, Neuron, Uid

log = logging.getLogger(__name__)

_STORAGE = bt.storage.SubtensorModule
_EPOCH_MARGIN_BLOCKS = 2
"""Weights are not sent so shortly before an epoch: whether they count for it would be chance."""


class BittensorChain:
    """One subnet as one key sees it.

    `wallet` is a bittensor Wallet or Keypair that signs as the hotkey; None reads only. `version_key` is this build's
    own, never the chain's: the chain's tells which builds it still takes. `lock_directory` is shared by all processes
    of this machine that sign with the same key: one transaction at a time, and what was last committed.
    """

    def __init__(
        self,
        network: str,
        netuid: int,
        wallet: Any | None = None,
        *,
        version_key: int = 0,
        fallback_endpoints: Sequence[str] | None = None,
        limits: ChainLimits | None = None,
        lock_directory: Path | None = None,
    ) -> None:
        self.session = ChainSession(network, fallback_endpoints, limits or ChainLimits(), lock_directory)
        self.netuid = netuid
        self._wallet: Any = wallet
        self._version_key = version_key
        self._cached: tuple[float, Metagraph] | None = None
        self._alerts: WeightsAlerts | None = None
        self.last_conformed: ConformedWeights | None = None
        self.last_weights_block: int | None = None
        self.num_weights_failed = 0

    async def close(self) -> None:
        """Close the connection."""
        await self.session.close()

    async def block(self) -> int:
        """Number of the newest block."""
        return await self.session.block()

    async def block_hash(self, number: int) -> str | None:
        """Hex hash of the finalized block `number`, None while it is not final yet."""
        return await self.session.block_hash(number)

    async def metagraph(self) -> Metagraph:
        """The subnet now, at most `metagraph_max_age_s` old. Raises NotFound when the netuid does not exist."""
        now = asyncio.get_running_loop().time()
        if self._cached is not None and now - self._cached[0] < self.session.limits.metagraph_max_age_s:
            return self._cached[1]
        metagraph = await self.fresh_metagraph()
        self._cached = (now, metagraph)
        return metagraph

    async def fresh_metagraph(self) -> Metagraph:
        """The subnet now, past any cache. Raises NotFound when the netuid does not exist."""
        graph = await self.session.read(
            "metagraph", lambda client: client.subnets.metagraph(self.netuid, commitments=False)
        )
        if graph is None:
            raise NotFound(f"netuid {self.netuid} does not exist on {self.session.network}")
        return Metagraph(
            netuid=self.netuid,
            at_block=graph.block,
            owner_hotkey=Hotkey(graph.owner_hotkey),
            tempo=graph.tempo,
            neurons=tuple(_neuron(neuron) for neuron in graph.neurons),
        )

    async def commitment(self, hotkey: Hotkey) -> bytes | None:
        """The record `hotkey` committed on this subnet, or None."""
        found = await self._commitment(hotkey)
        return None if found is None else found[1]

    async def commit(self, data: bytes) -> int:
        """Put `data` into this key's commitment slot; returns the block that includes it.

        A record that is there already is not sent again. Raises TransientFailure, Refused.
        """
        fields = to_fields(data)
        hotkey = self._hotkey()

        async def landed() -> int | None:
            found = await self._commitment(hotkey)
            return found[0] if found is not None and found[1] == data else None

        block = await landed()
        if block is not None:
            return block
        call = bt.calls.Commitments.set_commitment(netuid=self.netuid, info={"fields": fields})

        async def send(client: bt.Client) -> bt.ExtrinsicResult:
            return await client.submit_call(call, self._wallet, signer="hotkey")

        return await self.session.submit("commitment", send, landed, key=hotkey)

    async def set_weights(self, weights: Mapping[Hotkey, float]) -> int:
        """Post weights at the right moment of the tempo; returns the block.

        Maps to uids against one metagraph, drops keys that are not registered or re-registered, verifies by reading
        back. What this tempo already has is not sent again. Raises Refused (with the chain's reason), TransientFailure.
        """
        return await self.set_weights_of(weights, registered_at=None)

    async def set_weights_of(
        self, weights: Mapping[Hotkey, float], *, registered_at: Mapping[Hotkey, int] | None
    ) -> int:
        """As `set_weights`, for scores that belong to given registrations: a key registered anew inherits none."""
        alerts = self._alerts_of(self._hotkey())
        try:
            block = await self._set_weights(weights, registered_at)
        except (Refused, TransientFailure, NotFound) as error:
            self.num_weights_failed += 1
            alerts.put(error)
            raise
        alerts.clear()
        self.last_weights_block = block
        return block

    @property
    def weights_alert(self) -> WeightsAlert | None:
        """Why this key's weights are not set, None while nothing is wrong."""
        return None if self._wallet is None else self._alerts_of(self._hotkey()).current

    async def _set_weights(self, weights: Mapping[Hotkey, float], registered_at: Mapping[Hotkey, int] | None) -> int:
        hotkey = self._hotkey()
        await self._wait_for_window(hotkey)
        metagraph = await self.fresh_metagraph()
        rules = await self._rules(registered_at)
        conformed = self.last_conformed = conform(weights, metagraph, rules)
        if conformed.rounded_to_zero:
            num_zeros = len(conformed.rounded_to_zero)
            log.warning("weights round to zero", extra={"num_hotkeys": num_zeros, "hotkeys": conformed.rounded_to_zero})
        await self._require_right(metagraph, hotkey, conformed.values)
        before = await self._last_update(hotkey)
        if await self._is_set_already(hotkey, conformed.values, before):
            return before
        uids = [int(uid) for uid in conformed.values]
        values = [float(value) for value in conformed.values.values()]
        intent = SetWeights(netuid=self.netuid, uids=uids, weights=values, version_key=self._version_key)

        async def send(client: bt.Client) -> bt.ExtrinsicResult:
            return await client.execute(intent, self._wallet)

        async def landed() -> int | None:
            return await self._weights_landed(hotkey, conformed.values, before)

        block = await self.session.submit("weights", send, landed, key=hotkey)
        self._memory(hotkey).remember(conformed.values, at_block=block)
        return block

    async def weights(self, hotkey: Hotkey) -> dict[Uid, int]:
        """The u16 weights that `hotkey` has on chain, by uid; empty when it has none."""
        uid = await self._query(_STORAGE.Uids, hotkey)
        if uid is None:
            return {}
        row = await self._query(_STORAGE.Weights, uid)
        return {Uid(int(target)): int(value) for target, value in sorted(row or [])}

    async def serve(self, endpoint: Endpoint) -> None:
        """Announce this key's endpoint on chain; a rate limit is waited out once, then Refused."""
        hotkey = self._hotkey()
        host = await _address(endpoint.host)
        wanted = Endpoint(host=host, port=endpoint.port)

        async def landed() -> int | None:
            neuron = (await self.fresh_metagraph()).by_hotkey().get(hotkey)
            return 0 if neuron is not None and neuron.endpoint == wanted else None

        if await landed() is not None:
            return

        async def send(client: bt.Client) -> bt.ExtrinsicResult:
            return await client.execute(ServeAxon(netuid=self.netuid, ip=host, port=endpoint.port), self._wallet)

        try:
            await self.session.submit("axon", send, landed, key=hotkey)
        except Refused as refused:
            if refused.code not in ("ServingRateLimitExceeded", bt.ErrorCode.RATE_LIMITED.value):
                raise
            limit = int(await self._query(_STORAGE.ServingRateLimit))
            await self.session.wait_for_block(await self.block() + limit)
            await self.session.submit("axon", send, landed, key=hotkey)

    async def subnet_exists(self) -> bool:
        """Whether the chain has this netuid."""
        return bool(await self._query(_STORAGE.NetworksAdded))

    async def is_started(self) -> bool:
        """Whether the owner's start call was made; before it nobody is paid."""
        return await self._query(_STORAGE.FirstEmissionBlockNumber) is not None

    async def registration_price(self) -> float:
        """TAO that registering a hotkey costs now."""
        return int(await self._query(_STORAGE.Burn)) / 1e9

    async def balance(self, address: str) -> float:
        """Free TAO of an account."""
        return float((await self.session.read("balance", lambda client: client.balances.get(address))).tao)

    async def hyperparameters(self) -> dict[str, Any]:
        """The subnet's hyperparameters by the chain's names. Raises NotFound when the netuid does not exist."""
        found = await self.session.read(
            "hyperparameters", lambda client: client.subnets.subnet_hyperparameters(self.netuid)
        )
        if found is None:
            raise NotFound(f"netuid {self.netuid} does not exist on {self.session.network}")
        return dict(found)

    def _hotkey(self) -> Hotkey:
        if self._wallet is None:
            raise Refused("no_wallet", "this connection has no wallet; it can only read")
        return Hotkey(getattr(self._wallet, "hotkey", self._wallet).ss58_address)

    async def _query(self, item: Any, *params: Any) -> Any:
        """A storage value of this subnet; `item` is a descriptor of the SDK's generated storage."""
        keys = [self.netuid, *params]
        return await self.session.read(str(item), lambda client: client.query(item, keys))

    async def _commitment(self, hotkey: Hotkey) -> tuple[int, bytes] | None:
        """(block, record) that a key committed, or None."""
        found = await self._query(bt.storage.Commitments.CommitmentOf, hotkey)
        if not found:
            return None
        return int(found["block"]), from_fields(found["info"]["fields"])

    async def _rules(self, registered_at: Mapping[Hotkey, int] | None) -> WeightRules:
        required = int(await self._query(_STORAGE.WeightsVersionKey))
        if required > self._version_key:
            reason = (
                f"netuid {self.netuid} takes weights of version key {required} and later, this build is "
                f"{self._version_key}: update Strata, then restart the validator"
            )
            raise Refused("version_key", reason)
        return WeightRules(
            min_allowed_weights=int(await self._query(_STORAGE.MinAllowedWeights)),
            max_weights_limit=int(await self._query(_STORAGE.MaxWeightsLimit)),
            registered_at=registered_at,
        )

    async def _require_right(self, metagraph: Metagraph, hotkey: Hotkey, values: Mapping[Uid, int]) -> None:
        """Refuse what the chain would, before a fee is paid; sealed weights it would take now and drop at the reveal."""
        neuron = metagraph.by_hotkey().get(hotkey)
        if neuron is None:
            raise self._not_registered(hotkey)
        item: Any = _STORAGE.StakeThreshold
        threshold = int(await self.session.read("stake threshold", lambda client: client.query(item)))
        if neuron.stake * 1e9 < threshold - 1:
            reason = f"weights need {threshold / 1e9:.9g} staked on the hotkey, there are {neuron.stake:.9g}"
            raise Refused("NotEnoughStakeToSetWeights", reason)
        is_exempt = hotkey == metagraph.owner_hotkey or list(values) == [neuron.uid]
        if not (neuron.validator_permit or is_exempt):
            raise Refused("NeuronNoValidatorPermit", f"{hotkey} has no validator permit on netuid {self.netuid}")

    async def _last_update(self, hotkey: Hotkey) -> int:
        """Block at which a validator last set or committed weights; registration counts as one."""
        uid = await self._query(_STORAGE.Uids, hotkey)
        updates = await self._query(_STORAGE.LastUpdate)
        if uid is None:
            raise self._not_registered(hotkey)
        return int(updates[uid])

    def _not_registered(self, hotkey: Hotkey) -> Refused:
        reason = f"{hotkey} is not registered on netuid {self.netuid}; register it with btcli subnets register"
        return Refused("not_registered", reason)

    async def _wait_for_window(self, hotkey: Hotkey) -> None:
        """Wait until the rate limit has passed and no epoch is about to run."""
        last = await self._last_update(hotkey)
        limit = int(await self._query(_STORAGE.WeightsSetRateLimit))
        now = await self.session.wait_for_block(last + limit) if last else await self.block()
        status = await self.session.read("epoch status", lambda client: client.epochs.epoch_status(self.netuid))
        due = status["next_epoch_start_block"]
        margin = min(_EPOCH_MARGIN_BLOCKS, status["tempo"] // 4)
        if due is not None and 0 <= due - now <= margin:
            await self.session.wait_for_block(due + 1)

    async def _is_set_already(self, hotkey: Hotkey, values: Mapping[Uid, int], last_update: int) -> bool:
        """Whether this tempo has these weights: on the chain, or sealed as this key remembers."""
        if last_update <= await self._query(_STORAGE.LastEpochBlock):
            return False
        if await self._query(_STORAGE.CommitRevealWeightsEnabled):
            return self._memory(hotkey).remembers(values, at_block=last_update)
        return await self.weights(hotkey) == values

    def _alerts_of(self, hotkey: Hotkey) -> WeightsAlerts:
        if self._alerts is None:
            self._alerts = WeightsAlerts(self.session.lock_directory, hotkey, self.netuid)
        return self._alerts

    def _memory(self, hotkey: Hotkey) -> WeightsMemory:
        return WeightsMemory(self.session.lock_directory, hotkey, self.netuid)

    async def _weights_landed(self, hotkey: Hotkey, values: Mapping[Uid, int], before: int) -> int | None:
        """The block at which these weights were set, or committed where the subnet reveals later."""
        updated = await self._last_update(hotkey)
        if updated <= before:
            return None
        if await self._query(_STORAGE.CommitRevealWeightsEnabled):
            return updated
        return updated if await self.weights(hotkey) == values else None


def _neuron(neuron: bt.MetagraphNeuron) -> Neuron:
    return Neuron(
        uid=Uid(neuron.uid),
        hotkey=Hotkey(neuron.hotkey),
        coldkey=neuron.coldkey,
        stake=neuron.total_stake.rao / 1e9,
        validator_permit=neuron.validator_permit,
        registered_at_block=neuron.block_at_registration,
        last_update_block=neuron.last_update,
        is_active=neuron.active,
        incentive=neuron.incentive,
        dividends=neuron.dividends,
        emission=neuron.emission.rao / 1e9,
        endpoint=_endpoint(neuron.axon),
    )


def _endpoint(axon: str | None) -> Endpoint | None:
    if axon is None:
        return None
    host, _, port = axon.rpartition(":")
    return Endpoint(host=host.strip("[]"), port=int(port))


async def _address(host: str) -> str:
    """The IP address of a host: the chain stores no names."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        raise TransientFailure(f"host {host!r} has no address: {error}") from error
    return str(found[0][4][0])
