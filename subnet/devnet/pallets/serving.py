"""Axons: where a neuron can be reached."""

from collections.abc import Mapping
from typing import Any

from subnet.devnet.context import Context

_IP_VERSIONS = {4: 2**32 - 1, 6: 2**128 - 1}


def _serve_axon(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """Store an endpoint, at most once in `ServingRateLimit` blocks.

    Mainnet refuses loopback addresses; here they are what a local subnet needs.
    """
    netuid = args["netuid"]
    ctx.require(ctx.get("Uids", netuid, who) is not None, "HotKeyNotRegisteredInNetwork")
    ctx.require(args["ip_type"] in _IP_VERSIONS, "InvalidIpType")
    ctx.require(0 < args["ip"] < _IP_VERSIONS[args["ip_type"]], "InvalidIpAddress")
    ctx.require(args["port"] > 0, "InvalidPort")
    previous = ctx.get("Axons", netuid, who)
    is_due = previous is None or ctx.block - previous["block"] >= ctx.get("ServingRateLimit", netuid)
    ctx.require(is_due, "ServingRateLimitExceeded")
    fields = ("version", "ip", "port", "ip_type", "protocol", "placeholder1", "placeholder2")
    ctx.put("Axons", {"block": ctx.block, **{field: args[field] for field in fields}}, netuid, who)
    ctx.emit("SubtensorModule", "AxonServed", [netuid, who])


CALLS = {("SubtensorModule", "serve_axon"): _serve_axon}
