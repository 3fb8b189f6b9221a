"""Preset, file, variables and flags -> NodeConfig. The only reader of the environment and of what was typed.

Later wins: preset TOML, `--config FILE`, environment, flags. Variables: BT_NETWORK, BT_WALLET, BT_WALLET_HOTKEY,
BT_WALLET_PATH, BT_CHAIN_ENDPOINT as elsewhere in the ecosystem; STRATA_<KEY> for a key of [node] (STRATA_NETUID) and
STRATA_<TABLE>__<KEY> for any other (STRATA_TRAINING__NUM_EPOCHS). An unknown STRATA_ variable is an error like any key.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from incentives.config import IncentiveConfig
from neurons import tables
from neurons.tables import Setting
from subnet.config import RunConfig, RunKind
from subnet.errors import InvalidConfig
from subnet.types import NumericMode, Record

PRESETS = ("local", "testnet", "mainnet")
_PRESET_OF_NETWORK = {"local": "local", "test": "testnet"}
_PRESET_DIR = Path(__file__).parent / "presets"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)]
Port = Annotated[int, Meta(ge=1, le=65535)]

BITTENSOR_VARIABLES = {
    "BT_NETWORK": "node.network",
    "BT_WALLET": "node.wallet",
    "BT_WALLET_HOTKEY": "node.hotkey",
    "BT_WALLET_PATH": "node.wallet_path",
    "BT_CHAIN_ENDPOINT": "node.chain_endpoint",
}
PASSWORD_VARIABLE = "STRATA_HOTKEY_PASSWORD"
"""Password of an encrypted hotkey; never a key of the configuration, which is written to files and logs."""
SERVE_KEY_VARIABLE, API_KEY_VARIABLE = "STRATA_SERVE_KEY", "STRATA_SERVE_API_KEY"
"""What stage hosts and their gateway know each other by, and what clients of a gateway must give."""
_OWN_VARIABLES = ("STRATA_CONFIG", "STRATA_PRESET", PASSWORD_VARIABLE, SERVE_KEY_VARIABLE, API_KEY_VARIABLE)


_URL = r"^(https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^\s?#]*)?)?$"


def user_path(text: str) -> Path:
    """A path as a person types it, `~` included. Raises InvalidConfig when there is no such home directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidConfig(
            f"{text} lies in a home directory that this machine does not know; write the path out"
        ) from None


class NodeSettings(Record, frozen=True):
    """What concerns one process on one machine; two nodes of a run may differ in all of it."""

    wallet: Name = "default"
    """Name of the wallet directory under `wallet_path`."""
    hotkey: Name = "default"
    """Name of the hotkey in the wallet; the coldkey is never read."""
    wallet_path: str = "~/.bittensor/wallets"
    netuid: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The subnet. 0, the root network, holds no run and stands for "not said"."""
    network: Annotated[str, Meta(min_length=1)] = "finney"
    """finney, test, local, or a websocket URL."""
    chain_endpoint: str = ""
    """Websocket URL of a chain node; empty: the network's own."""
    listen_host: str = "0.0.0.0"
    """Address this node listens on."""
    port: Port = 8091
    """TCP port this node listens on."""
    external_host: str = ""
    """Address peers dial; empty: `listen_host`."""
    external_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port peers dial (behind NAT); 0: `port`."""
    url: Annotated[str, Meta(pattern=_URL)] = ""
    """http(s) URL where nodes reach the orchestrator; empty: what `strata init-run` was given, else where it listens."""
    data_dir: str = ""
    """Checkpoints, journal, logs; empty: ~/.strata/NETWORK-NETUID/WALLET-HOTKEY."""
    lock_dir: str = "~/.strata/locks"
    """Where processes of this machine see that a hotkey is in use."""
    state_url: str = ""
    """redis://HOST:PORT/DB of the orchestrator; empty: an embedded store in `data_dir`."""
    blob_url: str = ""
    """s3://BUCKET/PREFIX of the orchestrator, with its keys in the AWS_ variables; empty: a directory under `data_dir`."""
    mode: NumericMode = NumericMode.FP32
    """How this node computes; the run's `training.modes` must allow it."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Cores for tensor work; 0: all."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: str = ""
    """JSON lines beside what is shown; empty: none."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port on 127.0.0.1 for health and metrics; 0: none."""

    @property
    def endpoint(self) -> str:
        """What the chain client connects to: the node's own endpoint, or the network's name."""
        return self.chain_endpoint or self.network

    @property
    def data_path(self) -> Path:
        """This node's own directory."""
        if self.data_dir:
            return user_path(self.data_dir)
        network = "".join(letter if letter.isalnum() else "-" for letter in self.endpoint)
        return user_path("~/.strata") / f"{network}-{self.netuid}" / f"{self.wallet}-{self.hotkey}"

    @property
    def lock_path(self) -> Path:
        """Directory of the hotkey locks."""
        return user_path(self.lock_dir)


class LocalnetOptions(Record, frozen=True):
    """What `strata localnet` starts on this machine."""

    num_miners: Annotated[int, Meta(ge=1, le=4096)] = 9
    """At least one for each stage."""
    num_validators: Annotated[int, Meta(ge=1, le=64)] = 2
    """Validators with a permit."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Of first params, order of samples, keys and, in virtual time, of everything else."""
    directory: str = "localnet"
    """Where everything goes; made when missing, refused when another run's."""
    port_base: Annotated[int, Meta(ge=0, le=65000)] = 0
    """First of the ports to use; 0: free ones."""
    is_virtual: bool = False
    """All roles in one process on the virtual-time loop: same seed, same digest."""
    cheats: tuple[Annotated[str, Meta(pattern=r"^[a-z0-9_-]+:[0-9]+$")], ...] = ()
    """KIND:MINER, miners counted from 1: identity:1 is m1."""
    unreachable: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Miners, counted from 1, that nobody can dial, as behind a router that lets nothing in."""
    block_time_s: Annotated[float, Meta(ge=0.05, le=12)] = 0.25
    """Seconds between blocks of the chain node."""
    tempo_blocks: Annotated[int, Meta(ge=8, le=65535)] = 40
    """Blocks between two evaluations of weights on the chain."""
    has_reference: bool = True
    """Whether the whole model is trained at the end in one process on as many samples, to compare the loss with; where stages
    train apart, whether their rounds are repeated in one process, to compare the params with.
    """

    @property
    def cheat_of(self) -> dict[int, str]:
        """The kind of cheat by the number of the miner that plays it."""
        pairs = (cheat.split(":") for cheat in self.cheats)
        return {int(miner): kind for kind, miner in pairs}


class NodeConfig(Record, frozen=True):
    """Everything a process is told: what its run agrees on, what the owner pays by, and what concerns this machine."""

    run: RunConfig = RunConfig()
    incentives: IncentiveConfig = IncentiveConfig()
    node: NodeSettings = NodeSettings()


KNOBS = tables.knobs(RunConfig) | tables.knobs(IncentiveConfig, "incentives.") | tables.knobs(NodeSettings, "node.")
"""Every key of a configuration file."""
LOCALNET_KNOBS = KNOBS | tables.knobs(LocalnetOptions, "localnet.")


def load(
    flags: Mapping[str, object] | None = None,
    *,
    preset: str | None = None,
    file: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> NodeConfig:
    """The configuration of one process. `flags` are dotted keys and what was typed for them. Raises InvalidConfig."""
    above = _said(flags or {}, file or environment.get("STRATA_CONFIG"), environment)
    tables.refuse_unknown(above, KNOBS)
    return _node_config(_preset(preset or environment.get("STRATA_PRESET") or _preset_for(above)) | above)


def load_localnet(
    flags: Mapping[str, object] | None = None, *, file: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[NodeConfig, LocalnetOptions]:
    """The configuration of a local subnet over the preset `local`, and over what its kind changes. Raises InvalidConfig.

    The ecosystem's variables are left out: they speak of a wallet and a network that a local subnet must not touch.
    """
    environment = {name: value for name, value in environment.items() if name not in BITTENSOR_VARIABLES}
    above = _said(flags or {}, file, environment)
    tables.refuse_unknown(above, LOCALNET_KNOBS)
    above = _of_kind(above) | above
    options = tables.build(LocalnetOptions, above, "localnet.")
    implied = {
        "model.seed": options.seed,
        "corpus.seed": options.seed,
        "training.min_miners": options.num_miners,
        "training.min_validators": options.num_validators,
    }
    settings = _preset("local") | {key: Setting(value, "localnet") for key, value in implied.items()} | above
    config = _node_config(settings)
    if options.num_miners < config.run.training.num_stages:
        raise InvalidConfig(
            f"localnet.num_miners (--miners) must be at least training.num_stages = {config.run.training.num_stages}, "
            f"got {options.num_miners}"
        )
    for miner in options.cheat_of:
        if not 1 <= miner <= options.num_miners:
            raise InvalidConfig(f"--cheat KIND:MINER takes a miner in [1, {options.num_miners}], got {miner}")
    for miner in options.unreachable:
        if miner > options.num_miners:
            raise InvalidConfig(f"localnet.unreachable takes miners in [1, {options.num_miners}], got {miner}")
    return config, options


def _of_kind(above: Mapping[str, Setting]) -> dict[str, Setting]:
    """What `local` needs changed for the kind of run that was asked for; nothing for a pipeline."""
    kind = above.get("kind")
    if kind is None or kind.value != RunKind.BLOCKTRAIN:
        return {}
    settings = _read(_PRESET_DIR / "blocktrain.toml")
    tables.refuse_unknown(settings, LOCALNET_KNOBS)
    return settings


def without_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that is told everything by a file: variables would win over it."""
    return {
        name: value
        for name, value in environment.items()
        if name not in BITTENSOR_VARIABLES and not name.startswith("STRATA_")
    }


def _said(flags: Mapping[str, object], file: str | None, environment: Mapping[str, str]) -> dict[str, Setting]:
    typed = {key: Setting(value, "the flags", isinstance(value, str)) for key, value in flags.items()}
    from_file = _read(user_path(file)) if file else {}
    return from_file | _environment(environment) | typed


def _node_config(settings: Mapping[str, Setting]) -> NodeConfig:
    return NodeConfig(
        run=tables.build(RunConfig, settings),
        incentives=tables.build(IncentiveConfig, settings, "incentives."),
        node=tables.build(NodeSettings, settings, "node."),
    )


def to_toml(config: NodeConfig) -> str:
    """A configuration file from which `load` makes the same NodeConfig; what localnet hands to its processes."""
    sections = (
        *tables.lines(config.run),
        *tables.lines(config.incentives, "incentives"),
        *tables.lines(config.node, "node"),
    )
    return "\n".join(sections).strip() + "\n"


def hotkey_password(environment: Mapping[str, str] = os.environ) -> str | None:
    """The password that unlocks the hotkey, when one is set."""
    return environment.get(PASSWORD_VARIABLE) or None


def serve_keys(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The key between hosts and gateway, and the one that clients must give; empty when not set."""
    return environment.get(SERVE_KEY_VARIABLE, ""), environment.get(API_KEY_VARIABLE, "")


def parse_assignments(
    assignments: list[str], takes: str = "--set takes KEY=VALUE, such as training.num_epochs=4"
) -> dict[str, object]:
    """`training.num_epochs=4` as typed behind --set, one key each; `takes` says so. Raises InvalidConfig."""
    parsed: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise InvalidConfig(f"{takes}, got {assignment!r}")
        parsed[key.strip()] = value.strip()
    return parsed


def _preset_for(settings: Mapping[str, Setting]) -> str:
    network = settings.get("node.network")
    return _PRESET_OF_NETWORK.get(str(network.value), "mainnet") if network else "mainnet"


def _preset(name: str) -> dict[str, Setting]:
    if name not in PRESETS:
        raise InvalidConfig(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    settings = _read(_PRESET_DIR / f"{name}.toml")
    tables.refuse_unknown(settings, KNOBS)
    return settings


def _read(path: Path) -> dict[str, Setting]:
    try:
        # Editors on Windows put a byte order mark in front, which is no TOML.
        return tables.flatten(tomllib.loads(path.read_text(encoding="utf-8-sig")), path.name)
    except FileNotFoundError:
        raise InvalidConfig(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"configuration file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"configuration file {path} is not TOML: {error}") from None
    except RecursionError:
        raise InvalidConfig(f"configuration file {path} nests tables or lists too deeply") from None


def _environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for variable in sorted(environment):
        value = environment[variable]
        key = BITTENSOR_VARIABLES.get(variable)
        if key is None and variable.startswith("STRATA_") and variable not in _OWN_VARIABLES:
            name = variable.removeprefix("STRATA_").lower()
            key = name.replace("__", ".") if "__" in name else f"node.{name}"
        if key is not None and value:
            settings[key] = Setting(value, f"variable {variable}", is_text=True)
    return settings


def bucket_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that S3 tools share: keys of a bucket stay out of files and flags."""
    return {name: value for name, value in environment.items() if name.startswith("AWS_")}
