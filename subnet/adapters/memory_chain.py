"""A chain in memory for simulation: blocks are a function of the clock, epochs run when time is looked at.

Same rules as the devnet for one subnet (chain.md 2, 4), the same consensus and the same division of emission;
deterministic, without tasks or real time.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from subnet import yuma
from subnet.adapters.commitment_fields import MAX_RECORD_BYTES
from subnet.adapters.weights_conform import WeightRules, conform
from subnet.errors import NotFound, Refused, TransientFailure
from subnet.ports import Clock
from subnet.types import Endpoint, Hotkey, Metagraph, Neuron, Uid

_RAO = 1_000_000_000
_COMMITMENT_SPACE_BYTES = 3_100
_MIN_CHARGE_BYTES = 100
_EPOCH_MARGIN_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChainConfig:
    """One subnet's rules."""

    netuid: int = 1
    tempo: int = 20
    """Blocks from epoch to epoch."""
    block_time_s: float = 12.0
    finality_lag: int = 2
    """Blocks that finality stays behind."""
    weights_rate_limit: int = 10
    """Blocks between two updates of weights."""
    serving_rate_limit: int = 5
    """Blocks between two announcements of an endpoint."""
    activity_cutoff: int = 5_000
    """Blocks without weights after which a validator does not count."""
    max_uids: int = 256
    version_key: int = 0
    """Oldest build whose weights are taken."""
    rules: WeightRules = field(default_factory=WeightRules)
    consensus: yuma.YumaParams = field(default_factory=yuma.YumaParams)
    seed: int = 0
    """Block hashes follow from it."""


@dataclass(slots=True)
class _Slot:
    """A neuron and all that the chain knows of it."""

    hotkey: Hotkey
    coldkey: str
    registered_at: int
    last_update: int
    has_permit: bool = False
    incentive: float = 0.0
    dividends: float = 0.0
    emission_rao: int = 0
    endpoint: Endpoint | None = None
    served_at: int | None = None
    weights: dict[Uid, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Record:
    """A key's commitment, and how much of the tempo's allowance it has used."""

    data: bytes
    at_block: int
    epoch: int
    used_bytes: int


class MemoryChainState:
    """The chain that all views share. `is_down` makes every call fail, as an unreachable chain does."""

    def __init__(
        self, clock: Clock, config: MemoryChainConfig, *, owner_hotkey: Hotkey, owner_coldkey: str = "owner"
    ) -> None:
        self.clock = clock
        self.config = config
        self.owner_hotkey = owner_hotkey
        self.owner_coldkey = owner_coldkey
        self.is_down = False
        self.stake_rao: dict[Hotkey, int] = {}
        self._genesis_s = clock.now()
        self._slots: list[_Slot] = []
        self._bonds = np.zeros((0, 0))
        self._records: dict[Hotkey, _Record] = {}
        self._last_epoch = 0
        self._num_epochs = 0
        self.register(owner_hotkey, owner_coldkey)

    @property
    def num_epochs(self) -> int:
        """How many epochs have run."""
        self.catch_up()
        return self._num_epochs

    def view(self, hotkey: Hotkey, *, version_key: int = 0) -> "MemoryChain":
        """The chain as one key sees it (ports.Chain)."""
        return MemoryChain(self, hotkey, version_key=version_key)

    def register(self, hotkey: Hotkey, coldkey: str, *, stake: float = 0.0) -> Uid:
        """Register a key at the present block, with some stake; on a full subnet the lowest earner makes room."""
        block = self.catch_up()
        if any(slot.hotkey == hotkey for slot in self._slots):
            raise Refused("HotKeyAlreadyRegisteredInSubNet", f"{hotkey} is registered already")
        slot = _Slot(hotkey, coldkey, registered_at=block, last_update=block)
        self.add_stake(hotkey, stake)
        if len(self._slots) < self.config.max_uids:
            self._slots.append(slot)
            grown = np.zeros((len(self._slots), len(self._slots)))
            grown[:-1, :-1] = self._bonds
            self._bonds = grown
            return Uid(len(self._slots) - 1)
        return self._replace(slot)

    def add_stake(self, hotkey: Hotkey, alpha: float) -> None:
        """Stake alpha on a key."""
        self.stake_rao[hotkey] = self.stake_rao.get(hotkey, 0) + round(alpha * _RAO)

    def catch_up(self) -> int:
        """Run the epochs that are due; returns the present block."""
        block = math.floor((self.clock.now() - self._genesis_s) / self.config.block_time_s + 1e-9)
        while block >= self._last_epoch + self.config.tempo:
            self._run_epoch(self._last_epoch + self.config.tempo)
        return block

    def slot(self, hotkey: Hotkey) -> tuple[Uid, _Slot]:
        """A key's uid and neuron. Refused when it is not registered."""
        for uid, slot in enumerate(self._slots):
            if slot.hotkey == hotkey:
                return Uid(uid), slot
        reason = f"{hotkey} is not registered on netuid {self.config.netuid}; register it with btcli subnets register"
        raise Refused("not_registered", reason)

    def record(self, hotkey: Hotkey) -> _Record | None:
        """A key's commitment."""
        return self._records.get(hotkey)

    def put_record(self, hotkey: Hotkey, data: bytes, *, at_block: int) -> None:
        """Store a commitment within the tempo's allowance."""
        old = self._records.get(hotkey)
        used = old.used_bytes if old is not None and old.epoch == self._num_epochs else 0
        used += max(_MIN_CHARGE_BYTES, len(data))
        if used > _COMMITMENT_SPACE_BYTES:
            reason = f"{hotkey} has used up its {_COMMITMENT_SPACE_BYTES} bytes of commitments for this tempo"
            raise Refused("SpaceLimitExceeded", reason)
        self._records[hotkey] = _Record(data, at_block, self._num_epochs, used)

    def blocks_to_epoch(self, block: int) -> int:
        """Blocks until the next epoch."""
        return self._last_epoch + self.config.tempo - block

    @property
    def last_epoch_block(self) -> int:
        """Block of the newest epoch."""
        return self._last_epoch

    def metagraph(self, block: int) -> Metagraph:
        """Every neuron now."""
        neurons = [
            Neuron(
                uid=Uid(uid),
                hotkey=slot.hotkey,
                coldkey=slot.coldkey,
                stake=self.stake_rao.get(slot.hotkey, 0) / _RAO,
                validator_permit=slot.has_permit,
                registered_at_block=slot.registered_at,
                last_update_block=slot.last_update,
                is_active=slot.last_update + self.config.activity_cutoff >= block,
                incentive=slot.incentive,
                dividends=slot.dividends,
                emission=slot.emission_rao / _RAO,
                endpoint=slot.endpoint,
            )
            for uid, slot in enumerate(self._slots)
        ]
        return Metagraph(
            netuid=self.config.netuid,
            at_block=block,
            owner_hotkey=self.owner_hotkey,
            tempo=self.config.tempo,
            neurons=tuple(neurons),
        )

    def _replace(self, slot: _Slot) -> Uid:
        candidates = [
            (old.emission_rao, old.registered_at, uid)
            for uid, old in enumerate(self._slots)
            if old.hotkey != self.owner_hotkey
        ]
        if not candidates:
            raise Refused("NoNeuronIdAvailable", "every uid is immune")
        uid = min(candidates)[-1]
        self._slots[uid] = slot
        self._bonds[uid, :] = 0.0
        return Uid(uid)

    def _run_epoch(self, block: int) -> None:
        result = yuma.yuma_epoch(self._consensus_input(block), self.config.consensus)
        per_block, num_blocks = yuma.block_emission(), block - self._last_epoch
        emission = yuma.Emission(
            per_block.owner * num_blocks, per_block.server * num_blocks, per_block.validator * num_blocks
        )
        for uid, (incentive, dividend) in enumerate(yuma.payouts(result, emission)):
            slot = self._slots[uid]
            burned = incentive if slot.coldkey == self.owner_coldkey else 0
            self._mint(slot.hotkey, incentive - burned + dividend)
            slot.emission_rao = incentive + dividend
            slot.has_permit = bool(result.permits_n[uid])
            slot.incentive, slot.dividends = float(result.incentive_n[uid]), float(result.dividends_n[uid])
        self._mint(self.owner_hotkey, emission.owner)
        self._bonds = np.where(result.permits_n[:, None], result.bonds_nn, 0.0)
        self._last_epoch, self._num_epochs = block, self._num_epochs + 1

    def _consensus_input(self, block: int) -> yuma.YumaInput:
        num_neurons = len(self._slots)
        weights = np.zeros((num_neurons, num_neurons))
        for uid, slot in enumerate(self._slots):
            for target, value in slot.weights.items():
                weights[uid, target] = value
        registered = np.array([slot.registered_at for slot in self._slots], dtype=np.int64)
        cutoff = self.config.activity_cutoff
        owner_uids = [uid for uid, slot in enumerate(self._slots) if slot.hotkey == self.owner_hotkey]
        return yuma.YumaInput(
            stake_n=np.array([self.stake_rao.get(slot.hotkey, 0) for slot in self._slots], dtype=np.float64),
            weights_nn=weights,
            bonds_nn=yuma.without_bonds_to(self._bonds, registered >= max(1, self._last_epoch)),
            permits_n=np.array([slot.has_permit for slot in self._slots], dtype=bool),
            active_n=np.array([slot.last_update + cutoff >= block for slot in self._slots], dtype=bool),
            last_update_n=np.array([slot.last_update for slot in self._slots], dtype=np.int64),
            registered_n=registered,
            owner_uid=owner_uids[0] if owner_uids else None,
        )

    def _mint(self, hotkey: Hotkey, rao: int) -> None:
        self.stake_rao[hotkey] = self.stake_rao.get(hotkey, 0) + rao


class MemoryChain:
    """`MemoryChainState` as one key sees it (ports.Chain). Writes land in the next block, as on a real chain."""

    def __init__(self, state: MemoryChainState, hotkey: Hotkey, *, version_key: int = 0) -> None:
        self._state = state
        self._key = hotkey
        self._version_key = version_key

    async def block(self) -> int:
        """Number of the newest block."""
        return self._now()

    async def block_hash(self, number: int) -> str | None:
        """Hex hash of the finalized block `number`, None while it is not final yet."""
        if number > max(0, self._now() - self._state.config.finality_lag):
            return None
        digest = hashlib.blake2b(f"{self._state.config.seed}/{number}".encode(), digest_size=32)
        return "0x" + digest.hexdigest()

    async def metagraph(self) -> Metagraph:
        """The subnet now."""
        return self._state.metagraph(self._now())

    async def commitment(self, hotkey: Hotkey) -> bytes | None:
        """The record `hotkey` committed, or None."""
        self._now()
        record = self._state.record(hotkey)
        return None if record is None else record.data

    async def commit(self, data: bytes) -> int:
        """Put `data` into this key's commitment slot; a record that is there already is not sent again."""
        if not 0 < len(data) <= MAX_RECORD_BYTES:
            reason = f"a commitment holds 1 to {MAX_RECORD_BYTES} bytes, this record has {len(data)}"
            raise Refused("commitment_size", reason)
        self._now()
        present = self._state.record(self._key)
        if present is not None and present.data == data:
            return present.at_block
        block = await self._next_block()
        self._state.slot(self._key)
        self._state.put_record(self._key, data, at_block=block)
        return block

    async def set_weights(self, weights: Mapping[Hotkey, float]) -> int:
        """Post weights once the rate limit has passed and no epoch is about to run; returns the block."""
        config = self._state.config
        _, slot = self._state.slot(self._key)
        await self._wait_for_block(slot.last_update + config.weights_rate_limit)
        if 0 <= self._state.blocks_to_epoch(self._now()) <= min(_EPOCH_MARGIN_BLOCKS, config.tempo // 4):
            await self._wait_for_block(self._now() + self._state.blocks_to_epoch(self._now()) + 1)
        if config.version_key > self._version_key:
            reason = (
                f"netuid {config.netuid} takes weights of version key {config.version_key} and later, this build is "
                f"{self._version_key}: update Strata, then restart the validator"
            )
            raise Refused("version_key", reason)
        conformed = conform(weights, self._state.metagraph(self._now()), config.rules)
        _, slot = self._state.slot(self._key)
        if slot.weights == conformed.values and slot.last_update > self._state.last_epoch_block:
            return slot.last_update
        block = await self._next_block()
        uid, slot = self._state.slot(self._key)
        is_exempt = self._key == self._state.owner_hotkey or list(conformed.values) == [uid]
        if not slot.has_permit and not is_exempt:
            raise Refused("NeuronNoValidatorPermit", f"{self._key} has no validator permit")
        slot.weights, slot.last_update = dict(conformed.values), block
        return block

    async def weights(self, hotkey: Hotkey) -> dict[Uid, int]:
        """The u16 weights that `hotkey` has, by uid."""
        self._now()
        try:
            return dict(self._state.slot(hotkey)[1].weights)
        except Refused:
            return {}

    async def serve(self, endpoint: Endpoint) -> None:
        """Announce this key's endpoint; a rate limit is waited out."""
        self._now()
        _, slot = self._state.slot(self._key)
        if slot.endpoint == endpoint:
            return
        if slot.served_at is not None:
            await self._wait_for_block(slot.served_at + self._state.config.serving_rate_limit)
        block = await self._next_block()
        _, slot = self._state.slot(self._key)
        slot.endpoint, slot.served_at = endpoint, block

    def _now(self) -> int:
        """The present block. Raises when the chain is out of reach or has no such subnet."""
        if self._state.is_down:
            raise TransientFailure("no endpoint of the chain can be reached")
        if self._state.config.netuid < 1:
            raise NotFound(f"netuid {self._state.config.netuid} does not exist")
        return self._state.catch_up()

    async def _next_block(self) -> int:
        """Wait for the block that will include what is sent now."""
        return await self._wait_for_block(self._now() + 1)

    async def _wait_for_block(self, number: int) -> int:
        while (now := self._now()) < number:
            await self._state.clock.sleep((number - now) * self._state.config.block_time_s)
        return now
