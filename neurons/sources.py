"""Where a finished or running subnet is read from by those who only look: its directory or its public URL, and its chain."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from neurons.exit_codes import ExitCode
from neurons.local.chain import devnet_config, open_chain, read_genesis
from neurons.local.plan import Layout
from neurons.scoring import SEGMENT_LIMIT_BYTES, Record, parse_discovery
from neurons.settings import load, user_path
from subnet import wire
from subnet.adapters.chain import BittensorChain
from subnet.adapters.http_client import open_session
from subnet.adapters.public import HttpPublic
from subnet.devnet.journal import FILE_NAME
from subnet.devnet.node import Node
from subnet.errors import InvariantBroken, NotFound, ProtocolViolation, StartupRefused, TransientFailure
from subnet.types import Hotkey, Metagraph, Uid


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChain:
    """What the chain says of a run."""

    metagraph: Metagraph
    discovery: wire.Discovery
    weights: dict[Hotkey, dict[Uid, int]]


def is_url(target: str) -> bool:
    """Whether a run is named by its public URL, and not by a directory."""
    return target.startswith(("http://", "https://"))


def layout_of(target: str) -> Layout:
    """The directory of a local subnet."""
    return Layout(user_path(target).resolve())


async def read_segments(target: str) -> list[bytes]:
    """Sealed segments, oldest first, without a look at the chain. Raises StartupRefused."""
    if not is_url(target):
        return stored_segments(layout_of(target))
    async with open_session() as http:
        public = HttpPublic(http, target)
        try:
            discovery = parse_discovery(await public.read("run", limit_bytes=wire.REQUEST_LIMIT_BYTES))
            return await _sealed(public, discovery.n)
        except (NotFound, TransientFailure, ProtocolViolation) as error:
            raise _unreadable(target, error) from error


async def read_sealed(url: str, discovery: wire.Discovery) -> list[bytes]:
    """As many segments as the chain knows of. Raises StartupRefused."""
    async with open_session() as http:
        try:
            return await _sealed(HttpPublic(http, url), discovery.n)
        except (NotFound, TransientFailure, ProtocolViolation) as error:
            named = f"\nThe owner's record on chain names {discovery.u}"
            raise _unreadable(url, error, named) from error


async def _sealed(public: HttpPublic, count: int) -> list[bytes]:
    return [await public.read(f"ledger/{index}", limit_bytes=SEGMENT_LIMIT_BYTES) for index in range(count)]


def _unreadable(url: str, error: Exception, more: str = "") -> StartupRefused:
    return StartupRefused(f"the record cannot be read from {url}: {error}.{more}", ExitCode.UNAVAILABLE)


def stored_segments(layout: Layout) -> list[bytes]:
    """Sealed segments of a local subnet. Raises StartupRefused when there are none."""
    read_genesis(layout)
    files = sorted(layout.runs.glob("*/ledger/*")) if layout.runs.is_dir() else []
    if not files:
        raise StartupRefused(
            f"{layout.root} has no sealed segment yet: a run's first epoch must end before there is something to check.",
            ExitCode.CHECK_FAILED,
        )
    return [path.read_bytes() for path in files]


def open_record(segments: list[bytes]) -> Record:
    """The record, every head recomputed. Raises StartupRefused naming the first event that does not hold."""
    record = Record()
    try:
        for data in segments:
            record.add(data)
    except InvariantBroken as error:
        raise StartupRefused(
            f"the record does not hold: {error}.\nCompare it with the chain: strata audit DIR_OR_URL",
            ExitCode.INVARIANT_BROKEN,
        ) from error
    if record.accounts.created is None:
        raise StartupRefused("the record is empty: no segment of it is sealed yet.", ExitCode.CHECK_FAILED)
    return record


async def chain_of_url(chain_url: str | None, netuid: int | None) -> OnChain:
    """The chain as named by flags, or by the variables of the ecosystem. Raises StartupRefused."""
    flags = {"node.chain_endpoint": chain_url, "node.netuid": netuid}
    node = load({key: value for key, value in flags.items() if value is not None}).node
    if node.netuid == 0:
        raise StartupRefused(
            "which subnet does this run belong to? Name it with --netuid N, and its chain with --chain URL.",
            ExitCode.INVALID_CONFIG,
        )
    return await _read_chain(open_chain(node.endpoint, netuid=node.netuid))


async def chain_of_directory(layout: Layout, chain_url: str | None) -> OnChain:
    """The chain that was named, else the directory's own. Raises StartupRefused."""
    async with _own_chain(layout, chain_url) as url:
        return await _read_chain(open_chain(url, netuid=read_genesis(layout).netuid))


@asynccontextmanager
async def _own_chain(layout: Layout, chain_url: str | None) -> AsyncIterator[str]:
    """The chain that was named, else the directory's own, opened from a copy and standing still."""
    if chain_url is not None:
        yield chain_url
        return
    file = layout.chain / FILE_NAME
    if not file.exists():
        raise StartupRefused(f"{file} is missing; name the chain with --chain URL.", ExitCode.DAMAGED_STATE)
    with tempfile.TemporaryDirectory(prefix="strata-audit-") as copy:
        shutil.copyfile(file, Path(copy) / FILE_NAME)
        node = Node(devnet_config(read_genesis(layout), directory=Path(copy), port=0))
        node.faults.is_stalled = True  # nothing happens on it any more: what is read is how the run ended
        async with node.running():
            yield node.url


async def _read_chain(chain: BittensorChain) -> OnChain:
    """Everything at once, and the connection closed."""
    try:
        metagraph = await chain.fresh_metagraph()
        discovery = parse_discovery(await chain.commitment(metagraph.owner_hotkey))
        validators = [neuron.hotkey for neuron in metagraph.neurons if neuron.validator_permit]
        weights = {hotkey: await chain.weights(hotkey) for hotkey in validators}
    except TransientFailure as error:
        raise StartupRefused(
            f"the chain cannot be reached: {error}.\nCheck --chain and the connection.", ExitCode.CHAIN_UNREACHABLE
        ) from error
    except NotFound as error:
        raise StartupRefused(f"{error}.", ExitCode.NO_RUN) from error
    except ProtocolViolation as error:
        raise StartupRefused(f"what the owner committed is no Strata record: {error}.", ExitCode.NO_RUN) from error
    finally:
        await chain.close()
    return OnChain(metagraph=metagraph, discovery=discovery, weights=weights)
