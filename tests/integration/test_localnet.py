"""`strata localnet` as a person runs it: real processes, a real chain node, kills, Ctrl-C, and what is left afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neurons.exit_codes import ExitCode
from subnet.adapters.embedded_store import find_embedded

STRATA = str(Path(sys.executable).with_name("strata"))
SMALL = """
[model]
width = 64
num_layers = 3
num_heads = 2
num_kv_heads = 2
ffn_width = 128
bottleneck_width = 1
[training]
microbatch_size = 4
num_tokens = 32
target_batches = 24
min_batches = 4
accumulate = 2
[audit]
checkpoint_every = 2
[deadlines]
training_s = 30.0
committing_s = 15.0
uploading_s = 15.0
merging_s = 15.0
"""
START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


class Localnet:
    """A running `strata localnet` and what it has printed so far."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.directory = root / "net"
        self.output = root / "output"
        config = root / "small.toml"
        config.write_text(SMALL)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [STRATA, "localnet", "--dir", str(self.directory), "--config", str(config),
                 "--set", f"node.lock_dir={root / 'locks'}", "--set", "localnet.tempo_blocks=20", *flags],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], bool], *, limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"not in time: {what}:\n{self.text}"
            time.sleep(0.05)

    def until_said(self, words: str, *, limit_s: float = START_LIMIT_S) -> None:
        self.until(lambda: words in self.text, limit_s=limit_s, what=words)

    def note(self, name: str) -> dict[str, Any]:
        notes: list[dict[str, Any]] = json.loads((self.directory / "processes.json").read_text())
        return next(note for note in notes if note["name"] == name)

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """What a node logged under this name, oldest first."""
        lines = (self.directory / "logs" / f"{name}.log").read_text().splitlines()
        facts = [json.loads(line) for line in lines if line.startswith("{")]
        return [fact for fact in facts if fact["event"] == event]

    def kill(self, name: str) -> int:
        pid: int = self.note(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self) -> list[int]:
        """Everything that was started for this directory, by the variable that all of it inherits, and the state store."""
        mark = f"={self.directory}/".encode()
        store = find_embedded(self.directory / "nodes" / "orchestrator" / "state")
        found = [] if store is None else [store.pid]
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + STOP_LIMIT_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == [], self.text


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Localnet]]:
    started: list[Localnet] = []

    def begin(*flags: str) -> Localnet:
        started.append(Localnet(tmp_path, *flags))
        return started[-1]

    yield begin
    for net in started:
        if net.process.poll() is None:
            net.process.send_signal(signal.SIGTERM)
            net.process.wait(STOP_LIMIT_S)


def strata(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_a_cheat_and_kills_holds_every_invariant(start: Callable[..., Localnet], tmp_path: Path) -> None:
    net = start("--miners", "6", "--validators", "2", "--epochs", "3", "--cheat", "identity:1")
    net.until_said("epoch 0  training")
    killed = net.kill("m2")
    net.until_said("epoch 1  training")
    net.kill("orchestrator")
    net.kill("v1")
    net.until_said("epoch 2  training")
    assert (net.note("m2")["restarts"], net.note("orchestrator")["restarts"]) == (1, 1)
    assert net.note("m2")["pid"] not in (0, killed)
    assert net.process.wait(240) == ExitCode.OK, net.text
    net.assert_nothing_is_left()

    first, second = net.logged("orchestrator", "recovered")
    assert first["at_record"] == 0 < second["at_record"], "killed in its second epoch, it went on from a stored state"
    assert net.logged("orchestrator", "state stored")

    report = json.loads((net.directory / "report.json").read_text())
    assert report["is_ok"] and not [finding for finding in report["findings"] if finding["holds"] is False]
    by_name = {row["name"]: row for row in report["miners"]}
    assert by_name["m1"]["weight"] == 0.0 and "banned" in by_name["m1"]["reason"]
    assert all(by_name[name]["weight"] > 0.0 and by_name[name]["earned_alpha"] > 0.0 for name in ("m2", "m3", "m6"))
    assert report["cheats"][0]["convicted_in_epoch"] is not None
    assert all(row["on_chain"] == row["expected"] and row["expected"] for row in report["validators"])
    assert report["reference_loss"] > 0.0

    _audit_tells_an_altered_byte(net, tmp_path)
    again = strata("localnet", "--dir", str(net.directory))
    assert again.returncode == ExitCode.FOREIGN_DIRECTORY
    assert "holds a finished local subnet; nothing was changed" in again.stderr


def _audit_tells_an_altered_byte(net: Localnet, tmp_path: Path) -> None:
    equal = strata("audit", str(net.directory), "--json")
    assert equal.returncode == ExitCode.OK, equal.stdout + equal.stderr
    assert json.loads(equal.stdout)["is_equal"]
    copy = tmp_path / "altered"
    shutil.copytree(net.directory, copy)
    segment = sorted((copy / "nodes" / "orchestrator" / "blobs" / "runs").glob("*/ledger/*"))[1]
    data = bytearray(segment.read_bytes())
    recorded = data.index(b'"fact":"LossRecorded"')
    last_digit = data.index(b",", data.index(b'"sample":', recorded)) - 1  # a number that is spelled in one way only
    data[last_digit] ^= 1
    segment.write_bytes(bytes(data))
    altered = strata("audit", str(copy))
    assert altered.returncode == ExitCode.CHECK_FAILED
    assert "segment 1, event " in altered.stdout and "(LossRecorded): altered" in altered.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_ends_everything_and_a_second_process_on_a_hotkey_is_refused(start: Callable[..., Localnet]) -> None:
    net = start("--miners", "3", "--validators", "1", "--epochs", "50")
    net.until_said("epoch 0  training")
    pid = net.note("m1")["pid"]
    second = strata("miner", "--config", str(net.directory / "nodes" / "m1" / "node.toml"))
    assert second.returncode == ExitCode.SECOND_PROCESS
    assert f"pid {pid} (strata miner)" in second.stderr
    net.process.send_signal(signal.SIGINT)
    assert net.process.wait(STOP_LIMIT_S) == ExitCode.INTERRUPTED
    assert "strata localnet stopped (SIGINT); lost: the run was in epoch" in net.text
    net.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_was_started_ends_when_localnet_is_killed(start: Callable[..., Localnet]) -> None:
    net = start("--miners", "3", "--validators", "1", "--epochs", "50")
    net.until_said("epoch 0  training")
    assert len(net.processes()) >= 3 + 1 + 2  # roles, chain, state store, and the warm parent
    net.process.kill()
    net.process.wait(STOP_LIMIT_S)
    net.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_role_that_cannot_start_stops_the_run_with_its_message(start: Callable[..., Localnet]) -> None:
    net = start("--miners", "3", "--validators", "1", "--set", "training.modes=bf16_autocast")
    assert net.process.wait(START_LIMIT_S) == ExitCode.INVALID_CONFIG
    assert "does not admit --mode fp32; it admits bf16_autocast" in net.text
    net.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_miner_whose_port_is_closed_to_the_others_is_told_so_and_earns(start: Callable[..., Localnet]) -> None:
    """Its stage's only miner: whatever is sent to it takes the detour, and what it sends is pushed."""
    flags = ("--set", "localnet.unreachable=2", "--set", "localnet.has_reference=false")
    net = start("--miners", "3", "--validators", "1", "--epochs", "2", *flags)
    assert net.process.wait(240) == ExitCode.OK, net.text
    report = json.loads((net.directory / "report.json").read_text())
    row = next(row for row in report["miners"] if row["name"] == "m2")
    assert row["units"] > 0 and row["audits_failed"] == 0
    assert row["weight"] > 0.0 and row["earned_alpha"] > 0.0
    planes = report["bytes_by_plane"]
    sent = planes["activation_payload"] + planes["gradient_payload"]
    assert 0 < planes["detoured"] < planes["passes"]
    assert planes["detoured_payload"] * planes["passes"] == sent * planes["detoured"], "every frame weighs the same"
    assert "through the store" in net.text
    assert "peers cannot reach this node" in (net.directory / "logs" / "m2.log").read_text()
    assert not [
        path for path in (net.directory / "nodes" / "orchestrator" / "blobs").rglob("frame/*/*") if path.is_file()
    ]
