"""A merged run as a directory that transformers loads: configuration, params, tokenizer (bytes in, names and bytes out).

An uncut model is a plain LlamaForCausalLM, and so are stages of the greedy objective: the layers of the lowest
`depth` of them under the head of the topmost. A model with a bottleneck or anchors is a class of its own, and so are pooled
stages; the source file of both (modeling_strata.py) goes into the directory. Stages that denoise are no model of transformers;
`strata serve` reads them.
Params stay float32, so that logits are those of the run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from subnet.config import Bottleneck, Objective, RunConfig, RunKind
from subnet.errors import InvalidConfig
from subnet.model.flat import unflatten
from subnet.model.partition import (
    ANCHOR_RANK,
    boundary_width,
    has_anchor,
    is_anchor_factored,
    layers_of,
    param_shapes,
)
from subnet.types import StageIndex

CLASS_FILE = "modeling_strata.py"
DENOISING_TYPE = "strata_denoising"
"""`model_type` of stages that denoise."""
POOLED_TYPE = "strata_pooled"
"""`model_type` of stages that read the tokens alone and are heard together; transformers gets a class for them."""
DENOISING_FIELDS = ("context", "sigma_min", "sigma_max", "sigma_data", "p_mean", "p_std")
"""What of a run's noise a model depends on; the rest is training's alone, and may change without old models noticing."""
SHARD_LIMIT_BYTES = 2 << 30
NUM_BYTES = 256

NamedBytes = tuple[str, bytes]


def is_denoising(config: RunConfig) -> bool:
    """Whether the stages denoise embeddings of coming tokens (papers.md B2)."""
    return config.kind is RunKind.BLOCKTRAIN and config.blocktrain.objective is Objective.DIFFUSION


def is_pooled(config: RunConfig) -> bool:
    """Whether the stages read the tokens alone and the mean of their logits is the model's (DESIGN D53)."""
    return config.kind is RunKind.BLOCKTRAIN and config.blocktrain.objective is Objective.POOLED


def is_plain_llama(config: RunConfig) -> bool:
    """Whether the stages in a row are Llama and nothing else."""
    if config.kind is RunKind.BLOCKTRAIN:
        return config.blocktrain.objective is Objective.GREEDY
    model = config.model
    has_cuts = config.training.num_stages > 1
    return not has_cuts or (model.bottleneck is Bottleneck.NONE and not has_anchor(model))


def stages_of(config: RunConfig, depth: int | None) -> list[StageIndex]:
    """The stages that are exported: all, or of the greedy objective the lowest `depth`. Raises InvalidConfig."""
    num_stages = config.training.num_stages
    if depth is not None and not (config.kind is RunKind.BLOCKTRAIN and is_plain_llama(config)):
        raise InvalidConfig("--depth is for stages of the objective greedy, which predict at every depth; leave it out")
    if depth is not None and not 1 <= depth <= num_stages:
        raise InvalidConfig(f"--depth must be in [1, {num_stages}], got {depth}")
    return [StageIndex(stage) for stage in range(depth or num_stages)]


def model_config(config: RunConfig, *, depth: int | None = None) -> dict[str, Any]:
    """What goes into config.json. `max_position_embeddings` is the longest context that was trained on."""
    model = config.model
    num_layers = layers_of(config, stages_of(config, depth)[-1]).stop
    fields: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.width // model.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.training.num_tokens,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return fields | _kind_fields(config)


def _kind_fields(config: RunConfig) -> dict[str, Any]:
    """What tells the kinds of models apart, and what each has beside Llama's fields."""
    if is_plain_llama(config):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if is_denoising(config):
        noise = msgspec.structs.asdict(config.blocktrain)
        return {
            "architectures": [],
            "model_type": DENOISING_TYPE,
            "num_stages": config.training.num_stages,
            "codebook_seed": config.model.seed,
            "denoising": {key: noise[key] for key in DENOISING_FIELDS},
        }
    if is_pooled(config):
        return _classes("StrataPooled") | {"model_type": POOLED_TYPE, "num_stages": config.training.num_stages}
    model = config.model
    return _classes("Strata") | {
        "model_type": "strata",
        "bottleneck": str(model.bottleneck),
        "bottleneck_width": model.bottleneck_width,
        "boundary_width": boundary_width(model),
        "num_stages": config.training.num_stages,
        "has_anchor": has_anchor(model),
        "anchor_rank": ANCHOR_RANK if is_anchor_factored(model) else 0,
    }


def _classes(name: str) -> dict[str, Any]:
    """Where transformers finds the classes whose names begin so."""
    module, model = CLASS_FILE.removesuffix(".py"), f"{name}ForCausalLM"
    return {
        "architectures": [model],
        "auto_map": {"AutoConfig": f"{module}.{name}Config", "AutoModelForCausalLM": f"{module}.{model}"},
    }


def byte_tokenizer() -> Tokenizer:
    """Token ids are byte values; any text comes back as it was. Spelled in the alphabet of byte-level tokenizers."""
    alphabet = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte: itself where it is printable in Latin-1, else U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def tokenizer_files(config: RunConfig) -> list[NamedBytes]:
    """Files that AutoTokenizer reads. Raises InvalidConfig for a tokenizer that this build cannot write."""
    if config.corpus.tokenizer != "bytes":
        raise InvalidConfig(f"no tokenizer file can be written for corpus.tokenizer {config.corpus.tokenizer!r}")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.training.num_tokens,
        "clean_up_tokenization_spaces": False,
    }
    return [
        ("tokenizer.json", byte_tokenizer().to_str().encode()),
        ("tokenizer_config.json", _json(settings)),
    ]


def param_files(
    config: RunConfig,
    stage_params: Sequence[npt.NDArray[np.float32]],
    *,
    depth: int | None = None,
    shard_limit_bytes: int = SHARD_LIMIT_BYTES,
) -> Iterator[NamedBytes]:
    """Safetensors files, and an index when there is more than one. Raises ProtocolViolation for params of another shape."""
    groups = _grouped(config, stage_params, stages_of(config, depth), shard_limit_bytes)
    if len(groups) == 1:
        yield "model.safetensors", _saved(groups[0])
        return
    places: dict[str, str] = {}
    total = 0
    for index, group in enumerate(groups, start=1):
        name = f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        places |= dict.fromkeys(group, name)
        total += sum(tensor.nbytes for tensor in group.values())
        yield name, _saved(group)
    index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    yield "model.safetensors.index.json", _json(index_file)


def _grouped(
    config: RunConfig,
    stage_params: Sequence[npt.NDArray[np.float32]],
    stages: Sequence[StageIndex],
    limit_bytes: int,
) -> list[dict[str, Tensor]]:
    """Params by file: as many as fit; stages that denoise have a file each."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for stage in stages:
        if is_denoising(config) and groups[-1]:
            groups.append({})
            size = 0
        for name, tensor in unflatten(stage_params[stage], param_shapes(config, stage)).items():
            exported = _exported_name(config, name, is_top=stage == stages[-1])
            if exported is None:
                continue
            if groups[-1] and size + tensor.nbytes > limit_bytes:
                groups.append({})
                size = 0
            groups[-1][exported] = tensor
            size += tensor.nbytes
    return groups


def _exported_name(config: RunConfig, name: str, *, is_top: bool) -> str | None:
    """The param's name in the files; None for the heads of greedy stages below the topmost."""
    if config.kind is RunKind.PIPELINE or not is_plain_llama(config):
        return name
    is_head = ".norm." in name or ".lm_head." in name
    return None if is_head and not is_top else llama_name(name)


def llama_name(name: str, *, first_layer: int = 0) -> str:
    """Of a param of a predicting stage, its name in a Llama whose layers begin with the run's `first_layer`."""
    parts = name.split(".")[2:]  # blocks.STAGE.rest
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) - first_layer)
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save(dict(tensors), metadata={"format": "pt"})


def config_files(config: RunConfig, *, provenance: Mapping[str, Any], depth: int | None = None) -> list[NamedBytes]:
    """config.json, generation_config.json, and strata.json, which says what run and epoch this is."""
    generation = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "do_sample": False}
    return [
        ("config.json", _json(model_config(config, depth=depth))),
        ("generation_config.json", _json(generation)),
        ("strata.json", _json(dict(provenance))),
    ]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
