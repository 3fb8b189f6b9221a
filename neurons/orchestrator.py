"""`strata orchestrator` and `strata init-run`: stores, routes, creating a run. The role itself is roles/orchestrator.py."""

import asyncio
import logging
import re
import sys

import msgspec

from neurons.description import config_digest
from neurons.exit_codes import ExitCode
from neurons.leader import Leadership, holder_name
from neurons.lifecycle import Stop, run_role, until_stopped
from neurons.observe import observed, run_measures
from neurons.owner_checks import config_findings, require_usable
from neurons.page import offer_page
from neurons.roles.orchestrator import Orchestrator
from neurons.roles.ports import OrchestratorPorts
from neurons.scoring import parse_discovery
from neurons.settings import NodeConfig
from neurons.wiring import ANNOUNCED_URL, OwnerNode, owner_node
from subnet import wire
from subnet.adapters.blobs import DirectoryBlobStore
from subnet.adapters.corpus import make_corpus
from subnet.adapters.http_server import mount_control, mount_status
from subnet.adapters.listener import Listener
from subnet.adapters.reach import mount_reach
from subnet.dashboard.views import run_view
from subnet.errors import InvalidConfig, NotFound, ProtocolViolation, StartupRefused
from subnet.orchestration.events import Created, decode_event, encode_event

log = logging.getLogger("strata.orchestrator")

GENESIS = "genesis.json"
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


async def run_orchestrator(config: NodeConfig, stop: Stop) -> None:
    """Serve the run of this directory until stopped, creating it when there is none yet."""
    async with owner_node(config) as node:
        genesis = await _genesis(node)
        if genesis is None:
            await _refuse_other_run(node)
            genesis = await _create(node)
        _check_config(config, genesis)
        leadership = Leadership(node.store, node.clock, holder=holder_name(config.node.data_path))
        await until_stopped(stop, leadership.take(_say_standing_by))
        if stop.is_requested:
            return
        try:
            await _serve(node, genesis, leadership, stop)
        finally:
            await leadership.give_up()


def _say_standing_by(leader: str) -> None:
    sys.stderr.write(f"standing by: {leader} leads this run; this orchestrator takes over when it is gone\n")


async def announce_run(config: NodeConfig, *, url: str, run_id: str | None) -> str:
    """Create a run, store its genesis, and put it on chain; returns its id. Raises StartupRefused when there is one."""
    if run_id is not None and not _RUN_ID.fullmatch(run_id):  # it stands in every key of the store
        raise InvalidConfig(
            f"--run-id takes up to 64 letters, digits, dashes, dots and underscores, got {run_id[:80]!r}"
        )
    async with owner_node(config, url=url, run_id=run_id) as node:
        if await _genesis(node) is not None:
            raise StartupRefused(
                f"{config.node.data_path} holds a run already; nothing was changed. Name another with --data-dir.",
                ExitCode.FOREIGN_DIRECTORY,
            )
        genesis = await _create(node)
        await node.disk.write(ANNOUNCED_URL, url.encode())
        await node.chain.commit(wire.encode(_discovery(node, genesis)))
        return genesis.run_id


async def _genesis(node: OwnerNode) -> Created | None:
    data = await node.disk.read(GENESIS)
    if data is None:
        return None
    try:
        event = decode_event(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupRefused(
            f"{node.config.node.data_path}/run/{GENESIS} is damaged: {error}. Restore it from a backup.",
            ExitCode.DAMAGED_STATE,
        ) from error
    if not isinstance(event, Created):
        raise StartupRefused(f"{GENESIS} does not create a run", ExitCode.DAMAGED_STATE)
    return event


async def _refuse_other_run(node: OwnerNode) -> None:
    """An empty directory beside a run on chain is a mistake of paths, not the wish for a new run."""
    try:
        found = parse_discovery(await node.chain.commitment(node.signer.hotkey))
    except (NotFound, ProtocolViolation):
        return
    raise StartupRefused(
        f"netuid {node.config.node.netuid} has run {found.r} on chain, and {node.config.node.data_path} does not hold it.\n"
        "Name its directory with --data-dir, or begin a new run with: strata init-run",
        ExitCode.FOREIGN_DIRECTORY,
    )


async def _create(node: OwnerNode) -> Created:
    from neurons.init_run import create_run  # brings torch, which serving a run that exists does without

    config = node.config
    require_usable(config.run)
    corpus = make_corpus(config.run)
    block = await node.chain.block()
    created = await create_run(
        config.run,
        config.incentives,
        run_id=node.run_id,
        owner=node.signer.hotkey,
        corpus_digest=corpus.digest,
        blobs=node.blobs,
        beacon=await node.chain.block_hash(max(0, block - 10)) or f"{block}",
        at_s=node.clock.now(),
    )
    await node.disk.write(GENESIS, encode_event(created))
    log.info("run created", extra={"run": created.run_id, "stages": len(created.snapshots)})
    return created


def _check_config(config: NodeConfig, genesis: Created) -> None:
    """A run keeps the configuration it was created with."""
    ours = (wire.encode(config.run).decode(), wire.encode(config.incentives).decode())
    if ours != (genesis.config_json, genesis.incentives_json):
        raise StartupRefused(
            f"the configuration differs from the one run {genesis.run_id} was created with; nodes have pinned that one.\n"
            "Start with the old configuration, or begin a new run with: strata init-run",
            ExitCode.INVALID_CONFIG,
        )


def _discovery(node: OwnerNode, genesis: Created) -> wire.Discovery:
    return wire.Discovery(
        u=node.url,
        r=genesis.run_id,
        v=wire.PROTOCOL_VERSION,
        c=config_digest(node.config.run, node.config.incentives, genesis.corpus_digest),
    )


async def _serve(node: OwnerNode, genesis: Created, leadership: Leadership, stop: Stop) -> None:
    orchestrator = Orchestrator(
        config=node.config.run,
        ports=OrchestratorPorts(
            signer=node.signer,
            store=node.store,
            blobs=node.blobs,
            chain=node.chain,
            compute=node.compute,
            clock=node.clock,
            may_lead=leadership.may_lead,
        ),
        discovery=_discovery(node, genesis),
        genesis=lambda: genesis,
    )
    listener = Listener()
    now = node.clock.now()  # the lease is held: whoever led before takes nothing any more
    mount_control(listener, orchestrator.handle, receiver=node.signer.hotkey, clock=node.clock, taken_over_s=now)
    offer_page(listener, orchestrator.public, node.chain)

    mount_reach(listener)

    def health() -> dict[str, object]:
        state = orchestrator.state
        return {"run": genesis.run_id, "epoch": state.epoch, "phase": state.phase}

    mount_status(listener, health=health)
    if isinstance(node.blobs, DirectoryBlobStore):
        node.blobs.mount_on(listener)
    await listener.start(node.config.node.listen_host, node.config.node.port)
    try:
        async with observed(
            node.config,
            role="orchestrator",
            health=health,
            measures=lambda: run_measures(run_view(orchestrator.state)),
        ):
            await until_stopped(stop, _work(orchestrator, listener, leadership))
    finally:
        await listener.stop()


async def _work(orchestrator: Orchestrator, listener: Listener, leadership: Leadership) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(leadership.keep(), name="leadership")
        group.create_task(orchestrator.run(), name="orchestrator")
        group.create_task(listener.wait_failed(), name="listener")


def init_run(config: NodeConfig, url: str, run_id: str | None) -> int:
    """Create a run and announce it; returns the exit code."""

    async def create(_stop: Stop) -> None:
        for finding in config_findings(config.run):
            log.warning(finding.text, extra={"remedy": finding.remedy})
        created = await announce_run(config, url=url, run_id=run_id)
        sys.stdout.write(
            f"run {created} is announced on netuid {config.node.netuid}, its genesis lies in {config.node.data_path}\n"
            "start its orchestrator with the same configuration: strata orchestrator ...\n"
        )

    return run_role(create, role="init-run", log_level=config.node.log_level, log_file=config.node.log_file)


def main(config: NodeConfig) -> int:
    """Run the orchestrator until SIGTERM or Ctrl-C; returns the exit code."""
    return run_role(
        lambda stop: run_orchestrator(config, stop),
        role="orchestrator",
        log_level=config.node.log_level,
        log_file=config.node.log_file,
    )


if __name__ == "__main__":
    from neurons.cli import main_as

    main_as("orchestrator")
