"""What `strata serve` was told, checked."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from subnet.errors import InvalidConfig
from subnet.types import Endpoint, Record

KEY_LEAST = 16
"""Characters of a key that is worth having."""


class ServeOptions(Record, frozen=True):
    """One process of serving: a stage host, a gateway, or a gateway that starts its own hosts."""

    model: str
    """Model directory."""
    name: str = ""
    """What clients call the model; empty: the directory's name."""
    stage: Annotated[str, Meta(pattern=r"^[0-9]{1,4}/[0-9]{1,4}$")] = "0/1"
    """K/N: the stage a host holds, counted from 0, of N."""
    hosts: tuple[Annotated[str, Meta(pattern=r"^\S+:[0-9]{1,5}$")], ...] = ()
    """Of a gateway: HOST:PORT of every stage host, replicas included, in any order."""
    num_hosts: Annotated[int, Meta(ge=1, le=256)] = 1
    """Hosts that are started on this machine, one for each stage."""
    listen_host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Cores of a host for tensor work; 0: all, or the hosts' share when they are started together."""
    cache_tokens: Annotated[int, Meta(ge=64, le=1 << 32)] = 65536
    """Tokens that the caches of one host hold, of all sequences together."""
    max_context: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Tokens of prompt and completion; 0: what the model was trained on."""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    """The longest completion that may be asked for."""
    max_running: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    max_waiting: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    request_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    failover_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    until_eof: bool = False
    """Of a host: stop when the standard input ends, as it does when whoever started the host is gone."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def stage_of(self) -> tuple[int, int]:
        """(K, N)."""
        stage, num_stages = (int(part) for part in self.stage.split("/"))
        if not stage < num_stages:
            raise InvalidConfig(f"--stage K/N counts from 0: K must be below N, got {self.stage}")
        return stage, num_stages

    def positions(self, trained: int) -> int:
        """The longest context, of a model that was trained on `trained` tokens."""
        return self.max_context or trained

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the hosts of a gateway are."""
        found = []
        for spelled in self.hosts:
            host, _, port = spelled.rpartition(":")
            found.append(Endpoint(host=host.strip("[]"), port=int(port)))
        return tuple(found)


def read_options(given: dict[str, object]) -> ServeOptions:
    """Raises InvalidConfig."""
    try:
        return msgspec.convert(given, ServeOptions)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"strata serve: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(host: str, key: str, variable: str) -> None:
    """Raise InvalidConfig when strangers could reach `host` and no key that is worth having is set."""
    if key and len(key) < KEY_LEAST:
        raise InvalidConfig(f"{variable} must have at least {KEY_LEAST} characters")
    if not key and not is_loopback(host):
        raise InvalidConfig(
            f"{host} can be reached from outside: set {variable} to the same secret on all machines, such as the output of: "
            "openssl rand -hex 32"
        )
