"""The process of one stage host: reads its own params, checks the machine, listens until it is told to stop."""

import asyncio
import os
import sys

import torch

from neurons.claims import require_free_port
from neurons.lifecycle import Stop, log, until_stopped
from neurons.serving.children import LISTENS
from neurons.serving.host import StageHost
from neurons.serving.options import ServeOptions
from subnet.adapters.model_files import ModelDirectory, total_bytes
from subnet.adapters.serving_link import name_of
from subnet.adapters.system import ThreadCompute
from subnet.inference.cache import CacheBook
from subnet.inference.decode import ROWS, rows_are_independent, torch_dtype
from subnet.inference.engine import Engine, make_engine, mode_of
from subnet.inference.messages import Welcome
from subnet.types import Endpoint


def load_stage(directory: ModelDirectory, options: ServeOptions) -> tuple[Engine, bool]:
    """The layers of one stage, and whether a row's bits are its own on this machine. Raises InvalidConfig."""
    served, (stage, num_stages) = directory.served, options.stage_of
    tensors = directory.tensors(served.tensor_names(stage, num_stages), torch_dtype(served.dtype))
    log.info("params read", extra={"stage": options.stage, "size_bytes": total_bytes(tensors.values())})
    max_positions = options.positions(served.max_positions)
    engine, runners = make_engine(served, stage, num_stages, tensors, max_positions=max_positions)
    if all(rows_are_independent(runner) for runner in runners):
        return engine, True
    for runner in runners:
        runner.rows_at_once = ROWS
    log.warning("rows depend on their company here: they are computed a few at a time", extra={"rows": ROWS})
    return engine, all(rows_are_independent(runner) for runner in runners)


async def run_host(directory: ModelDirectory, options: ServeOptions, serve_key: str, stop: Stop) -> None:
    """Hold one stage until `stop`. Raises InvalidConfig, StartupRefused."""
    stage, num_stages = options.stage_of
    require_free_port(options.listen_host, options.port)
    torch.set_num_threads(options.num_threads or os.cpu_count() or 1)
    compute = ThreadCompute("stage-host")
    try:
        engine, is_independent = await compute.run(lambda: load_stage(directory, options))
        welcome = Welcome(
            stage=stage,
            num_stages=num_stages,
            model=directory.digest,
            mode=mode_of(directory.served),
            limit_tokens=options.cache_tokens,
            max_positions=options.positions(directory.served.max_positions),
            is_independent=is_independent,
        )
        host = StageHost(
            engine=engine,
            book=CacheBook(engine.cache_shape, options.cache_tokens),
            welcome=welcome,
            compute=compute,
            shared_key=serve_key.encode(),
        )
        await host.server.start(options.listen_host, options.port)
        print(f"{LISTENS}{name_of(Endpoint(host=options.listen_host, port=host.server.port))}", flush=True)  # noqa: T201
        log.info("stage host ready", extra={"stage": options.stage, "is_independent": is_independent})
        follower = asyncio.create_task(_stop_at_eof(stop)) if options.until_eof else None
        try:
            await until_stopped(stop, host.work())
        finally:
            if follower is not None:
                follower.cancel()
            await host.server.stop()
    finally:
        compute.close()


async def _stop_at_eof(stop: Stop) -> None:
    """Ask to stop once nobody holds the other end of the standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    stop.request("whoever started this host is gone")
