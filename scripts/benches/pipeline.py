"""Tokens/s of a whole local subnet, three stages on real sockets, against its own compute and against one process."""

import asyncio
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benches.fleet import keys
from benches.measure import Child, Line, answer_questions, children, fact, floor, run_loop
from benches.owner import OWNER, discovery, orchestrator_process
from benches.shapes import training_config
from incentives.config import IncentiveConfig
from neurons.init_run import create_run
from neurons.roles.miner import Miner
from neurons.roles.ports import MinerPorts
from subnet.adapters.blobs import DirectoryBlobStore, HttpBlobs
from subnet.adapters.corpus import make_corpus
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.peers import HttpPeers
from subnet.adapters.system import DirectoryDisk, SystemClock, ThreadCompute
from subnet.config import RunConfig
from subnet.model.flat import unflatten
from subnet.model.init import initial_params
from subnet.model.partition import param_shapes
from subnet.model.whole import WholeModel
from subnet.orchestration.events import encode_event
from subnet.training.optimizers import InnerOptimizer
from subnet.training.pipeline import StageWorker
from subnet.types import Endpoint, Epoch, FrameHeader, NumericMode, SampleId, StageIndex
from subnet.wire import sample_key

NUM_STAGES = 3
RUN_ID = "bench"
_WINDOW_S = 12.0


def pipeline_config() -> RunConfig:
    """As the budget names it, with segments long enough that draining is not what is measured."""
    return training_config(num_layers=3, microbatch_size=2, accumulate=8, checkpoint_every=4)


def miner_process(connection: Connection, url: str, directory: str, number: int) -> None:
    """One miner as it runs, except that no chain is asked where the run is."""
    torch.set_num_threads(1)
    run_loop(_mine(connection, url, Path(directory), number))


async def _mine(connection: Connection, url: str, directory: Path, number: int) -> None:
    def expect(header: FrameHeader) -> None:
        miner.expect(header)

    config, me, clock, compute = pipeline_config(), keys(NUM_STAGES)[number], SystemClock(), ThreadCompute()
    async with open_session() as session:
        peers = HttpPeers(me, session=session, clock=clock, expect=expect)
        await peers.start("127.0.0.1", 0)
        miner = Miner(
            config=config,
            discovery=discovery(RUN_ID),
            orchestrator=OWNER.hotkey,
            endpoint=Endpoint(host="127.0.0.1", port=peers.port),
            mode=NumericMode.FP32,
            session=str(number),
            ports=MinerPorts(
                signer=me,
                control=HttpControl(session, url, signer=me, orchestrator=OWNER.hotkey, clock=clock),
                peers=peers,
                blobs=HttpBlobs(session),
                disk=DirectoryDisk(directory / f"m{number}"),
                corpus=make_corpus(config),
                compute=compute,
                clock=clock,
            ),
        )

        async def reply(question: Any) -> object:
            return {"cpu_s": time.process_time(), "batches": miner.num_batches}

        work = asyncio.create_task(miner.run())
        questions = asyncio.create_task(answer_questions(connection, reply))
        await asyncio.wait({work, questions}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
        await peers.stop()
        compute.close()


def compute_process(connection: Connection, number: int) -> None:
    """The same stage's worker fed synthetic payloads: no network, no records."""
    torch.set_num_threads(1)
    config, stage = pipeline_config(), StageIndex(number)
    worker, corpus = StageWorker(config, stage), make_corpus(config)
    worker.load(initial_params(config, stage))
    payload = bytes(int(np.prod(config.wire_shape)) * config.wire_item_bytes)
    is_last = number == NUM_STAGES - 1

    async def reply(question: Any) -> object:
        for sample in range(int(question)):
            key = sample_key(Epoch(0), SampleId(sample), 0)
            worker.forward(key, corpus.tokens(Epoch(0), SampleId(sample)), payload if number else None)
            worker.backward(key, None if is_last else payload)
            if worker.num_accumulated == config.training.accumulate:
                worker.step()
        return {"cpu_s": time.process_time()}

    asyncio.run(answer_questions(connection, reply))


def whole_process(connection: Connection, num_threads: int) -> None:
    """The same model, optimizers and rounding in one process."""
    torch.set_num_threads(num_threads)
    config = pipeline_config()
    stages = [StageIndex(index) for index in range(NUM_STAGES)]
    optimizers = [InnerOptimizer(config, stage, param_shapes(config, stage)) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        optimizer.load(unflatten(initial_params(config, stage), param_shapes(config, stage)))
    whole, corpus, accumulate = WholeModel(config), make_corpus(config), config.training.accumulate

    async def reply(question: Any) -> object:
        for sample in range(int(question)):
            tokens = torch.from_numpy(np.array(corpus.tokens(Epoch(0), SampleId(sample))))
            (whole.loss([optimizer.params for optimizer in optimizers], tokens) / accumulate).backward()  # type: ignore[no-untyped-call]
            if (sample + 1) % accumulate == 0:
                for optimizer in optimizers:
                    gradients = {name: param.grad for name, param in optimizer.params.items() if param.grad is not None}
                    optimizer.step(gradients)
                    for param in optimizer.params.values():
                        param.grad = None
        return {"cpu_s": time.process_time()}

    asyncio.run(answer_questions(connection, reply))


def _rate(workers: tuple[Child, ...], num_samples: int) -> tuple[float, float]:
    """Samples a second and CPU seconds a sample of processes that each do `num_samples`."""
    before = [worker.ask(0)["cpu_s"] for worker in workers]
    began = time.monotonic()
    for worker in workers:
        worker.tell(num_samples)
    after = [worker.answer()["cpu_s"] for worker in workers]
    return num_samples / (time.monotonic() - began), (sum(after) - sum(before)) / num_samples


def _subnet_rate(owner: Child, miners: tuple[Child, ...], window_s: float) -> tuple[float, float, float]:
    """Samples a second of the running subnet; CPU a sample of its miners, and of its orchestrator."""
    deadline = time.monotonic() + 120.0
    while owner.ask("state")["losses"] < 2 * NUM_STAGES:
        if time.monotonic() > deadline:
            raise TimeoutError("the subnet completed no sample within 120 s")
        time.sleep(0.5)
    before, cpu_before = owner.ask("state"), sum(miner.ask("cpu")["cpu_s"] for miner in miners)
    done_before, began = miners[0].ask("batches")["batches"], time.monotonic()
    time.sleep(window_s)
    done, took_s = miners[0].ask("batches")["batches"] - done_before, time.monotonic() - began
    after, cpu_after = owner.ask("state"), sum(miner.ask("cpu")["cpu_s"] for miner in miners)
    return done / took_s, (cpu_after - cpu_before) / done, (after["cpu_s"] - before["cpu_s"]) / done


async def _genesis(directory: Path) -> str:
    blobs = DirectoryBlobStore(directory / "blobs", "http://127.0.0.1", secret=b"bench", clock=SystemClock())
    config = pipeline_config()
    created = await create_run(
        config,
        IncentiveConfig(),
        run_id=RUN_ID,
        owner=OWNER.hotkey,
        corpus_digest=make_corpus(config).digest,
        blobs=blobs,
        beacon="bench",
        at_s=time.time(),
    )
    return encode_event(created).decode()


def _measure_subnet(window_s: float) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as directory:
        hotkeys = [key.hotkey for key in keys(NUM_STAGES)]
        genesis = asyncio.run(_genesis(Path(directory)))
        owner = Child(orchestrator_process, directory, hotkeys, genesis)
        with children(owner):
            url = owner.ask("where")["url"]
            miners = tuple(Child(miner_process, url, directory, number) for number in range(NUM_STAGES))
            with children(*miners):
                return _subnet_rate(owner, miners, window_s)


def bench(scale: float) -> list[Line]:
    """Compute bound and single processes before and after the subnet's window; the better of each."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads would eat the cores of the other side
    config, num_samples = pipeline_config(), max(8, round(8 * scale))
    tokens = config.training.microbatch_size * config.training.num_tokens
    stages = tuple(Child(compute_process, number) for number in range(NUM_STAGES))
    singles = tuple(Child(whole_process, count) for count in (1, os.cpu_count() or 1))
    with children(*stages, *singles):
        bounds, alone = [], []
        for child in (*stages, *singles):
            child.ask(1)
        for is_last in (False, True):
            bounds.append(_rate(stages, num_samples))
            alone.append([_rate((single,), num_samples) for single in singles])
            if not is_last:
                subnet_rate, subnet_cpu_s, owner_cpu_s = _measure_subnet(_WINDOW_S * scale)
    bound_rate, bound_cpu_s = max(rate for rate, _ in bounds), min(cpu_s for _, cpu_s in bounds)
    singles_rate = [max(turn[side][0] for turn in alone) for side in range(len(singles))]
    singles_cpu_s = [min(turn[side][1] for turn in alone) for side in range(len(singles))]
    return [
        floor("subnet / the same workers without network, wall", subnet_rate / bound_rate, 0.85),
        floor("subnet / the same model in one process (best thread count), wall", subnet_rate / max(singles_rate), 1.0),
        fact(
            "tokens/s",
            f"subnet {subnet_rate * tokens:.0f}, workers alone {bound_rate * tokens:.0f}, one process with 1 and all threads "
            + ", ".join(f"{rate * tokens:.0f}" for rate in singles_rate),
        ),
        fact(
            "CPU a sample",
            f"miners {subnet_cpu_s:.2f} s, of which workers alone {bound_cpu_s:.2f} s ({bound_cpu_s / subnet_cpu_s:.2f}); "
            f"orchestrator {1e3 * owner_cpu_s:.0f} ms; one process "
            + ", ".join(f"{cpu_s:.2f}" for cpu_s in singles_cpu_s),
        ),
    ]
