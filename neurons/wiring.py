"""NodeConfig -> adapters: the only list of concrete classes."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from incentives.config import IncentiveConfig
from neurons import settings
from neurons.claims import claimed_run, directory_claim, hotkey_claim, require_free_port
from neurons.description import config_digest
from neurons.discovery import find_run, read_metagraph, reasons_to_earn_nothing, require_registered
from neurons.exit_codes import ExitCode
from neurons.settings import NodeConfig
from neurons.wallets import load_hotkey
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import DirectoryBlobStore, HttpBlobs
from subnet.adapters.chain import BittensorChain
from subnet.adapters.corpus import make_corpus
from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.public import HttpPublic
from subnet.adapters.s3 import Bucket, S3BlobStore
from subnet.adapters.state import RedisStateStore
from subnet.adapters.system import DirectoryDisk, SystemClock, ThreadCompute, write_atomically
from subnet.config import RunConfig
from subnet.errors import DamagedState, InvalidConfig, NotFound, ProtocolViolation, StartupRefused, TransientFailure
from subnet.ports import BlobStore, Corpus, Disk, PublicRecord, StateStore
from subnet.types import Digest, Endpoint, Hotkey

VERSION_KEY = 1
"""This build's number in weights; the chain may refuse older ones, and it is never an echo of the chain's."""
DESCRIPTION_LIMIT_BYTES = 1 << 20
_SECRET_BYTES = 32
ANNOUNCED_URL = "url"
"""Where the orchestrator's directory keeps the URL that the run was announced with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A miner or validator that found its run, with everything it needs of the world."""

    config: NodeConfig
    run: RunConfig
    incentives: IncentiveConfig
    discovery: wire.Discovery
    owner: Hotkey
    signer: KeypairSigner
    chain: BittensorChain
    session: aiohttp.ClientSession
    control: HttpControl
    public: HttpPublic
    blobs: HttpBlobs
    disk: DirectoryDisk
    corpus: Corpus
    compute: ThreadCompute
    clock: SystemClock
    warnings: tuple[str, ...]


async def read_description(
    public: PublicRecord, discovery: wire.Discovery
) -> tuple[RunConfig, IncentiveConfig, Digest]:
    """What the run's nodes agree on, checked against the chain. Raises StartupRefused."""
    try:
        data = await public.read("config", limit_bytes=DESCRIPTION_LIMIT_BYTES)
    except (NotFound, TransientFailure, ProtocolViolation) as error:
        raise StartupRefused(
            f"the orchestrator of run {discovery.r} at {discovery.u} does not answer: {error}.\n"
            "Its owner may be restarting it; try again in a minute.",
            ExitCode.UNAVAILABLE,
        ) from error
    try:
        run_json, incentives_json, corpus_digest = data.split(b"\n")
        run = msgspec.json.decode(run_json, type=RunConfig)
        incentives = msgspec.json.decode(incentives_json, type=IncentiveConfig)
        digest = Digest(corpus_digest.decode())
    except (ValueError, InvalidConfig, msgspec.DecodeError) as error:
        raise StartupRefused(
            f"the run's description at {discovery.u} does not decode: {error}.\n"
            "Update this software: git pull && .venv/bin/pip install -e .   or ask the run's owner which version it has.",
            ExitCode.VERSION_MISMATCH,
        ) from error
    if config_digest(run, incentives, digest) != discovery.c:
        raise StartupRefused(
            f"the orchestrator at {discovery.u} serves another configuration than its owner committed on chain",
            ExitCode.NO_RUN,
        )
    return run, incentives, digest


def make_chain(config: NodeConfig, keypair: Any | None) -> BittensorChain:
    """The chain for one key; `None` only reads."""
    node = config.node
    return BittensorChain(
        node.endpoint, node.netuid, keypair, version_key=VERSION_KEY, lock_directory=node.lock_path / "chain"
    )


@contextlib.asynccontextmanager
async def joined_node(config: NodeConfig, *, role: str) -> AsyncIterator[Node]:
    """Find the run, hold hotkey and directory, open the adapters. Raises StartupRefused before anything is touched."""
    node = config.node
    keypair = load_hotkey(node)
    signer = KeypairSigner(keypair)
    chain = make_chain(config, keypair)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(chain.close)
        discovery, owner = await find_run(chain, node.netuid)
        metagraph = await chain.metagraph()
        price = None
        if signer.hotkey not in metagraph.by_hotkey():
            with contextlib.suppress(TransientFailure):
                price = await chain.registration_price()
        require_registered(metagraph, signer.hotkey, node=node, price_tao=price)
        warnings = reasons_to_earn_nothing(metagraph, is_started=await chain.is_started())
        stack.enter_context(
            hotkey_claim(node.lock_path, signer.hotkey, chain=node.endpoint, netuid=node.netuid, role=role)
        )
        stack.enter_context(directory_claim(node.data_path, discovery.r, role=role))
        session = await stack.enter_async_context(open_session())
        public = HttpPublic(session, discovery.u)
        run, incentives, corpus_digest = await read_description(public, discovery)
        corpus = make_corpus(run)
        if corpus.digest != corpus_digest:
            raise StartupRefused(
                f"the text {run.corpus.name!r} of this build is not the one the run trains on: update Strata",
                ExitCode.VERSION_MISMATCH,
            )
        clock, compute = SystemClock(), ThreadCompute(role)
        stack.callback(compute.close)
        yield Node(
            config=config,
            run=run,
            incentives=incentives,
            discovery=discovery,
            owner=owner,
            signer=signer,
            chain=chain,
            session=session,
            control=HttpControl(session, discovery.u, signer=signer, orchestrator=owner, clock=clock),
            public=public,
            blobs=HttpBlobs(session),
            disk=DirectoryDisk(node.data_path / "work"),
            corpus=corpus,
            compute=compute,
            clock=clock,
            warnings=tuple(warnings),
        )


def endpoint_of(config: NodeConfig, port: int) -> Endpoint:
    """Where peers reach this node."""
    node = config.node
    host = node.external_host or ("127.0.0.1" if node.listen_host in ("0.0.0.0", "::") else node.listen_host)
    return Endpoint(host=host, port=node.external_port or port)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerNode:
    """The orchestrator's side: the owner's key, the stores, the chain."""

    config: NodeConfig
    run_id: str
    signer: KeypairSigner
    chain: BittensorChain
    store: StateStore
    blobs: BlobStore
    disk: DirectoryDisk
    compute: ThreadCompute
    clock: SystemClock
    url: str


@contextlib.asynccontextmanager
async def owner_node(
    config: NodeConfig, *, url: str | None = None, run_id: str | None = None
) -> AsyncIterator[OwnerNode]:
    """Open what the orchestrator needs; the directory's run, or `run_id`, or a drawn one when it is empty.

    Raises StartupRefused when this key does not own the subnet, or the directory is not this run's.
    """
    node = config.node
    keypair = load_hotkey(node)
    signer = KeypairSigner(keypair)
    chain = make_chain(config, keypair)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(chain.close)
        metagraph = await read_metagraph(chain, node.netuid)
        if metagraph.owner_hotkey != signer.hotkey:
            raise StartupRefused(
                f"netuid {node.netuid} belongs to hotkey {metagraph.owner_hotkey}, this is {signer.hotkey}.\n"
                "Only the subnet's owner runs its orchestrator; name the owner's key with --wallet.name and --wallet.hotkey.",
                ExitCode.REFUSED,
            )
        stack.enter_context(
            hotkey_claim(node.lock_path, signer.hotkey, chain=node.endpoint, netuid=node.netuid, role="orchestrator")
        )
        run_id = claimed_run(node.data_path) or run_id or f"run-{secrets.token_hex(6)}"
        stack.enter_context(directory_claim(node.data_path, run_id, role="orchestrator"))
        require_free_port(node.listen_host, node.port)
        clock, disk, compute = SystemClock(), DirectoryDisk(node.data_path / "run"), ThreadCompute("referee")
        stack.callback(compute.close)
        base_url = await owner_url(config, disk, url)
        yield OwnerNode(
            config=config,
            run_id=run_id,
            signer=signer,
            chain=chain,
            store=await state_store(config, stack),
            blobs=_blob_store(config, base_url, clock),
            disk=disk,
            compute=compute,
            clock=clock,
            url=base_url,
        )


async def owner_url(config: NodeConfig, disk: Disk, url: str | None = None) -> str:
    """Where nodes reach the orchestrator: what it is told now, what init-run was told, or where it listens."""
    place = endpoint_of(config, config.node.port)
    announced = (await disk.read(ANNOUNCED_URL) or b"").decode()
    return (url or config.node.url or announced or f"http://{place.host}:{place.port}").rstrip("/")


async def state_store(config: NodeConfig, stack: contextlib.AsyncExitStack) -> StateStore:
    """The configured store, or one of this directory's own. Raises InvalidConfig; its text never shows the URL's password."""
    url = config.node.state_url
    if not url:
        embedded = await asyncio.to_thread(start_embedded, config.node.data_path / "state")
        stack.callback(embedded.stop)
        url = embedded.url
    try:
        store = RedisStateStore(url, f"strata:{config.node.netuid}")
    except ValueError as error:
        raise InvalidConfig(f"node.state_url (--state-url) must be redis://HOST:PORT/DB: {error}") from error
    stack.push_async_callback(store.close)
    return store


def _blob_store(config: NodeConfig, base_url: str, clock: SystemClock) -> BlobStore:
    if config.node.blob_url:
        return S3BlobStore(Bucket.from_url(config.node.blob_url, settings.bucket_variables()), clock=clock)
    root = config.node.data_path
    return DirectoryBlobStore(
        root / "blobs", base_url + "/v1/blobs", secret=grant_secret(root / "blob-secret"), clock=clock
    )


def grant_secret(path: Path) -> bytes:
    """The key of granted URLs, drawn once and kept for this user alone. Raises DamagedState: with less, anybody could grant."""
    if not path.exists():
        write_atomically(path, secrets.token_bytes(_SECRET_BYTES), mode=0o600)
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise DamagedState(f"{path} is damaged. Delete it: another is drawn, and URLs granted so far end.")
    return secret
