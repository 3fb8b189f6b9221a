"""A model served by three processes: the official client, equal tokens, lost hosts, crowds, strangers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from subnet.config import Bottleneck, Objective
from subnet.inference.jobs import BatchLimits
from subnet.types import Endpoint
from tests.integration.serving import HostProcess, Served, host_processes, serving
from tests.unit.exported import blocktrain_config, run_config, write_model

PROMPT = "The state of the union"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(run_config(Bottleneck.RESBM), tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def hosts(place: Path) -> Iterator[list[Endpoint]]:
    with host_processes(place, [0, 1, 2]) as started:
        yield [host.endpoint for host in started]


@pytest.fixture(scope="module")
def model(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(place, tmp_path_factory.mktemp("modules"))


def loaded(place: Path, modules: Path) -> Any:
    """By transformers, with the class that comes with it copied to `modules`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
        return AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)


@pytest.fixture
async def served(place: Path, hosts: list[Endpoint]) -> AsyncIterator[Served]:
    async with serving(place, hosts) as started:
        assert await started.gateway.until_whole(20)
        yield started
        await started.assert_nothing_left()


def generated(model: Any, prompt: str, max_tokens: int = MAX_TOKENS) -> str:
    """What transformers makes of it, one request at a time."""
    ids = torch.tensor([list(prompt.encode())])
    found = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
    return bytes(found).decode(errors="replace")


async def streamed(served: Served, prompt: str, max_tokens: int = MAX_TOKENS) -> str:
    stream = await served.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_the_official_client_streams_what_transformers_generates(served: Served, model: Any) -> None:
    prompts = [PROMPT, "peace", "\n\n", "We shall " * 9]
    found = await asyncio.gather(*(streamed(served, prompt) for prompt in prompts))
    assert found == [generated(model, prompt) for prompt in prompts]
    assert [entry.id async for entry in served.client.models.list()] == ["tiny"]


async def test_a_stream_tells_its_usage_once_and_at_its_end(served: Served) -> None:
    """And what left before its end, or ended badly after its beginning, is counted as that."""
    stream = await served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, n=2, stream=True, stream_options={"include_usage": True}
    )
    assert stream.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *pieces, last = [piece async for piece in stream]
    assert {piece.usage for piece in pieces} == {None}
    assert sorted(choice.finish_reason for piece in pieces for choice in piece.choices if choice.finish_reason) == [
        "length",
        "length",
    ]
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 16)
    assert served.api.num_requests == {200: 1}


async def test_whole_answers(served: Served, model: Any) -> None:
    answer = await served.client.completions.create(
        model="tiny", prompt=[PROMPT, "peace"], max_tokens=MAX_TOKENS, temperature=0, n=2, logprobs=2
    )
    expected = [generated(model, PROMPT), generated(model, "peace")]
    assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT) + 5, 4 * MAX_TOKENS)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == MAX_TOKENS
    likeliest = [max(top.values()) for top in logprobs.top_logprobs]
    assert likeliest == pytest.approx(logprobs.token_logprobs)


async def test_a_stop_text_ends_the_answer_and_frees_the_caches(served: Served, model: Any) -> None:
    whole = generated(model, PROMPT)
    stop = whole[6:8]
    answer = await served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_a_seed_repeats_a_draw(served: Served) -> None:
    async def drawn(seed: int) -> str:
        answer = await served.client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=seed, temperature=1.2, top_p=0.95
        )
        return answer.choices[0].text

    first, again, other = await asyncio.gather(drawn(5), drawn(5), drawn(6))
    assert first == again != other


async def test_a_client_that_goes_away_leaves_nothing(served: Served) -> None:
    stream = await served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, temperature=0, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await served.gateway.until_idle()
    assert served.api.num_requests == {499: 1}
    whole = asyncio.create_task(streamed(served, "peace", 200))
    await served.gateway.until(lambda: served.gateway.batcher.num_running > 0)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    async with asyncio.timeout(10):
        await served.gateway.until_idle()


def _busiest(served: Served, started: list[HostProcess]) -> HostProcess:
    rows = [(row["num_sequences"], row["host"]) for row in served.gateway.facts() if row["stage"] == 1]
    name = max(rows, key=lambda row: int(str(row[0])))[1]
    return next(host for host in started if f"127.0.0.1:{host.endpoint.port}" == name)


async def test_a_killed_host_is_replaced_and_without_a_replica_the_end_is_clear_and_soon(
    place: Path, model: Any
) -> None:
    """Kill -9 the host of stage 1 that holds the most sequences, in mid-stream; then the one that took over."""
    prompts = [PROMPT, "peace", "war and"]
    expected = [generated(model, prompt, 80) for prompt in prompts]
    with host_processes(place, [0, 1, 1, 2]) as started:
        endpoints = [host.endpoint for host in started]
        async with serving(place, endpoints, limits=BatchLimits(failover_s=0.5)) as served:
            gateway = served.gateway
            assert await gateway.until_whole(20)
            texts = [asyncio.create_task(streamed(served, prompt, 80)) for prompt in prompts]
            await gateway.until(lambda: gateway.num_tokens >= 30)
            await gateway.refresh()
            _busiest(served, started).kill()
            assert await asyncio.gather(*texts) == expected
            await served.assert_nothing_left()

            num_before = gateway.num_tokens
            ends = asyncio.create_task(streamed(served, PROMPT, 200))
            await gateway.until(lambda: gateway.num_tokens >= num_before + 10)
            await gateway.refresh()
            _busiest(served, started).kill()
            began_s = time.monotonic()
            with pytest.raises(openai.APIError, match="a stage of the model has no host"):
                await ends
            assert time.monotonic() - began_s < 10
            assert served.api.num_requests == {200: 3, 503: 1}
            with pytest.raises(openai.InternalServerError, match="a stage of the model has no host now"):
                await streamed(served, PROMPT)
            assert "a stage has no host" in await _health(served)
            await served.assert_nothing_left()


async def _health(served: Served) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health") as response:
        assert response.status == 503
        return await response.text()


async def _raw(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        answer = await response.json()
        return response.status, answer["error"]["message"]


async def test_a_crowd(place: Path, hosts: list[Endpoint]) -> None:
    """200 requests at once: 160 that end, 20 that are given up, 10 malformed, 10 too large; one polite client among them."""
    limits = BatchLimits(max_running=24, max_waiting=400)
    finished: list[int] = []

    async def ends(served: Served, index: int) -> None:
        answer = await served.client.completions.create(
            model="tiny", prompt=f"{index} {PROMPT}", max_tokens=8, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 8
        finished.append(index)

    async def gives_up(served: Served, index: int) -> None:
        stream = await served.client.completions.create(
            model="tiny", prompt=f"{index}", max_tokens=200, temperature=0, stream=True
        )
        async for _ in stream:
            break
        await stream.close()

    async with serving(place, hosts, limits=limits) as served, aiohttp.ClientSession() as session:
        assert await served.gateway.until_whole(20)
        polite = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=polite) as other, asyncio.timeout(90), asyncio.TaskGroup() as group:
            for index in range(160):
                group.create_task(ends(served, index))
                if index % 8 == 0:
                    group.create_task(gives_up(served, index))
            await served.gateway.until(lambda: served.gateway.batcher.num_waiting >= 100)
            bad = [asyncio.create_task(_raw(session, served.url, b'{"model": "tiny", "prompt": 7')) for _ in range(10)]
            large = [asyncio.create_task(_raw(session, served.url, b"x" * 5000)) for _ in range(10)]
            body = b'{"model": "tiny", "prompt": "please", "max_tokens": 8}'
            async with other.post(f"{served.url}/v1/completions", data=body) as response:
                assert response.status == 200
            num_before = len(finished)
            assert {(await task)[0] for task in bad} == {400}
            assert {(await task)[0] for task in large} == {413}
        await served.gateway.until_idle()
        await served.assert_nothing_left()
        assert sorted(finished) == list(range(160))
        # who came alone waited for a place that became free, not for the 100 before it
        assert num_before < 100
        # in one line, nobody was passed by more than those who ran beside it
        assert max(abs(place - index) for place, index in enumerate(finished)) <= 3 * limits.max_running


async def test_a_full_queue_says_when_to_come_back(place: Path, hosts: list[Endpoint]) -> None:
    async with serving(place, hosts, limits=BatchLimits(max_running=1, max_waiting=1)) as served:
        assert await served.gateway.until_whole(20)
        async with aiohttp.ClientSession() as session:
            body = b'{"model": "tiny", "prompt": "a", "n": 4}'
            async with session.post(f"{served.url}/v1/completions", data=body) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert (await response.json())["error"]["code"] == "queue_full"


async def test_what_the_hosts_cannot_hold_is_refused_at_once(served: Served) -> None:
    """The gateway was told 512 positions, its hosts take the 256 that the model was trained on."""
    with pytest.raises(openai.BadRequestError, match="at most 256 tokens") as refused:
        await served.client.completions.create(model="tiny", prompt="a" * 200, max_tokens=57)
    assert refused.value.code == "context_length_exceeded"


async def test_keys_keep_strangers_out(place: Path, hosts: list[Endpoint]) -> None:
    async with serving(place, hosts, key="another key, which is not theirs") as served:
        assert not await served.gateway.until_whole(0.5)
        assert "start it with the same STRATA_SERVE_KEY" in served.gateway.trouble
        with pytest.raises(openai.InternalServerError, match="has another key"):
            await served.client.completions.create(model="tiny", prompt=PROMPT)
    async with serving(place, hosts, api_key="secret of the clients") as served:
        assert await served.gateway.until_whole(20)
        with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer KEY"):
            await served.client.completions.create(model="tiny", prompt=PROMPT)
        assert (await _said(served, b"Authorization: Bearer \xff")).startswith(b"HTTP/1.1 401 ")
        asks = served.client.with_options(api_key="secret of the clients")
        assert (await asks.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)).choices


async def _said(served: Served, header: bytes) -> bytes:
    """What a gateway answers to a header that no client library sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n")
    async with asyncio.timeout(10):
        said = await reader.read()
    writer.close()
    return said


async def test_bytes_that_are_no_frame_harm_nobody(served: Served, hosts: list[Endpoint]) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"STRS\x02\x00" + bytes(32) + b"\xff" * 32, b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", hosts[1].port)
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
    assert await streamed(served, PROMPT, 4)


async def test_health_and_metrics_tell(served: Served) -> None:
    await streamed(served, PROMPT, 4)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/health") as response:
            facts = await response.json()
            assert response.status == 200
            assert facts["status"] == "ok"
            assert [row["stage"] for row in facts["hosts"]] == [0, 1, 2]
        async with session.get(f"{served.url}/metrics") as response:
            text = await response.text()
            assert 'strata_serve_requests_total{status="200"} 1.0' in text
            assert 'strata_serve_hosts{stage="2"} 1.0' in text


async def test_stages_that_denoise_serve_token_by_token_and_in_one_sweep(tmp_path: Path) -> None:
    place = write_model(blocktrain_config(Objective.DIFFUSION), tmp_path / "tiny")
    with host_processes(place, [0, 1, 2]) as started:
        async with serving(place, [host.endpoint for host in started]) as served:
            assert await served.gateway.until_whole(20)

            async def ask(model: str) -> tuple[str, int]:
                before = served.gateway.num_steps
                answer = await served.client.completions.create(model=model, prompt=PROMPT, max_tokens=12, seed=3)
                assert answer.usage is not None and answer.usage.completion_tokens == 12
                return answer.choices[0].text, served.gateway.num_steps - before

            per_token, swept = await ask("tiny:per-token"), await ask("tiny:sweep")
            assert (per_token[1], swept[1]) == (12, 1)
            assert await ask("tiny") == per_token
            assert await ask("tiny:sweep") == swept
            assert per_token[0][:1] == swept[0][:1]
            await served.gateway.until_idle()
            await served.assert_nothing_left()


async def test_pooled_stages_generate_what_transformers_does_also_when_a_host_is_lost(tmp_path: Path) -> None:
    """Four stages on three hosts, the middle one twice; one of the two is killed in mid-stream."""
    place = write_model(blocktrain_config(Objective.POOLED, num_stages=4, num_tokens=256), tmp_path / "tiny")
    model = loaded(place, tmp_path / "modules")
    prompts = [PROMPT, "peace", "war and"]
    with host_processes(place, [0, 1, 1, 2]) as started:
        async with serving(place, [host.endpoint for host in started]) as served:
            gateway = served.gateway
            assert await gateway.until_whole(20)
            assert await streamed(served, PROMPT) == generated(model, PROMPT)
            await served.assert_nothing_left()
            sent = {row["stage"]: row["payload_bytes_sent"] for row in gateway.facts()}
            assert (
                sent[0] == 4 * 256 * MAX_TOKENS
            )  # a float32 for each of 256 tokens that may come, for each that comes

            stream = await served.client.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True)
            async for _ in stream:
                break
            await stream.close()
            num_before = gateway.num_tokens
            texts = [asyncio.create_task(streamed(served, prompt, 80)) for prompt in prompts]
            await gateway.until(lambda: gateway.num_tokens >= num_before + 30)
            await gateway.refresh()
            _busiest(served, started).kill()
            assert await asyncio.gather(*texts) == [generated(model, prompt, 80) for prompt in prompts]
            await served.assert_nothing_left()
