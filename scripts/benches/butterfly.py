"""Butterfly of a 100 MB vector through the real merge and blob store, against gloo's all-reduce of as many bytes."""

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from benches.fleet import RUN, keys
from benches.hivemind_group import VARIABLE, hivemind_group
from benches.measure import Child, Line, answer_questions, children, fact, floor, limit, median, run_loop
from benches.owner import OWNER
from benches.uploads import CONFIG, EPOCH, NUM_ELEMENTS, STAGE, VECTOR_BYTES, merge_plan, vector
from neurons.roles.desk import Desk
from neurons.roles.sharing import Sharing
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import DirectoryBlobStore, HttpBlobs
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.http_server import mount_control
from subnet.adapters.listener import Listener
from subnet.adapters.system import SystemClock, ThreadCompute
from subnet.errors import ProtocolViolation
from subnet.merging.upload import chunk_digests, to_bytes, upload_digest
from subnet.orchestration.state import Member, State
from subnet.types import BlobRef, Endpoint, Hotkey, NumericMode


def store_process(connection: Connection, directory: str, hotkeys: list[Hotkey]) -> None:
    """The orchestrator's desk and blob routes; what is reported is compared and accepted as its state machine does."""
    run_loop(_serve(connection, Path(directory), hotkeys))


async def _serve(connection: Connection, directory: Path, hotkeys: list[Hotkey]) -> None:
    clock, listener = SystemClock(), Listener()
    await listener.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.port}"
    blobs = DirectoryBlobStore(directory, f"{url}/v1/blobs", secret=secrets.token_bytes(32), clock=clock)
    blobs.mount_on(listener)
    state = State(run_id=RUN, num_elements=(NUM_ELEMENTS,))
    for hotkey in hotkeys:
        endpoint = Endpoint(host="127.0.0.1", port=1)
        state.members[hotkey] = Member(hotkey, STAGE, endpoint, NumericMode.FP32, session="", first_epoch=EPOCH)
    desk = Desk(state=lambda: state, signer=OWNER, blobs=blobs, clock=clock)
    copies: dict[int, list[BlobRef]] = {}

    async def handle(sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        match envelope.request:
            case wire.RequestUpload() as request:
                return desk.grant_upload(sender, request)
            case wire.RequestDownload() as request:
                return desk.grant_download(sender, request)
            case wire.ReportReduced() as request:
                await desk.check(sender, request)
                for shard in request.shards:
                    copies.setdefault(shard.shard, []).append(shard.ref)
                return wire.Done()
            case wire.UploadDone():
                return wire.Done()
            case request:
                raise ProtocolViolation(f"no {type(request).__name__} here")

    mount_control(listener, handle, receiver=OWNER.hotkey, clock=clock)

    async def reply(question: Any) -> object:
        assert all(len({ref.digest for ref in refs}) == 1 for refs in copies.values())
        accepted = [wire.ReducedShard(shard=shard, ref=refs[0]) for shard, refs in sorted(copies.items())]
        copies.clear()
        return {"url": url, "cpu_s": time.process_time(), "merged": accepted}

    await answer_questions(connection, reply)
    await listener.stop()


def miner_process(connection: Connection, url: str, number: int) -> None:
    """One miner's sharing: commit, upload, reduce, download."""
    run_loop(_share(connection, url, keys(number + 1)[number]))


async def _share(connection: Connection, url: str, signer: KeypairSigner) -> None:
    async with open_session() as session:
        control = HttpControl(session, url, signer=signer, orchestrator=OWNER.hotkey, clock=SystemClock())
        sharing = Sharing(
            config=CONFIG, control=control, blobs=HttpBlobs(session), compute=ThreadCompute(), hotkey=signer.hotkey
        )
        data = to_bytes(vector(int(time.monotonic_ns() % 1_000_003)))

        async def reply(question: Any) -> object:
            began = time.monotonic()
            result: dict[str, object] = {}
            match question["do"]:
                case "upload":
                    result["digest"] = upload_digest(data)
                    result["chunks"] = chunk_digests(data, CONFIG.merge.chunk_bytes)
                    await sharing.upload(EPOCH, data)
                case "reduce":
                    await sharing.reduce(_plan(question))
                case "download":
                    merged = [_shard(shard) for shard in question["merged"]]
                    await sharing.download_merged(_plan(question), merged)
                    result["merged_s"] = time.monotonic() - began
            sent, received = (sharing.merges[-1].sent, sharing.merges[-1].received) if sharing.merges else (0, 0)
            return result | {"sent": sent, "received": received, "cpu_s": time.process_time()}

        await answer_questions(connection, reply)


def _shard(found: dict[str, Any]) -> wire.ReducedShard:
    return msgspec.convert(found, wire.ReducedShard)


def _plan(question: dict[str, Any]) -> wire.MergePlan:
    return msgspec.convert(question["plan"], wire.MergePlan)


def _ask_all(miners: tuple[Child, ...], question: dict[str, object]) -> list[dict[str, Any]]:
    for miner in miners:
        miner.tell(question)
    return [miner.answer() for miner in miners]


def merge_once(store: Child, miners: tuple[Child, ...], hotkeys: list[Hotkey]) -> dict[str, float]:
    """Wall seconds of the three parts, bytes of each miner, CPU of everybody."""
    before = [store.ask("state")["cpu_s"], *(found["cpu_s"] for found in _ask_all(miners, {"do": "nothing"}))]
    began = time.monotonic()
    uploaded = _ask_all(miners, {"do": "upload"})
    upload_s = time.monotonic() - began
    plan = merge_plan(hotkeys, uploaded, EPOCH)
    began = time.monotonic()
    _ask_all(miners, {"do": "reduce", "plan": plan})
    reduce_s = time.monotonic() - began
    reported = store.ask("merged")
    found = _ask_all(miners, {"do": "download", "plan": plan, "merged": reported["merged"]})
    download_s = max(one["merged_s"] for one in found)
    cpu_s = sum(one["cpu_s"] for one in found) + reported["cpu_s"] - sum(before)
    return {
        "upload_s": upload_s,
        "reduce_s": reduce_s,
        "download_s": download_s,
        "all_s": upload_s + reduce_s + download_s,
        "bytes": max(one["sent"] + one["received"] for one in found),
        "least_bytes": min(one["sent"] + one["received"] for one in found),
        "cpu_s": cpu_s,
    }


def gloo_process(connection: Connection, rank: int, size: int, port: int) -> None:
    """One rank of the all-reduce."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    values = torch.from_numpy(vector(rank))

    async def reply(question: Any) -> object:
        began = time.monotonic()
        dist.all_reduce(values)
        values.div_(size)
        return {"s": time.monotonic() - began, "cpu_s": time.process_time()}

    asyncio.run(answer_questions(connection, reply))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _merging(num_miners: int) -> Iterator[Callable[[], dict[str, float]]]:
    """A store and its miners; what merges once."""
    hotkeys = [key.hotkey for key in keys(num_miners)]
    with tempfile.TemporaryDirectory() as directory, children(Child(store_process, directory, hotkeys)) as [store]:
        url = store.ask("where")["url"]
        with children(*(Child(miner_process, url, number) for number in range(num_miners))) as miners:
            yield lambda: merge_once(store, miners, hotkeys)


def _lines(num_miners: int, merged: dict[str, float]) -> list[Line]:
    formula = 4 * VECTOR_BYTES + 2 * VECTOR_BYTES / num_miners
    error = max(abs(merged[name] / formula - 1.0) for name in ("bytes", "least_bytes"))
    moved_gb = num_miners * merged["bytes"] / 1e9
    return [
        fact(
            f"N = {num_miners}",
            f"{merged['all_s']:.2f} s: upload {merged['upload_s']:.2f}, reduce {merged['reduce_s']:.2f}, download "
            f"{merged['download_s']:.2f}; CPU of all {merged['cpu_s']:.1f}",
        ),
        fact("through one store", f"{moved_gb:.2f} GB, {moved_gb / merged['all_s']:.2f} GB/s"),
        limit(
            f"bytes of each miner, {merged['least_bytes'] / 1e6:.1f} to {merged['bytes'] / 1e6:.1f} MB, against "
            "4W + 2W/N, off by",
            100 * error,
            5,
            unit=" %",
        ),
    ]


def _compare(num_miners: int, repeats: int) -> list[Line]:
    port = _free_port()
    ranks = tuple(Child(gloo_process, rank, num_miners, port) for rank in range(num_miners))
    merges, reductions, averages = [], [], []
    with (
        children(*ranks),
        hivemind_group(num_miners, NUM_ELEMENTS) as hivemind,
        _merging(num_miners) as merge,
    ):
        _ask_all(ranks, {})
        for _ in range(repeats):
            reductions += [max(one["s"] for one in _ask_all(ranks, {})) for _ in range(3)]
            averages += [hivemind()] if hivemind is not None else []
            merges.append(merge())
    middle = {name: median([one[name] for one in merges]) for name in merges[0]}
    return [
        limit(f"merge / gloo all-reduce of {median(reductions):.2f} s", middle["all_s"] / median(reductions), 2.2),
        *_beside_hivemind(middle["all_s"], averages),
        *_lines(num_miners, middle),
    ]


def _beside_hivemind(merge_s: float, averages: list[float]) -> list[Line]:
    if not averages:
        return [fact("hivemind all-reduce / merge", "not measured", f"set {VARIABLE}, see benches/hivemind_peer.py")]
    average_s = median(averages)
    return [floor(f"hivemind all-reduce of {average_s:.2f} s, matchmaking left out, / merge", average_s / merge_s, 4)]


def bench(scale: float) -> list[Line]:
    """Four miners beside gloo and hivemind; eight and sixteen by themselves when there is time."""
    lines = _compare(4, max(1, round(scale)))
    for num_miners in (8, 16) if scale >= 2 else ():
        with _merging(num_miners) as merge:
            lines += _lines(num_miners, merge())
    return lines
