"""`strata devnet`: the development chain node as a process."""

from neurons.lifecycle import Stop, run_role
from subnet.devnet.config import DevnetConfig
from subnet.devnet.node import Node


def run_devnet(config: DevnetConfig) -> int:
    """Serve a chain until told to stop; returns the exit code."""

    async def serve(stop: Stop) -> None:
        async with Node(config).running() as node:
            print(f"devnet listens on {node.url}; try: btcli subnets list -n {node.url}", flush=True)  # noqa: T201  # the answer
            await stop.wait()

    return run_role(serve, role="devnet")
