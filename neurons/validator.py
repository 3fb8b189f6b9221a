"""`strata validator`: a validator as a process. The role itself is roles/validator.py."""

import itertools
import logging

import torch

from neurons.lifecycle import Stop, run_role, until_stopped
from neurons.observe import observed, validator_measures, weights_health, weights_measures
from neurons.roles.noise import own_noise
from neurons.roles.validator import Validator, ValidatorPorts
from neurons.settings import NodeConfig
from neurons.wiring import joined_node

log = logging.getLogger("strata.validator")


async def run_validator(config: NodeConfig, stop: Stop) -> None:
    """Audit, score and set weights until stopped. Raises StartupRefused when it cannot start."""
    torch.set_num_threads(config.node.num_threads or torch.get_num_threads())
    async with joined_node(config, role="validator") as node:
        for warning in node.warnings:
            log.warning(warning)
        ports = ValidatorPorts(
            signer=node.signer,
            control=node.control,
            blobs=node.blobs,
            public=node.public,
            chain=node.chain,
            corpus=node.corpus,
            compute=node.compute,
            clock=node.clock,
        )
        noise = await own_noise(node.run, config.node.mode, disk=node.disk, corpus=node.corpus, compute=node.compute)
        validator = Validator(config=node.run, discovery=node.discovery, owner=node.owner, noise=noise, ports=ports)
        async with observed(
            config,
            role="validator",
            health=lambda: {**validator.health(), **weights_health(node.chain)},
            measures=lambda: itertools.chain(validator_measures(validator), weights_measures(node.chain)),
        ):
            await until_stopped(stop, validator.run())
        if validator.num_open_audits:
            stop.report_lost(f"{validator.num_open_audits} audits not answered")


def main(config: NodeConfig) -> int:
    """Run a validator until SIGTERM or Ctrl-C; returns the exit code."""
    return run_role(
        lambda stop: run_validator(config, stop),
        role="validator",
        log_level=config.node.log_level,
        log_file=config.node.log_file,
    )


if __name__ == "__main__":
    from neurons.cli import main_as

    main_as("validator")
