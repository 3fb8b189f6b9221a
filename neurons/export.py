"""`strata export`: the snapshots of a published epoch as a Hugging Face directory."""

import asyncio
from importlib import resources
from pathlib import Path

import msgspec

from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.published import Published, find_published, read_snapshots, stage_params
from neurons.settings import user_path
from neurons.sources import open_record, read_segments
from subnet.adapters.system import write_atomically
from subnet.config import RunConfig
from subnet.errors import InvalidConfig
from subnet.model import export


def run_export(target: str, out: str, epoch: int | None = None, depth: int | None = None) -> int:
    """Write the directory `out`; returns the exit code. Raises StartupRefused, InvalidConfig."""
    place = user_path(out).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidConfig(f"--out {place} is there already: name a directory that is empty or does not exist")
    published = find_published(open_record(asyncio.run(read_segments(target))), epoch)
    export.stages_of(published.config, depth)  # refuse before anything is read
    data = asyncio.run(read_snapshots(target, published.snapshots))
    files = write_directory(published, data, place, depth=depth)
    console().print(f"Run {published.run_id}, epoch {published.epoch}: {len(files)} files in {place}", markup=False)
    console().print(f"{_reader(published.config)} Serve it: strata serve {place}", markup=False)
    return ExitCode.OK


def _reader(config: RunConfig) -> str:
    """Who can load the directory, for a person."""
    if export.is_denoising(config):
        return f"Stages that denoise are no model of transformers. It takes --num-hosts {config.training.num_stages}."
    if export.is_plain_llama(config):
        return "transformers loads it as LlamaForCausalLM."
    return "transformers loads it with trust_remote_code=True."


def write_directory(
    published: Published, snapshots: list[bytes], place: Path, *, depth: int | None = None
) -> list[str]:
    """Write every file; names in the order written, config.json last, so that a half-written directory does not load."""
    config = published.config
    files: list[str] = []

    def write(name: str, data: bytes) -> None:
        write_atomically(place / name, data)
        files.append(name)

    for name, data in export.param_files(config, stage_params(config, snapshots), depth=depth):
        write(name, data)
    for name, data in export.tokenizer_files(config):
        write(name, data)
    if not export.is_plain_llama(config) and not export.is_denoising(config):
        write(export.CLASS_FILE, (resources.files("subnet.model") / export.CLASS_FILE).read_bytes())
    provenance = {
        "run_id": published.run_id,
        "epoch": published.epoch,
        "corpus_digest": published.corpus_digest,
        "snapshots": [ref.digest for ref in published.snapshots],
        "run_config": msgspec.to_builtins(config),
    }
    for name, data in reversed(export.config_files(config, provenance=provenance, depth=depth)):
        write(name, data)
    return files
