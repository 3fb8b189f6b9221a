"""Real servers for the contract suites, started once."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from subnet.adapters.s3 import Bucket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
    raise AssertionError(f"nothing listens on port {port}")


@pytest.fixture(scope="session")
def s3_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A real S3 server that checks signatures, with one bucket."""
    directory: Path = tmp_path_factory.mktemp("s3")
    bucket = Bucket(
        endpoint=f"http://127.0.0.1:{free_port()}", name="strata", access_key="owner", secret_key="secret1234"
    )
    options = directory / "options.toml"
    options.write_text(f'[[users]]\naccess_key = "{bucket.access_key}"\nsecret_key = "{bucket.secret_key}"\n')
    (directory / "data" / bucket.name).mkdir(parents=True)
    port = bucket.endpoint.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "nanio", "serve", "--options", str(options), "--data-dir", str(directory / "data")]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port, "--log-level", "warning"], stdout=log, stderr=log
        )
    try:
        wait_for_port(int(port), process)
        yield bucket
    finally:
        process.terminate()
        process.wait(10)
