"""Stages in a row are the whole model, to the bit; a layer is Llama's, to the bit."""

import msgspec
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from subnet.config import Bottleneck, RunConfig
from subnet.model.layers import DecoderLayer, rope_tables
from subnet.model.payload import decode_payload
from subnet.model.stage import build_stage
from subnet.model.whole import WholeModel
from subnet.types import Epoch, SampleId, StageIndex
from tests.numerics.support import PatternCorpus, as_tensors, make_workers, pass_backward, pass_forward, small_config


def llama_config(config: RunConfig) -> transformers.LlamaConfig:
    model = config.model
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.width,
        intermediate_size=model.ffn_width,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        max_position_embeddings=config.training.num_tokens,
        tie_word_embeddings=False,
    )


def with_sdpa(config: transformers.LlamaConfig) -> transformers.LlamaConfig:
    config._attn_implementation = "sdpa"
    return config


def test_a_layer_equals_llamas_to_the_bit() -> None:
    config = small_config()
    ours = DecoderLayer(config.model)
    theirs = LlamaDecoderLayer(with_sdpa(llama_config(config)), 0)
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(5)
    entering = torch.randn(2, 16, 64, generator=generator).requires_grad_()
    positions = LlamaRotaryEmbedding(llama_config(config))(entering, torch.arange(16)[None])
    tables = rope_tables(config.model, 16)
    assert torch.equal(positions[0][0], tables[0]) and torch.equal(positions[1][0], tables[1])
    output = ours(entering, tables)
    expected = theirs(entering, position_embeddings=positions)
    assert torch.equal(output, expected)
    weights = torch.randn(output.shape, generator=generator)
    gradients = torch.autograd.grad(output, [entering, *ours.parameters()], weights)
    wanted = torch.autograd.grad(expected, [entering, *theirs.parameters()], weights)
    by_name = {name: value for (name, _), value in zip(theirs.named_parameters(), wanted[1:], strict=True)}
    assert torch.equal(gradients[0], wanted[0])
    for (name, _), value in zip(ours.named_parameters(), gradients[1:], strict=True):
        assert torch.equal(value, by_name[name]), name


def test_uncut_stages_equal_llama_for_causal_lm_to_the_bit() -> None:
    config = small_config(Bottleneck.NONE, anchor_ids=False)
    workers = make_workers(config)
    theirs = transformers.LlamaForCausalLM(llama_config(config))
    params: dict[str, torch.Tensor] = {}
    for worker in workers:
        params |= as_tensors(config, worker)
    theirs.load_state_dict(params)
    tokens = PatternCorpus(config).tokens(Epoch(0), SampleId(0))
    ids = torch.from_numpy(tokens)
    logits = theirs(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    _, loss = pass_forward(workers, (0, 0, 0), tokens)
    assert loss == float(expected.detach())
    pass_backward(workers, (0, 0, 0))
    names = [name for name, _ in theirs.named_parameters()]
    wanted = dict(zip(names, torch.autograd.grad(expected, list(theirs.parameters())), strict=True))
    for worker in workers:
        assert worker._sum is not None
        for name, gradient in worker._sum.items():
            assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("anchor_ids", [True, False])
@pytest.mark.parametrize("bottleneck", list(Bottleneck))
def test_stages_in_a_row_equal_the_whole_to_the_bit(bottleneck: Bottleneck, anchor_ids: bool, num_stages: int) -> None:
    config = small_config(bottleneck, num_stages=num_stages, anchor_ids=anchor_ids)
    workers = make_workers(config)
    corpus = PatternCorpus(config)
    params = [as_tensors(config, worker) for worker in workers]
    totals: list[dict[str, torch.Tensor]] = [{} for _ in workers]
    whole = WholeModel(config)
    for sample in range(2):
        tokens = corpus.tokens(Epoch(0), SampleId(sample))
        expected = whole.loss(params, torch.from_numpy(tokens))
        _, loss = pass_forward(workers, (0, sample, 0), tokens)
        assert loss == float(expected.detach())
        pass_backward(workers, (0, sample, 0))
        leaves = [value for stage in params for value in stage.values()]
        gradients = iter(torch.autograd.grad(expected, leaves, materialize_grads=True))
        for stage, total in zip(params, totals, strict=True):
            for name in stage:
                gradient = next(gradients)
                total[name] = total[name] + gradient if name in total else gradient
    for worker, total in zip(workers, totals, strict=True):
        assert worker._sum is not None
        for name, gradient in worker._sum.items():
            assert torch.equal(gradient, total[name]), name


@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA])
def test_one_pass_sends_a_128th_of_full_width_float32_each_way(bottleneck: Bottleneck) -> None:
    small = small_config(bottleneck)
    config = msgspec.structs.replace(small, model=msgspec.structs.replace(small.model, width=128, bottleneck_width=2))
    workers = make_workers(config)
    tokens = PatternCorpus(config).tokens(Epoch(0), SampleId(0))
    activations, _ = pass_forward(workers, (0, 0, 0), tokens)
    gradients = pass_backward(workers, (0, 0, 0))
    uncut_bytes = 2 * 16 * 128 * 4
    assert [len(payload) for payload in activations + gradients] == [uncut_bytes // 128] * 4


@pytest.mark.parametrize("anchor_ids", [True, False])
@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA])
def test_a_cut_keeps_the_stream_far_above_the_norms_epsilon(bottleneck: Bottleneck, anchor_ids: bool) -> None:
    config = small_config(bottleneck, anchor_ids=anchor_ids, num_stages=2)
    workers = make_workers(config)
    tokens = PatternCorpus(config).tokens(Epoch(0), SampleId(0))
    payloads, _ = pass_forward(workers, (0, 0, 0), tokens)
    module = build_stage(config, StageIndex(1))
    module.load_state_dict(as_tensors(config, workers[1]), assign=True)
    ids = torch.from_numpy(tokens)[:, :-1]
    stream = module.run_layers(module.receive(decode_payload(config, payloads[0]), ids), ids)
    rms = float(stream.detach().square().mean().sqrt())
    assert rms > 3 * config.model.norm_eps**0.5
    assert rms < 1.0
