"""What this machine can do for a role: memory, disk, cores, arithmetic, speed; part of `strata doctor` (users.md 41)."""

import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from neurons.findings import Finding, Level, Role
from neurons.settings import NodeSettings
from subnet.config import OptimizerKind, RunConfig
from subnet.model.partition import num_elements, stage_flops
from subnet.types import NumericMode, StageIndex

_GIB = 1 << 30
_PROCESS_BYTES = 400 << 20
"""Interpreter, torch and the chain client before any param is held: 292 MiB measured, and room for their buffers."""
_BYTES_PER_ELEMENT = 4
_VECTORS = 5
"""Params, gradients, the snapshot they began from, outer momentum, and the upload, each as long as the stage."""
_DISK_COPIES = 8
"""Checkpoints of an epoch that may be asked for, and the newest snapshots."""
_LEAST_FREE_DISK = 2 * _GIB
_LEAST_OWNER_RAM = 1 * _GIB
_PROBE_SIZE = 512
_PROBE_S = 0.3
_MIN_SWAPPINESS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What torch says and does here. `flops` is measured in the node's numeric mode, with its threads."""

    version: str
    instruction_set: str
    num_threads: int
    flops: float
    gpus: tuple[str, ...]
    has_fast_bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One look at this machine. `arithmetic` is None, with the reason in `torch_error`, when torch cannot be used."""

    ram_bytes: int
    free_ram_bytes: int
    free_disk_bytes: int
    disk_path: Path
    num_cores: int
    arithmetic: Arithmetic | None
    torch_error: str = ""


def read_machine(node: NodeSettings, role: Role) -> MachineFacts:
    """Look at this machine; takes about two seconds, most of it to load torch, which an owner does without."""
    memory = _memory()
    disk_path = next(path for path in (node.data_path, *node.data_path.parents) if path.exists())
    arithmetic, torch_error = None, ""
    if role is not Role.OWNER:
        try:
            arithmetic = _arithmetic(node)
        except (ImportError, OSError, RuntimeError) as error:
            torch_error = str(error) or type(error).__name__
    return MachineFacts(
        ram_bytes=memory["MemTotal"],
        free_ram_bytes=memory["MemAvailable"],
        free_disk_bytes=shutil.disk_usage(disk_path).free,
        disk_path=disk_path,
        num_cores=len(os.sched_getaffinity(0)),
        arithmetic=arithmetic,
        torch_error=torch_error,
    )


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _arithmetic(node: NodeSettings) -> Arithmetic:
    import torch

    torch.set_num_threads(node.num_threads or torch.get_num_threads())
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Arithmetic(
        version=torch.__version__,
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        flops=_measured_flops(node.mode),
        gpus=tuple(gpus),
        has_fast_bf16=any(flag in _cpu_flags() for flag in ("avx512_bf16", "amx_bf16", "bf16")),
    )


def _cpu_flags() -> frozenset[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return frozenset(line.partition(":")[2].split())


def _measured_flops(mode: NumericMode) -> float:
    """Operations a second of one matrix product after another."""
    import torch

    kind = torch.bfloat16 if mode is NumericMode.BF16_AUTOCAST else torch.float32
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=kind)
    count, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < _PROBE_S or count < 2:
        left.mm(left)
        count += 1
    return 2 * _PROBE_SIZE**3 * count / took_s


def stage_bytes(run: RunConfig, stage: StageIndex) -> int:
    """RAM that a miner of this stage needs at least: its vectors, what it keeps between forward and backward, the process."""
    moments = 1 if run.training.optimizer is OptimizerKind.MUON else 2
    vectors = (_VECTORS + moments) * num_elements(run, stage) * _BYTES_PER_ELEMENT
    model, training = run.model, run.training
    boundary = training.microbatch_size * training.num_tokens * model.width * _BYTES_PER_ELEMENT
    return _PROCESS_BYTES + vectors + (training.max_in_flight + 1) * 4 * boundary


def machine_findings(facts: MachineFacts, run: RunConfig, node: NodeSettings, role: Role) -> list[Finding]:
    """What the machine lacks for this role in this run, and what it can be expected to do."""
    found = [_about_disk(facts, run, role), _about_ram(facts, run, role)]
    if role is not Role.OWNER:
        found += _about_arithmetic(facts, run, node, role)
    return found


def _about_disk(facts: MachineFacts, run: RunConfig, role: Role) -> Finding:
    stages = [StageIndex(stage) for stage in range(run.training.num_stages)]
    largest = max(num_elements(run, stage) for stage in stages) * _BYTES_PER_ELEMENT
    copies = _DISK_COPIES * (len(stages) if role is Role.OWNER else 1)
    needed = _LEAST_FREE_DISK + copies * largest
    text = f"{_gib(facts.free_disk_bytes)} free for {facts.disk_path}"
    if facts.free_disk_bytes >= needed:
        return Finding("disk", Level.OK, text)
    remedy = "free some, or name a directory on a larger disk with --data-dir"
    return Finding("disk_small", Level.PROBLEM, f"{text}; {_gib(needed)} are needed", remedy)


def _about_ram(facts: MachineFacts, run: RunConfig, role: Role) -> Finding:
    has = f"{_gib(facts.ram_bytes)} RAM, {_gib(facts.free_ram_bytes)} of it free"
    if role is Role.OWNER:
        is_enough = facts.free_ram_bytes >= _LEAST_OWNER_RAM
        needed = f"the orchestrator needs {_gib(_LEAST_OWNER_RAM)}"
    else:
        stages = [StageIndex(stage) for stage in range(run.training.num_stages)]
        sizes = {stage: stage_bytes(run, stage) for stage in stages}
        is_enough = facts.free_ram_bytes * _MIN_SWAPPINESS >= max(sizes.values())
        needed = ", ".join(f"{stage}: {_gib(size)}" for stage, size in sizes.items())
        needed = f"a miner or validator needs at least, by stage: {needed}"
    if is_enough:
        return Finding("ram", Level.OK, f"{has}; {needed}")
    remedy = "the orchestrator assigns stages as they are needed: add memory, or end other programs"
    return Finding("ram_small", Level.PROBLEM, f"{has}; {needed}", remedy)


def _about_arithmetic(facts: MachineFacts, run: RunConfig, node: NodeSettings, role: Role) -> list[Finding]:
    torch_found = facts.arithmetic
    if torch_found is None:
        text = f"torch cannot be used: {facts.torch_error}"
        return [Finding("torch", Level.PROBLEM, text, 'install it again: pip install "torch==2.13.*"')]
    found = [_about_speed(torch_found, run, node, role)]
    if node.mode not in run.training.modes:
        text = f"this run does not admit the numeric mode {node.mode}"
        found.append(Finding("mode", Level.PROBLEM, text, f"start with --mode {run.training.modes[0]}"))
    elif node.mode is NumericMode.BF16_AUTOCAST and not torch_found.has_fast_bf16:
        text = "this processor has no bf16 instructions: bf16_autocast is slower than fp32 here"
        found.append(Finding("mode_slow", Level.WARNING, text, "start with --mode fp32, if the run admits it"))
    if torch_found.num_threads > facts.num_cores:
        text = f"{torch_found.num_threads} threads on {facts.num_cores} cores get in each other's way"
        found.append(Finding("threads", Level.WARNING, text, f"start with --threads {facts.num_cores}"))
    if torch_found.gpus:
        text = f"GPU: {', '.join(torch_found.gpus)}; this version computes on the processor and leaves it idle"
    else:
        text = "no GPU that torch can use; none is needed"
    return [*found, Finding("gpu", Level.OK, text)]


def _about_speed(torch_found: Arithmetic, run: RunConfig, node: NodeSettings, role: Role) -> Finding:
    """A miner has an epoch for the passes that a merge asks for, a validator the time of a verdict for a segment's."""
    stages = [StageIndex(stage) for stage in range(run.training.num_stages)]
    pass_s = max(stage_flops(run, stage) for stage in stages) / torch_found.flops
    text = (
        f"torch {torch_found.version}, {node.mode}, {torch_found.num_threads} threads, {torch_found.instruction_set}, "
        f"{platform.machine()}: {torch_found.flops / 1e9:,.0f} GFLOP/s; the heaviest stage takes at least {pass_s:.2g} s a pass"
    )
    if role is Role.VALIDATOR:
        limit_s, needed = run.deadlines.verdict_s, run.audit.checkpoint_every * run.training.accumulate
        purpose = f"a verdict has {limit_s:.0f} s for {needed} of them"
    else:
        limit_s, needed = run.deadlines.training_s, run.training.min_batches
        purpose = f"a merge asks for {needed} of them in {limit_s:.0f} s"
    if needed * pass_s <= limit_s:
        return Finding("speed", Level.OK, f"{text}; {purpose}")
    return Finding("too_slow", Level.PROBLEM, f"{text}; {purpose}", "use a faster machine, or more cores: --threads N")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:,.1f} GiB"
