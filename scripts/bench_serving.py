"""What serving comes to over a wide-area network: tokens a second of each mode, and beside it how good that mode's text is.

    python scripts/bench_serving.py --train models          once: four small models at equal bytes (study_blocktrain)
    python scripts/bench_serving.py models --delay 0.05     every mode through proxies that add 50 ms to each hop
    python scripts/bench_serving.py models --only pooled    one of them; also with --train
    python scripts/bench_serving.py --random 8 DIR          writes a random Llama of about 8 billion params in bfloat16
    python scripts/bench_serving.py --run DIR --hosts 4     a few tokens of it

Stage hosts are real processes of `strata serve host`, one thread each; the gateway runs in this process.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from study_blocktrain import CONCAT, GREEDY, NUM_HELDOUT, POOLED, Case, config_of, train

from neurons.export import write_directory
from neurons.published import Published
from neurons.serving.children import local_hosts
from neurons.serving.gateway import Answer, Gateway, Model
from neurons.serving.options import ServeOptions
from subnet.adapters.corpus import SotuCorpus, make_corpus
from subnet.adapters.model_files import ModelDirectory
from subnet.adapters.system import SystemClock
from subnet.config import RunConfig
from subnet.inference.cache import SequenceCache
from subnet.inference.decode import Span
from subnet.inference.denoise import DenoisingRunner, Targets
from subnet.inference.engine import mode_of
from subnet.inference.evaluate import heldout_loss
from subnet.inference.evaluate_blocks import DenoisingEvaluation, evaluate_blocks
from subnet.inference.jobs import BatchLimits, Ended, Job, Token
from subnet.inference.sampling import Sampling
from subnet.model.export import byte_tokenizer
from subnet.sim.latency import LatencyProxy
from subnet.training.outer import encode_snapshot
from subnet.types import Endpoint, Epoch

NUM_STAGES = 4
PROMPT, ANSWER = 32, 32
"""Tokens read and written; together the 64 that the models were trained on."""
CROWD = 64
"""Requests at once, where they are batched."""
CASES = {
    "end_to_end": Case("end_to_end"),
    "greedy": Case("greedy", blocktrain=GREEDY, workers=(1,) * NUM_STAGES),
    "pooled": Case("pooled", blocktrain=POOLED, workers=(1,) * NUM_STAGES),
    "diffusion": Case("diffusion_concat", blocktrain=CONCAT, workers=(1,) * NUM_STAGES),
}


# ---- models ----------------------------------------------------------------------------------------------------------


def train_models(place: Path, names: Sequence[str]) -> None:
    """A directory for each case, with its held-out figures."""
    for name in names:
        if (place / name).exists():
            continue
        case = CASES[name]
        config = config_of(case, 0)
        corpus = make_corpus(config)
        params, _, _ = train(case, 0, corpus)
        figures = quality(config, params, corpus)
        published = Published(run_id="bench", config=config, corpus_digest=corpus.digest, epoch=Epoch(0), snapshots=())
        write_directory(published, [encode_snapshot(each, np.zeros_like(each)) for each in params], place / name)
        (place / f"{name}.json").write_text(json.dumps(figures))
        print(name, figures, flush=True)


def quality(config: RunConfig, params: Sequence[np.ndarray], corpus: SotuCorpus) -> dict[str, float]:
    """Held-out nats for each byte, of each mode that the model is served in."""
    if config.training.num_stages == 1:
        return {"autoregressive": heldout_loss(config, params, corpus, NUM_HELDOUT).loss}
    found = evaluate_blocks(config, params, corpus, NUM_HELDOUT)
    if isinstance(found, DenoisingEvaluation):
        return {
            "per-token": found.one_path,
            "per-token, 16 paths": found.mixtures[-1][1],
            "first stage": found.first_stage,
        }
    return {"autoregressive": found.at_depth[-1]}


def sweep_loss(directory: ModelDirectory, *, num_windows: int = 64) -> tuple[float, list[float]]:
    """Nats for each byte of held-out answers that come in one sweep after the text before them, and by place in the answer.

    One path of noise. The true answer is never an input, so this is the loss of what is served.
    """
    served = directory.served
    stages = []
    for number in range(NUM_STAGES):
        tensors = directory.tensors(served.tensor_names(number, NUM_STAGES), torch.float32)
        stages.append(DenoisingRunner(served, number, NUM_STAGES, tensors, max_positions=PROMPT + ANSWER))
    corpus = make_corpus(served.run)
    windows = np.concatenate([corpus.heldout(index) for index in range(-(-num_windows // 8))])[:num_windows]
    losses = []
    for index, window in enumerate(windows):
        rows = logits = None
        for stage in stages:
            cache = SequenceCache(stage.cache_shape, PROMPT)
            rows, logits = stage.run([Targets(Span(cache, 0, window[:PROMPT].tolist()), ANSWER, index)], rows)
        assert logits is not None
        targets = torch.from_numpy(window[PROMPT : PROMPT + ANSWER])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double())
    by_place = torch.stack(losses).mean(0)
    return float(by_place.mean()), by_place.tolist()


def write_random(billions: float, place: Path) -> None:
    """A Llama 3 shape with random params, as many layers as come near `billions` of params; written a layer at a time."""
    width, ffn, kv_width, vocab = 4096, 14336, 1024, 128256
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    a_layer = sum(rows * columns for rows, columns in shapes.values()) + 2 * width
    num_layers = max(1, round((billions * 1e9 - 2 * vocab * width) / a_layer))
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    # drawn once and cut at drawn places: billions of normal numbers would take longer than the measurement
    pool = torch.randn(1 << 26, generator=generator).to(torch.bfloat16)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        start = int(torch.randint(len(pool), (1,), generator=generator))
        flat = pool.roll(start).repeat(-(-rows * columns // len(pool)))[: rows * columns]
        return flat.view(rows, columns).mul_(columns**-0.5)

    places: dict[str, str] = {}

    def save(file: str, tensors: dict[str, torch.Tensor]) -> None:
        safetensors.torch.save_file(tensors, place / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    ones = torch.ones(width, dtype=torch.bfloat16)
    save("embed.safetensors", {"model.embed_tokens.weight": drawn(vocab, width)})
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        tensors = {f"{name}.{part}.weight": drawn(*shape) for part, shape in shapes.items()}
        tensors |= {f"{name}.{norm}.weight": ones.clone() for norm in ("input_layernorm", "post_attention_layernorm")}
        save(f"layer-{layer:03d}.safetensors", tensors)
    save("head.safetensors", {"lm_head.weight": drawn(vocab, width), "model.norm.weight": ones})
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 8192,
    }
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text(byte_tokenizer().to_str())
    print(f"{num_layers} layers, {(num_layers * a_layer + 2 * vocab * width) / 1e9:.2f} billion random params")


# ---- serving ---------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    gateway: Gateway
    hosts: list[dict[str, object]]

    def payload_bytes(self) -> int:
        """Rows that have crossed between hosts."""
        return sum(int(str(row["payload_bytes_sent"] or 0)) for row in self.gateway.facts())


@contextlib.asynccontextmanager
async def serving(directory: ModelDirectory, *, num_hosts: int, delay_s: float) -> AsyncIterator[Served]:
    """Hosts, a proxy before each, and a gateway that knows the proxies only."""
    key = secrets.token_hex(16)
    options = ServeOptions(model=str(directory.path), num_hosts=num_hosts, num_threads=1, log_level="error")
    async with local_hosts(options, key) as endpoints, contextlib.AsyncExitStack() as stack:
        proxies: list[Endpoint] = []
        for endpoint in endpoints:
            proxy = await stack.enter_async_context(LatencyProxy(endpoint, delay_s).running())
            proxies.append(proxy)
        gateway = Gateway(
            proxies,
            Model(digest=directory.digest, mode=mode_of(directory.served), num_stages=num_hosts),
            session=secrets.token_hex(8),
            shared_key=key.encode(),
            clock=SystemClock(),
            limits=BatchLimits(max_running=CROWD, step_s=600, request_s=1200),
        )
        work = asyncio.create_task(gateway.work())
        try:
            assert await gateway.until_whole(600), gateway.trouble
            yield Served(gateway, gateway.facts())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def measure(
    served: Served, prompts: Sequence[Sequence[int]], *, max_tokens: int, at_once: int
) -> dict[str, float]:
    """All prompts at the same time; tokens a second, seconds to the first and the last token, bytes a token."""
    gateway = served.gateway
    await gateway.refresh(30)
    before_bytes, before_steps, began_s = served.payload_bytes(), gateway.num_steps, time.perf_counter()
    jobs = [
        Job(
            key=key,
            client="bench",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(seed=key),
            num_at_once=at_once,
        )
        for key, prompt in zip(gateway.take_keys(len(prompts)), prompts, strict=True)
    ]
    stream: asyncio.Queue[Answer] = gateway.submit(jobs)
    num_tokens, num_ended, first_s = 0, 0, 0.0
    while num_ended < len(jobs):
        answer = await stream.get()
        if isinstance(answer, Token):
            num_tokens += 1
            first_s = first_s or time.perf_counter() - began_s
        else:
            assert isinstance(answer, Ended) and answer.end == "length", answer
            num_ended += 1
    took_s = time.perf_counter() - began_s
    await gateway.refresh(30)
    return {
        "tokens_per_s": num_tokens / took_s,
        "first_s": first_s,
        "took_s": took_s,
        "steps": gateway.num_steps - before_steps,
        "bytes_per_token": (served.payload_bytes() - before_bytes) / num_tokens,
    }


def line(name: str, requests: int, found: dict[str, float], nats: str) -> None:
    print(
        f"| {name} | {requests} | {found['tokens_per_s']:.3g} | {found['first_s']:.2f} | {found['took_s']:.2f} "
        f"| {found['steps']:.0f} | {found['bytes_per_token']:.0f} | {nats} |",
        flush=True,
    )


async def bench(place: Path, names: Sequence[str], delay_s: float) -> None:
    print("| mode | requests | tokens/s | first token s | all s | steps | bytes/token | nats/byte |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        directory = ModelDirectory(place / name)
        figures = json.loads((place / f"{name}.json").read_text())
        corpus = make_corpus(config_of(CASES[name], 0))
        windows = np.concatenate([corpus.heldout(index) for index in range(CROWD // 8)])
        prompts = [window[:PROMPT].tolist() for window in windows]
        modes = {"autoregressive": 1}
        if directory.served.is_denoising:
            swept, by_place = sweep_loss(directory)
            figures["sweep"] = swept
            print(f"<!-- sweep by place in the answer: {' '.join(f'{loss:.2f}' for loss in by_place)} -->")
            modes = {"per-token": 1, "sweep": ANSWER}
        async with serving(directory, num_hosts=NUM_STAGES, delay_s=delay_s) as served:
            for mode, at_once in modes.items():
                nats = f"{figures[mode]:.3f}"
                for count in (1, CROWD):
                    found = await measure(served, prompts[:count], max_tokens=ANSWER, at_once=at_once)
                    line(f"{name}, {mode}", count, found, nats)


async def run_random(place: Path, num_hosts: int) -> None:
    """Two tokens alone, then four sequences together."""
    directory = ModelDirectory(place)
    prompts = [[10 * index + at for at in range(8)] for index in range(4)]
    async with serving(directory, num_hosts=num_hosts, delay_s=0.0) as served:
        for count in (1, 4):
            line(
                "random params", count, await measure(served, prompts[:count], max_tokens=2, at_once=1), "none: random"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that each hop takes one way")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--random", nargs=2, metavar=("BILLIONS", "DIR"))
    parser.add_argument("--run", type=Path)
    parser.add_argument("--hosts", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.train:
        train_models(given.train, given.only)
    elif given.random:
        write_random(float(given.random[0]), Path(given.random[1]))
    elif given.run:
        asyncio.run(run_random(given.run, given.hosts))
    else:
        asyncio.run(bench(given.models, given.only, given.delay))


if __name__ == "__main__":
    main()
