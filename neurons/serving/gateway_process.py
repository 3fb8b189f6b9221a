"""The process of a gateway: finds the hosts, listens for clients, and ends their completions before itself."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console

from neurons import settings
from neurons.claims import require_free_port
from neurons.lifecycle import Stop, log
from neurons.serving.completions import Limits
from neurons.serving.gateway import Gateway, Model, find_num_stages
from neurons.serving.http import CompletionsApi, Text
from neurons.serving.options import ServeOptions
from subnet.adapters.listener import Listener
from subnet.adapters.model_files import ModelDirectory
from subnet.adapters.serving_link import name_of
from subnet.adapters.system import SystemClock
from subnet.config import DiffusionContext
from subnet.inference.engine import mode_of
from subnet.inference.jobs import BatchLimits
from subnet.inference.served import ServedModel
from subnet.types import Endpoint

READY_S = 600.0
"""For the hosts to answer for the first time."""
DRAIN_S = 4.0
"""For completions to end after a request to stop; the process has about six seconds in all (lifecycle)."""


async def run_gateway(
    directory: ModelDirectory, options: ServeOptions, hosts: Sequence[Endpoint], keys: tuple[str, str], stop: Stop
) -> None:
    """Serve clients until `stop`; `keys` are those of hosts and of clients. Raises StartupRefused, TransientFailure."""
    serve_key, api_key = keys
    clock, listener = SystemClock(), Listener()
    require_free_port(options.listen_host, options.port)
    num_stages = await find_num_stages(hosts, shared_key=serve_key.encode(), clock=clock, timeout_s=READY_S)
    gateway = Gateway(
        hosts,
        Model(digest=directory.digest, mode=mode_of(directory.served), num_stages=num_stages),
        session=secrets.token_hex(16),
        shared_key=serve_key.encode(),
        clock=clock,
        limits=BatchLimits(
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            request_s=options.request_s,
            failover_s=options.failover_s,
        ),
    )
    api = _api(gateway, directory, options, clock, api_key)
    api.mount(listener)
    await listener.start(options.listen_host, options.port)
    try:
        async with asyncio.TaskGroup() as group:
            work = group.create_task(gateway.work())
            failed = group.create_task(listener.wait_failed())
            announced = group.create_task(_announce(gateway, listener, options, api))
            await stop.wait()
            await _drain(gateway, api, stop)
            for task in (work, failed, announced):
                task.cancel()
    finally:
        await listener.stop()


def _api(
    gateway: Gateway, directory: ModelDirectory, options: ServeOptions, clock: SystemClock, api_key: str
) -> CompletionsApi:
    tokenizer, served = directory.tokenizer(), directory.served
    text = Text(
        encode=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        eos_ids=served.eos_ids,
        vocab_size=served.run.model.vocab_size,
    )
    max_positions = options.positions(served.max_positions)
    return CompletionsApi(
        gateway,
        text,
        names=model_names(served, options.name or directory.name),
        limits=Limits(
            max_positions=min(max_positions, options.cache_tokens),
            max_tokens=min(max_positions, options.max_tokens),
        ),
        clock=clock,
        api_key=api_key,
        version=version("strata"),
    )


def model_names(served: ServedModel, name: str) -> dict[str, int]:
    """Model ids, and how many tokens come at once under each; 0: all of the answer, in one sweep."""
    if not served.is_denoising:
        return {name: 1}
    names = {name: 1, f"{name}:per-token": 1}
    if served.run.blocktrain.context is DiffusionContext.CONCAT:
        names[f"{name}:sweep"] = 0
    return names


async def _announce(gateway: Gateway, listener: Listener, options: ServeOptions, api: CompletionsApi) -> None:
    """Say where it is and how to ask, once every stage has a host."""
    if not await gateway.until_whole(READY_S):
        log.warning("a stage has no host", extra={"hosts": gateway.trouble})
    url = f"http://{name_of(Endpoint(host=options.listen_host, port=listener.port))}"
    out = Console(soft_wrap=True, highlight=False)
    out.print(f"strata serves {next(iter(api.names))} at {url}/v1", markup=False)
    key = f'-H "Authorization: Bearer ${settings.API_KEY_VARIABLE}" ' if api.needs_key else ""
    out.print(
        f"  curl -N {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{api.example}'", markup=False
    )


async def _drain(gateway: Gateway, api: CompletionsApi, stop: Stop) -> None:
    """Take no more; let what runs end while there is time, then tell the rest."""
    api.is_stopping = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await gateway.until_idle()
    left = gateway.batcher.num_running + gateway.batcher.num_waiting
    if left:
        stop.report_lost(f"{left} completions that had not ended")
    gateway.end_all()
    await asyncio.sleep(0)
