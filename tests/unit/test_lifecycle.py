"""How a process ends: in time, with one message, with its own exit code."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from neurons.claims import directory_claim, hotkey_claim, require_free_port
from neurons.exit_codes import MEANINGS, RESTART_IS_USELESS, ExitCode, exit_code_of, exit_code_table
from subnet.errors import (
    Backpressure,
    InvalidConfig,
    InvariantBroken,
    Refused,
    StartupRefused,
    StrataError,
    Superseded,
    TransientFailure,
)
from subnet.types import Hotkey

ALICE = Hotkey("5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY")

PRELUDE = """
import asyncio, signal, sys, logging
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
from neurons.lifecycle import run_role
from subnet.errors import *
log = logging.getLogger("test")
"""


def role(body: str, limit_s: float = 8.0, log_file: str = "") -> list[str]:
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    call = f"sys.exit(run_role(main, role='miner', limit_s={limit_s}, log_file={log_file!r}))"
    return [sys.executable, "-c", f"{PRELUDE}\nasync def main(stop):\n{indented}\n{call}"]


def ended(body: str, log_file: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(role(body, log_file=log_file), capture_output=True, text=True, timeout=30, check=False)


def signalled(body: str, *signals: signal.Signals, limit_s: float = 8.0) -> tuple[int, str]:
    """Exit code and stderr of a role that prints "ready", then gets `signals`, each when it has printed a line."""
    with subprocess.Popen(role(body, limit_s), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number in signals:
            process.stdout.readline()
            process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        return process.returncode, stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_role_finish_and_say_what_was_lost(number: signal.Signals) -> None:
    code, stderr = signalled(
        """
print("ready", flush=True)
reason = await stop.wait()
stop.report_lost("3 samples in flight")
""",
        number,
    )
    assert code == ExitCode.OK
    assert f"strata miner stopped ({number.name}); lost: 3 samples in flight" in stderr


def test_a_role_that_lost_nothing_says_so() -> None:
    code, stderr = signalled("print('ready', flush=True)\nawait stop.wait()", signal.SIGTERM)
    assert code == ExitCode.OK
    assert "lost: nothing" in stderr


def test_a_role_that_does_not_listen_is_cancelled_in_time() -> None:
    code, stderr = signalled("print('ready', flush=True)\nawait asyncio.sleep(1000)", signal.SIGTERM, limit_s=0.5)
    assert code == ExitCode.OK
    assert "did not finish by itself" in stderr


@pytest.mark.parametrize(
    "body",
    [
        "print('ready', flush=True)\nimport time\nwhile not stop.is_requested:\n    await asyncio.sleep(0)\ntime.sleep(1000)",
        "print('ready', flush=True)\nimport time\nawait asyncio.to_thread(time.sleep, 1000)",
        "print('ready', flush=True)\nwhile True:\n    try:\n        await asyncio.sleep(1000)\n"
        "    except asyncio.CancelledError:\n        pass",
    ],
    ids=["blocked loop", "thread that never joins", "swallowed cancellation"],
)
def test_a_role_that_cannot_stop_is_ended_at_the_limit(body: str) -> None:
    code, stderr = signalled(body, signal.SIGTERM, limit_s=0.5)
    assert code == ExitCode.FORCED
    assert "did not stop within 0.5 s of SIGTERM" in stderr


def test_a_second_signal_ends_at_once() -> None:
    code, stderr = signalled(
        """
print("ready", flush=True)
await stop.wait()
print("stopping", flush=True)
await asyncio.sleep(1000)
""",
        signal.SIGINT,
        signal.SIGINT,
        limit_s=600,
    )
    assert code == ExitCode.FORCED
    assert "told twice to stop (SIGINT)" in stderr


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("raise StartupRefused('no wallet here.\\nType this.', 65)", 65, "strata: no wallet here.\nType this.\n"),
        ("raise InvalidConfig('merge.quorum is odd')", 64, "strata: merge.quorum is odd\n"),
        (
            "async with asyncio.TaskGroup() as group:\n"
            "    async def fail():\n        raise TransientFailure('redis is away')\n"
            "    group.create_task(fail())",
            75,
            "strata: redis is away\n",
        ),
    ],
)
def test_a_known_reason_is_one_message_without_traceback(body: str, code: int, text: str) -> None:
    process = ended(body)
    assert process.returncode == code
    assert process.stderr.endswith(text)
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("how", ["plain", "in a group", "in a store"])
def test_a_disk_that_takes_no_more_is_a_message(how: str, tmp_path: Path) -> None:
    full = f"""
import resource
from pathlib import Path
from subnet.adapters.system import DirectoryDisk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
disk = DirectoryDisk(Path({str(tmp_path)!r}))
await disk.write("whole", b"1")
"""
    fill = 'await disk.write("state", bytes(1 << 20))'
    bodies = {
        "plain": fill,
        "in a group": f"async with asyncio.TaskGroup() as group:\n    group.create_task({fill.removeprefix('await ')})",
        "in a store": f"try:\n    {fill}\nexcept OSError as error:\n    raise TransientFailure('cannot store it') from error",
    }
    process = ended(full + bodies[how])
    assert process.returncode == ExitCode.DISK_FULL
    assert "strata: the disk takes no more: File too large" in process.stderr
    assert "Make room, then start again" in process.stderr
    assert "Traceback" not in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_log_whose_disk_is_full_is_left_and_said_once(tmp_path: Path) -> None:
    body = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for number in range(20):
    log.info("x" * 1000, extra={"number": number})
"""
    process = ended(body, log_file=str(tmp_path / "log.jsonl"))
    assert process.returncode == ExitCode.OK
    assert process.stderr.count("cannot be written (File too large)") == 1
    assert "Traceback" not in process.stderr and "Logging error" not in process.stderr
    assert '"number": 19' in process.stderr


@pytest.mark.parametrize("file", ["/proc/nowhere/log", ".", "/dev/null/log"])
def test_a_log_that_cannot_be_written_stops_the_start(file: str) -> None:
    process = ended("pass", log_file=file)
    assert process.returncode == ExitCode.INVALID_CONFIG
    assert "cannot be written" in process.stderr and "--log-file" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "body",
    [
        "raise KeyError('oops')",
        "async with asyncio.TaskGroup() as group:\n    async def fail():\n        raise KeyError('oops')\n"
        "    group.create_task(fail())",
    ],
)
def test_a_fault_of_ours_is_logged_whole(body: str, tmp_path: Path) -> None:
    process = ended(body, log_file=str(tmp_path / "log.jsonl"))
    assert process.returncode == ExitCode.UNEXPECTED
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[-1]["level"] == "critical"
    assert "KeyError: 'oops'" in records[-1]["exception"]
    assert "a fault of Strata" in process.stderr


def test_a_role_may_open_as_many_files_and_sockets_as_its_system_allows() -> None:
    line = shlex.join(role("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"))
    ran = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 256; exec {line}"], capture_output=True, text=True, timeout=60, check=True
    )
    soft, hard = map(int, ran.stdout.split())
    assert soft == (65_536 if hard == -1 else max(256, min(hard, 65_536)))


def test_logs_are_json_lines_with_fields(tmp_path: Path) -> None:
    process = ended(
        'log.warning("replay rejected", extra={"hotkey": "5F", "epoch": 3})\nlog.debug("too fine")',
        log_file=str(tmp_path / "logs" / "log.jsonl"),
    )
    assert process.returncode == ExitCode.OK
    for text in (process.stderr, (tmp_path / "logs" / "log.jsonl").read_text()):
        (record,) = [json.loads(line) for line in text.splitlines()]
        assert record | {"timestamp": ""} == {
            "event": "replay rejected",
            "level": "warning",
            "hotkey": "5F",
            "epoch": 3,
            "role": "miner",
            "timestamp": "",
        }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidConfig("x"), ExitCode.INVALID_CONFIG),
        (InvariantBroken("x"), ExitCode.INVARIANT_BROKEN),
        (Superseded("x"), ExitCode.SUPERSEDED),
        (Refused("banned", "x"), ExitCode.REFUSED),
        (TransientFailure("x"), ExitCode.UNAVAILABLE),
        (Backpressure("x"), ExitCode.UNAVAILABLE),
        (StartupRefused("x", ExitCode.NO_RUN), ExitCode.NO_RUN),
        (StrataError("x"), ExitCode.UNEXPECTED),
    ],
)
def test_each_kind_of_error_has_its_code(error: StrataError, code: ExitCode) -> None:
    assert exit_code_of(error) == code


def test_every_code_is_explained_and_told_apart() -> None:
    assert set(MEANINGS) == set(ExitCode)
    assert len(set(MEANINGS.values())) == len(ExitCode)
    assert 2 not in set(ExitCode)
    worth_a_restart = {ExitCode.OK, ExitCode.UNAVAILABLE, ExitCode.CHAIN_UNREACHABLE, ExitCode.SUPERSEDED}
    assert set(RESTART_IS_USELESS).isdisjoint(worth_a_restart)
    assert len(exit_code_table().splitlines()) == len(ExitCode)


CLAIMER = """
import sys
from pathlib import Path
from neurons.claims import hotkey_claim
with hotkey_claim(Path(sys.argv[1]), sys.argv[2], chain="local", netuid=2, role="miner"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_on_one_hotkey_is_refused_naming_the_first_until_it_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", CLAIMER, str(tmp_path), ALICE]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(
                StartupRefused, match=rf"already at work on netuid 2: pid {first.pid} \(strata miner\), since 20"
            ) as caught,
            hotkey_claim(tmp_path, ALICE, chain="local", netuid=2, role="miner"),
        ):
            raise AssertionError("two processes hold one hotkey")
        assert caught.value.exit_code == ExitCode.SECOND_PROCESS
        with hotkey_claim(tmp_path, ALICE, chain="local", netuid=3, role="miner"):
            first.kill()
            first.wait(timeout=10)
    with hotkey_claim(tmp_path, ALICE, chain="local", netuid=2, role="miner"):
        assert json.loads(next(tmp_path.glob("*.lock")).read_text())["pid"] == os.getpid()


def test_a_directory_serves_one_run(tmp_path: Path) -> None:
    own = tmp_path / "data"
    for _ in range(2):
        with directory_claim(own, "run-1", role="miner"):
            (own / "checkpoint").write_text("x")
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(StartupRefused, match="belongs to run run-1, this is run run-2; nothing was changed") as caught:
        _claim(own, "run-2")
    assert caught.value.exit_code == ExitCode.FOREIGN_DIRECTORY
    assert sorted(path.name for path in own.iterdir()) == before


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with (
        directory_claim(tmp_path, "run-1", role="miner"),
        pytest.raises(StartupRefused, match=f"pid {os.getpid()}") as caught,
    ):
        _claim(tmp_path, "run-1")
    assert caught.value.exit_code == ExitCode.SECOND_PROCESS


def test_a_strangers_directory_is_refused_but_a_configuration_may_lie_there(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "holiday.jpg").write_text("")
    with pytest.raises(StartupRefused, match=r"not empty and not Strata's \(it has holiday.jpg\)"):
        _claim(tmp_path, "run-1")
    (tmp_path / "holiday.jpg").unlink()
    _claim(tmp_path, "run-1")
    assert (tmp_path / "run-id").read_text() == "run-1\n"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupRefused, match="cannot be written"):
        _claim(tmp_path / "file" / "data", "run-1")


def _claim(directory: Path, run_id: str) -> None:
    with directory_claim(directory, run_id, role="miner"):
        pass


def test_a_taken_port_is_refused_naming_who_has_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(StartupRefused, match=rf"port {port} is taken by pid {os.getpid()} \(") as caught:
            require_free_port("127.0.0.1", port)
        assert caught.value.exit_code == ExitCode.PORT_TAKEN
    require_free_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupRefused, match=r"cannot listen on 192\.0\.2\.1"):
        require_free_port("192.0.2.1", 8091)
