"""What a local subnet consists of, decided before anything starts: directory, keys, ports, configuration of each process."""

import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from neurons.claims import require_free_port
from neurons.exit_codes import ExitCode
from neurons.settings import LocalnetOptions, NodeConfig, user_path
from subnet.errors import StartupRefused
from subnet.types import Hotkey, Record

NETUID = 2
HOST = "127.0.0.1"
VALIDATOR_STAKE_TAO = 1000.0
CLOSED_PORT = 1
"""Nothing listens there: what a miner announces that peers are not to reach."""
_SCAN_FROM, _SCAN_TO, _SCAN_STEP = 20_000, 32_000, 64
"""Free ports are looked for below the range from which the kernel takes those of outgoing connections."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The directory of a local subnet."""

    root: Path

    @property
    def wallets(self) -> Path:
        """Bittensor wallets without passwords."""
        return self.root / "wallets"

    @property
    def chain(self) -> Path:
        """The chain node's file, and what it started from."""
        return self.root / "chain"

    @property
    def genesis(self) -> Path:
        """What the chain started from (GenesisFile)."""
        return self.chain / "genesis.json"

    @property
    def processes(self) -> Path:
        """Who runs, rewritten at each change."""
        return self.root / "processes.json"

    @property
    def report(self) -> Path:
        """How it ended."""
        return self.root / "report.json"

    @property
    def run_config(self) -> Path:
        """The run's configuration, fit for --config."""
        return self.root / "run.toml"

    def node(self, name: str) -> Path:
        """A role's own directory."""
        return self.root / "nodes" / name

    def log(self, name: str) -> Path:
        """What a process printed."""
        return self.root / "logs" / f"{name}.log"

    @property
    def text(self) -> Path:
        """What a model that only counts tokens would score."""
        return self.node("reference") / "text.json"

    @property
    def reference(self) -> Path:
        """Progress and result of the one-process training, JSON lines."""
        return self.node("reference") / "training.jsonl"

    @property
    def repeated(self) -> Path:
        """Which rounds came to the same once more in one process, JSON lines."""
        return self.node("reference") / "repeated.jsonl"

    @property
    def runs(self) -> Path:
        """Objects of the run, as the orchestrator stored them; a run's own directory in it is named by its id."""
        return self.node("orchestrator") / "blobs" / "runs"


class GenesisFile(Record, frozen=True):
    """What the chain of a local subnet started from, so that it can be opened again."""

    netuid: int
    owner_coldkey: str
    owner_hotkey: Hotkey
    hyperparameters: dict[str, int]
    prefunded: dict[str, float]
    block_time_s: float


class Part(Record, frozen=True):
    """One process: its name is also the name of its hotkey and of its directory."""

    name: str
    role: str
    wallet: str
    port: int
    cheat: str = ""
    is_unreachable: bool = False
    """Whether peers are told to dial a port at which nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole local subnet."""

    layout: Layout
    config: NodeConfig
    options: LocalnetOptions
    chain_port: int
    parts: tuple[Part, ...]

    @property
    def chain_url(self) -> str:
        """Where the SDK connects."""
        return f"ws://{HOST}:{self.chain_port}"

    @property
    def orchestrator(self) -> Part:
        """The owner's process."""
        return self.of_role("orchestrator")[0]

    @property
    def url(self) -> str:
        """Where nodes reach the orchestrator."""
        return f"http://{HOST}:{self.orchestrator.port}"

    def of_role(self, role: str) -> tuple[Part, ...]:
        """The processes of one role, in order."""
        return tuple(part for part in self.parts if part.role == role)

    def node_config(self, part: Part) -> NodeConfig:
        """What one process is told; a role reads nothing else."""
        node = msgspec.structs.replace(
            self.config.node,
            wallet=part.wallet,
            hotkey=part.name,
            wallet_path=str(self.layout.wallets),
            netuid=NETUID,
            network="local",
            chain_endpoint=self.chain_url,
            listen_host=HOST,
            port=part.port,
            external_port=CLOSED_PORT if part.is_unreachable else self.config.node.external_port,
            data_dir=str(self.layout.node(part.name)),
            num_threads=self.config.node.num_threads or 1,
        )
        return msgspec.structs.replace(self.config, node=node)


def make_plan(config: NodeConfig, options: LocalnetOptions) -> Plan:
    """Names, wallets and ports. Raises StartupRefused when ports of `port_base` are taken."""
    names = [("orchestrator", "orchestrator", "owner", "")]
    names += [
        (f"m{number}", "miner", "miners", options.cheat_of.get(number, ""))
        for number in range(1, options.num_miners + 1)
    ]
    names += [(f"v{number}", "validator", f"validator-{number}", "") for number in range(1, options.num_validators + 1)]
    unreachable = {f"m{number}" for number in options.unreachable}
    chain_port, *ports = _ports(options.port_base, 1 + len(names))
    return Plan(
        layout=Layout(user_path(options.directory).resolve()),
        config=config,
        options=options,
        chain_port=chain_port,
        parts=tuple(
            Part(name=name, role=role, wallet=wallet, port=port, cheat=cheat, is_unreachable=name in unreachable)
            for (name, role, wallet, cheat), port in zip(names, ports, strict=True)
        ),
    )


def require_fresh(layout: Layout) -> None:
    """Raises StartupRefused when the directory holds anything: a run is never continued over another's files."""
    root = layout.root
    if root.exists() and not root.is_dir():
        raise StartupRefused(f"{root} is a file.\nName a directory with --dir.", ExitCode.FOREIGN_DIRECTORY)
    if not root.exists() or not any(root.iterdir()):
        return
    if not layout.genesis.exists():
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:3])
        raise StartupRefused(
            f"{root} is not empty and no local subnet's (it has {found}); nothing was changed.\n"
            "Name a new or empty directory with --dir.",
            ExitCode.FOREIGN_DIRECTORY,
        )
    how = "a finished" if layout.report.exists() else "an unfinished"
    look = f"Check it with: strata audit {root}" if layout.report.exists() else "It was stopped before its end"
    raise StartupRefused(
        f"{root} holds {how} local subnet; nothing was changed.\n"
        f"{look}   Start a new one with --dir DIR, or remove this one first: rm -r {root}",
        ExitCode.FOREIGN_DIRECTORY,
    )


def _ports(base: int, count: int) -> list[int]:
    """`count` ports from `base` on, or free ones. Raises StartupRefused naming who has a port that was asked for."""
    if base:
        for port in range(base, base + count):
            require_free_port(HOST, port, flag="--port-base")
        return list(range(base, base + count))
    found: list[int] = []
    for port in _candidates():
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise StartupRefused(f"there are not {count} free ports; name the first with --port-base.", ExitCode.PORT_TAKEN)


def _candidates() -> Iterator[int]:
    """Ports from a place drawn anew, so that two local subnets started at once do not look at the same ones."""
    span = _SCAN_TO - _SCAN_FROM
    start = secrets.randbelow(span // _SCAN_STEP) * _SCAN_STEP
    for offset in range(span):
        yield _SCAN_FROM + (start + offset) % span


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
