"""What runs inside a process that localnet started: it dies with its parent, has its own log, and plays one role."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from neurons.local.plan import GenesisFile
from neurons.settings import NodeConfig
from subnet.types import Digest, Epoch, Hotkey, Record, SampleId

_PR_SET_PDEATHSIG = 1


class Job(Record, frozen=True, tag_field="job", tag=True):
    """Base of what a process is started for; `log` takes what it prints."""

    name: str
    log: str


class PlayRole(Job, frozen=True):
    """miner, validator or orchestrator; the same main as the command of that name."""

    role: str
    config: NodeConfig
    cheat: str = ""


class KeepChain(Job, frozen=True):
    """The chain node."""

    genesis: GenesisFile
    directory: str
    port: int


class MeasureText(Job, frozen=True):
    """What a model that only counts tokens would score; goes to `result` as JSON."""

    config: NodeConfig
    result: str


class TrainReference(Job, frozen=True):
    """The whole model in one process on the samples, (epoch, sample), of the run; losses go to `result` as JSON lines."""

    config: NodeConfig
    samples: tuple[tuple[Epoch, SampleId], ...]
    result: str


class RoundWork(Record, frozen=True):
    """One published epoch: samples by stage and hotkey, in the order in which they were trained on, and what was published."""

    epoch: Epoch
    samples: tuple[dict[Hotkey, tuple[SampleId, ...]], ...]
    snapshots: tuple[Digest, ...]


class RepeatRounds(Job, frozen=True):
    """Every round of stages that train apart once more; whether it came to the same goes to `result` as JSON lines."""

    config: NodeConfig
    rounds: tuple[RoundWork, ...]
    result: str


AnyJob = PlayRole | KeepChain | MeasureText | TrainReference | RepeatRounds


def play(data: bytes) -> None:
    """Entry of the process; `data` is an encoded job. Ends with the role's exit code."""
    job: AnyJob = msgspec.json.decode(data, type=AnyJob)
    os.setsid()  # Ctrl-C in the terminal reaches localnet alone, which then tells the roles in order
    _end_with_localnet()
    _speak_to(Path(job.log))
    sys.exit(_run(job))


def _end_with_localnet() -> None:
    """SIGTERM when localnet, or the warm parent between, is gone, however it went; a role then ends as cleanly as ever.

    The kernel tells of the direct parent only, and the warm parent lives as long as one of its children does.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_follow_localnet, name="follow localnet", daemon=True).start()


def _follow_localnet() -> None:
    localnet = multiprocessing.parent_process()
    if localnet is not None:
        localnet.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _speak_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(nothing)
    os.close(descriptor)


def _run(job: AnyJob) -> int:
    """Modules are imported here: the chain node needs no torch, and the roles find theirs loaded already."""
    match job:
        case PlayRole():
            return _play_role(job)
        case KeepChain():
            from neurons.devnet import run_devnet
            from neurons.local.chain import devnet_config

            return run_devnet(devnet_config(job.genesis, directory=Path(job.directory), port=job.port))
        case MeasureText():
            from neurons.local.reference import measure_text

            return measure_text(job.config.run, Path(job.result))
        case TrainReference():
            from neurons.local.reference import train

            return train(job.config.run, job.samples, Path(job.result))
        case RepeatRounds():
            from neurons.local.repeat import repeat

            return repeat(job.config.run, job.config.node.mode, job.rounds, Path(job.result))


def _play_role(job: PlayRole) -> int:
    match job.role:
        case "miner":
            from neurons import miner

            return miner.main(job.config, cheat=job.cheat or None)
        case "validator":
            from neurons import validator

            return validator.main(job.config)
        case _:
            from neurons import orchestrator

            return orchestrator.main(job.config)
