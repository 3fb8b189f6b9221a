"""`strata miner`: a miner as a process: wiring, port, counters, clean end. The role itself is roles/miner.py."""

import asyncio
import contextlib
import json
import logging
import secrets

import torch

from neurons.claims import require_free_port
from neurons.exit_codes import ExitCode
from neurons.lifecycle import Stop, run_role, until_stopped
from neurons.observe import frame_measures, miner_measures, observed
from neurons.roles.miner import Miner
from neurons.roles.ports import MinerPorts
from neurons.settings import NodeConfig
from neurons.wiring import Node, endpoint_of, joined_node
from subnet.adapters.peers import HttpPeers
from subnet.adapters.reach import Dialled, ask_reach
from subnet.adapters.system import DirectoryDisk
from subnet.errors import NotFound, ProtocolViolation, Refused, StartupRefused, StrataError, TransientFailure
from subnet.sim.strategies import make_worker
from subnet.types import Endpoint, FrameHeader

log = logging.getLogger("strata.miner")

COUNTERS = "counters.json"
COUNTERS_EVERY_S = 2.0


async def run_miner(config: NodeConfig, stop: Stop, *, cheat: str | None = None) -> None:
    """Work until stopped. Raises StartupRefused when it cannot start."""
    torch.set_num_threads(config.node.num_threads or torch.get_num_threads())
    async with joined_node(config, role="miner") as node:
        if config.node.mode not in node.run.training.modes:
            allowed = ", ".join(node.run.training.modes)
            raise StartupRefused(
                f"this run does not admit --mode {config.node.mode}; it admits {allowed}", ExitCode.INVALID_CONFIG
            )
        for warning in node.warnings:
            log.warning(warning)
        require_free_port(config.node.listen_host, config.node.port)

        def expect(header: FrameHeader) -> None:
            miner.expect(header)

        peers = HttpPeers(node.signer, session=node.session, clock=node.clock, expect=expect)
        endpoint = endpoint_of(config, config.node.port)
        miner = _miner(node, peers, endpoint, cheat)
        await peers.start(config.node.listen_host, config.node.port)
        try:
            async with observed(
                config,
                role="miner",
                health=miner.health,
                measures=lambda: [*miner_measures(miner), *frame_measures(peers.counters)],
            ):
                await until_stopped(stop, _work(node, miner, peers, endpoint))
            if miner.num_open_samples:
                stop.report_lost(f"{miner.num_open_samples} samples in flight")
            await _write_counters(node, miner, peers)
            with contextlib.suppress(StrataError):
                await miner.leave()
        finally:
            await peers.stop()


def _miner(node: Node, peers: HttpPeers, endpoint: Endpoint, cheat: str | None) -> Miner:
    ports = MinerPorts(
        signer=node.signer,
        control=node.control,
        peers=peers,
        blobs=node.blobs,
        disk=node.disk,
        corpus=node.corpus,
        compute=node.compute,
        clock=node.clock,
    )
    return Miner(
        config=node.run,
        discovery=node.discovery,
        orchestrator=node.owner,
        endpoint=endpoint,
        mode=node.config.node.mode,
        session=secrets.token_hex(8),
        ports=ports,
        make_worker=lambda config, stage, mode: make_worker(cheat, config, stage, mode),
    )


async def _work(node: Node, miner: Miner, peers: HttpPeers, endpoint: Endpoint) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(miner.run(), name="miner")
        group.create_task(peers.listener.wait_failed(), name="listener")
        group.create_task(_announce(node, endpoint), name="announce")
        group.create_task(_warn_if_unreachable(node, endpoint), name="reach")
        group.create_task(_count(node, miner, peers), name="counters")


async def _warn_if_unreachable(node: Node, endpoint: Endpoint) -> None:
    """Say soon that peers cannot dial this node: it would join, wait for activations, and earn nothing."""
    try:
        found = await ask_reach(node.session, node.discovery.u, endpoint.port)
    except (TransientFailure, NotFound, ProtocolViolation, Refused) as error:
        log.info("reach not known", extra={"reason": str(error)})
        return
    if found.dialled is not Dialled.OPEN:
        log.warning(
            "peers cannot reach this node; meanwhile their frames come through the run's store, which takes longer. Open "
            "its port, forward it, or name another with --external-port; strata doctor --role miner says more",
            extra={"address": found.address, "port": found.port, "dialled": found.dialled},
        )


async def _announce(node: Node, endpoint: Endpoint) -> None:
    """Put the endpoint on chain, as tools of the ecosystem expect; the run itself does not need it."""
    try:
        await node.chain.serve(endpoint)
    except (TransientFailure, Refused) as error:
        log.warning("endpoint not announced on chain", extra={"reason": str(error)})


async def _count(node: Node, miner: Miner, peers: HttpPeers) -> None:
    while True:
        await node.clock.sleep(COUNTERS_EVERY_S)
        await _write_counters(node, miner, peers)


async def _write_counters(node: Node, miner: Miner, peers: HttpPeers) -> None:
    counters = miner.counters() | {"frame_head_bytes_sent": peers.counters.head_bytes_sent}
    await DirectoryDisk(node.config.node.data_path).write(COUNTERS, json.dumps(counters).encode())


def main(config: NodeConfig, cheat: str | None = None) -> int:
    """Run a miner until SIGTERM or Ctrl-C; returns the exit code."""
    return run_role(
        lambda stop: run_miner(config, stop, cheat=cheat),
        role="miner",
        log_level=config.node.log_level,
        log_file=config.node.log_file,
    )


if __name__ == "__main__":
    from neurons.cli import main_as

    main_as("miner")
