"""What a devnet starts with. Amounts are TAO here and rao (1e-9 TAO) everywhere else in the node."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from bittensor_core import ss58_decode

from subnet.devnet.hyperparameters import BY_NAME
from subnet.errors import InvalidConfig

RAO = 1_000_000_000
"""Rao in one TAO, and in one alpha."""
ALICE = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
"""The development account //Alice, funded at genesis so that every tool works at once."""


def _check_address(name: str, address: str) -> None:
    try:
        ss58_decode(address)
    except ValueError as error:
        raise InvalidConfig(f"{name}: {address!r} is not an SS58 address") from error


def _check_amount(name: str, tao: float) -> None:
    if not 0 <= tao <= 9e9:
        raise InvalidConfig(f"{name} must be in 0..9e9 TAO, got {tao}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetGenesis:
    """A subnet that exists from block 0, with its owner's hotkey registered as uid 0."""

    netuid: int
    """1 to 65,535 (0 is root)."""
    owner_coldkey: str = ALICE
    """SS58 address that may change hyperparameters and gets the owner's cut."""
    owner_hotkey: str = ALICE
    """SS58 address of uid 0."""
    name: str = "devnet"
    """Shown in listings."""
    is_started: bool = True
    """Whether the owner's start call was made; before it, the subnet pays nothing and takes no stake."""
    hyperparameters: Mapping[str, int] = field(default_factory=dict)
    """Raw values by the chain's name, over `DEVNET_HYPERPARAMETERS`."""

    def __post_init__(self) -> None:
        if not 1 <= self.netuid <= 65_535:
            raise InvalidConfig(f"devnet.subnets.netuid must be in 1..65535, got {self.netuid}")
        _check_address("devnet.subnets.owner_coldkey", self.owner_coldkey)
        _check_address("devnet.subnets.owner_hotkey", self.owner_hotkey)
        for name, value in self.hyperparameters.items():
            if name not in BY_NAME:
                known = ", ".join(sorted(BY_NAME))
                raise InvalidConfig(f"devnet.subnets.hyperparameters: no {name!r}; known are {known}")
            largest = BY_NAME[name].largest
            if not 0 <= value <= largest:
                raise InvalidConfig(f"devnet.subnets.hyperparameters.{name} must be in 0..{largest}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevnetConfig:
    """A development chain node."""

    host: str = "127.0.0.1"
    """Address to listen on. The node has no access control: anything but loopback is at your own risk."""
    port: int = 9944
    """TCP port; 0 takes a free one."""
    block_time_s: float = 12.0
    """Seconds between blocks, 0.02 to 600; 12 is mainnet's."""
    subnets: tuple[SubnetGenesis, ...] = (SubnetGenesis(netuid=1),)
    """Subnets at genesis, each netuid once."""
    prefunded: Mapping[str, float] = field(default_factory=dict)
    """TAO by SS58 address, besides //Alice's."""
    alice_tao: float = 1_000_000.0
    """TAO of //Alice at genesis."""
    finality_lag: int = 2
    """Blocks that the finalized head stays behind the newest, 0 to 64."""
    kept_blocks: int = 256
    """How many past blocks can still be read, 16 to 4,096."""
    stake_threshold_tao: float = 0.0
    """Stake a validator needs to set weights."""
    directory: Path | None = None
    """Where the chain is kept (one file); None keeps it in memory only."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise InvalidConfig(f"devnet.port must be in 0..65535, got {self.port}")
        if not 0.02 <= self.block_time_s <= 600:
            raise InvalidConfig(f"devnet.block_time_s must be in 0.02..600, got {self.block_time_s}")
        if not 0 <= self.finality_lag <= 64:
            raise InvalidConfig(f"devnet.finality_lag must be in 0..64, got {self.finality_lag}")
        if not 16 <= self.kept_blocks <= 4_096:
            raise InvalidConfig(f"devnet.kept_blocks must be in 16..4096, got {self.kept_blocks}")
        netuids = [subnet.netuid for subnet in self.subnets]
        if len(set(netuids)) != len(netuids):
            raise InvalidConfig(f"devnet.subnets must name each netuid once, got {netuids}")
        for address, tao in self.prefunded.items():
            _check_address("devnet.prefunded", address)
            _check_amount(f"devnet.prefunded.{address}", tao)
        _check_amount("devnet.alice_tao", self.alice_tao)
        _check_amount("devnet.stake_threshold_tao", self.stake_threshold_tao)


def config_from_toml(text: str, origin: str) -> DevnetConfig:
    """A configuration from the `[devnet]` table of a TOML document. Raises InvalidConfig naming what is wrong."""
    try:
        table = tomllib.loads(text).get("devnet", {})
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{origin} is no TOML: {error}") from error
    _refuse_unknown(table, DevnetConfig, f"{origin}: devnet")
    for subnet in table.get("subnets", []):
        _refuse_unknown(subnet, SubnetGenesis, f"{origin}: devnet.subnets")
    try:
        return msgspec.convert(table, DevnetConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"{origin}: devnet: {error}") from error


def load_config(
    file: Path | None,
    *,
    num_subnets: int | None = None,
    hyperparameters: Mapping[str, object] | None = None,
    funded: Mapping[str, object] | None = None,
    **settings: Any,
) -> DevnetConfig:
    """A file's configuration, or the default one, with what was said besides; None is not said. Raises InvalidConfig.

    `num_subnets` are netuids from 1 on instead of the file's; `hyperparameters` hold for every subnet. Numbers may be text.
    """
    config = DevnetConfig()
    if file is not None:
        try:
            config = config_from_toml(file.read_text(encoding="utf-8-sig"), file.name)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"configuration file {file} cannot be read: {error}") from error
    subnets = config.subnets
    if num_subnets is not None:
        subnets = tuple(SubnetGenesis(netuid=number) for number in range(1, num_subnets + 1))
    knobs = {name: int(_number(name, value)) for name, value in (hyperparameters or {}).items()}
    money = {address: _number(address, tao) for address, tao in (funded or {}).items()}
    turned = [replace(subnet, hyperparameters={**subnet.hyperparameters, **knobs}) for subnet in subnets]
    said = {name: value for name, value in settings.items() if value is not None}
    return replace(config, subnets=tuple(turned), prefunded={**config.prefunded, **money}, **said)


def _number(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidConfig(f"devnet: {name} must be a number, got {value!r}")
    return number


def _refuse_unknown(table: Any, record: type, where: str) -> None:
    known = [entry.name for entry in fields(record)]
    unknown = sorted(set(table) - set(known)) if isinstance(table, dict) else []
    if unknown:
        raise InvalidConfig(f"{where}.{unknown[0]} is no setting; known are {', '.join(known)}")


def _path(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise InvalidConfig(f"a devnet's configuration takes no {kind.__name__}")
    return Path(value).expanduser()
