"""Copies in object stores: whole or absent, checked at both ends, gone on with after any fault."""

from __future__ import annotations

import datetime
import http.server
import json
import shutil
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from dsjax.checkpoint import DiskCheckpoints, copies
from dsjax.checkpoint.remote import RemoteCheckpoints
from dsjax.config.checkpoint import RemoteConfig
from dsjax.errors import ConfigError, Damaged, InputError

obstore = pytest.importorskip("obstore")


@pytest.fixture
def checkpoint(tmp_path):
    """A directory as large as it takes: a file of several parts, small ones, an empty one."""
    path = tmp_path / "run" / "7"
    (path / "state" / "d").mkdir(parents=True)
    (path / "state" / "d" / "big").write_bytes(np.random.default_rng(0).bytes(20 * 2**20 + 3))
    for i in range(6):
        (path / "state" / f"small{i}").write_bytes(bytes([i]) * (1000 * i))
    return path


def remote(*urls, events=None, **settings):
    one = RemoteCheckpoints(RemoteConfig(urls=list(urls), **settings))
    if events is not None:
        one.on_event = lambda kind, **told: events.append((kind, told))
    return one


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in copies.files_of(directory)}


def fetched(store, to: Path) -> dict[str, bytes]:
    store.fetch(7, to)
    return contents(to)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_there_and_back(tmp_path, checkpoint, kind):
    url, events = (f"file://{tmp_path}/store" if kind == "file" else "memory:///"), []
    store = remote(url, events=events)
    assert store.newest() is None
    store.copy(7, checkpoint)
    assert store.wait(30)
    store.close()
    assert [e[0] for e in events] == ["checkpoint_copied"]
    assert events[0][1]["sent"] == events[0][1]["bytes"] == sum(copies.files_of(checkpoint).values())
    assert store.newest() == 7
    assert fetched(store, tmp_path / "back") == contents(checkpoint)
    assert [one["step"] for one in store.listing()[url]] == [7]
    assert copies.send(copies.open_store(url, create=True), 7, checkpoint)["sent"] == 0


def test_an_interrupted_copy_does_not_count_and_is_gone_on_with(tmp_path, checkpoint, monkeypatch):
    store, put = copies.open_store(f"file://{tmp_path}/store", create=True), obstore.put
    monkeypatch.setattr(copies, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(copies, "_PARALLEL", 1)

    def failing(store, name, *args, **kwargs):
        if name.endswith("small3"):
            raise OSError("no route")
        return put(store, name, *args, **kwargs)

    monkeypatch.setattr(obstore, "put", failing)
    with pytest.raises(OSError, match="no route"):
        copies.send(store, 7, checkpoint)
    assert copies.stored_steps(store) == {7: False}
    with pytest.raises(InputError, match="holds no whole copy of step 7"):
        copies.fetch(store, 7, tmp_path, "here")
    monkeypatch.undo()
    (tmp_path / "store" / "7" / "state" / "small1").write_bytes(b"x" * 1000)  # Changed there meanwhile.
    done = copies.send(store, 7, checkpoint)
    assert 1000 + 3000 <= done["sent"] <= 1000 + 3000 + 4000 + 5000
    assert fetched(remote(f"file://{tmp_path}/store"), tmp_path / "back") == contents(checkpoint)
    assert set(copies.files_of(tmp_path / "store" / "7")) == {*copies.files_of(checkpoint), "manifest.json"}


def test_what_arrives_wrong_is_sent_again(tmp_path, checkpoint, monkeypatch):
    put, spoiled = obstore.put, []

    def spoiling(store, name, data, **kwargs):
        if name.endswith("small5") and not spoiled:
            spoiled.append(name)
            data = b"?" * 5000
        return put(store, name, data, **kwargs)

    monkeypatch.setattr(obstore, "put", spoiling)
    monkeypatch.setattr("dsjax.checkpoint.remote._WAITS", (0.01,))
    events = []
    store = remote(f"file://{tmp_path}/store", events=events)
    store.copy(7, checkpoint)
    assert store.wait(30)
    assert [e[0] for e in events] == ["copy_failed", "checkpoint_copied"]
    assert "small5 is not there as it was sent" in events[0][1]["reason"]
    assert fetched(store, tmp_path / "back") == contents(checkpoint)
    store.close()


def test_a_damaged_copy_gives_way_to_the_other_store(tmp_path, checkpoint):
    a, b = (f"file://{tmp_path}/{name}" for name in "ab")
    store = remote(a, b)
    store.copy(7, checkpoint)
    assert store.wait(30)
    with (tmp_path / "a/7/state/d/big").open("r+b") as stream:
        stream.seek(9_000_000)
        stream.write(b"!!")
    with pytest.raises(Damaged, match=r"a: the copy of step 7 is damaged: state/d/big"):
        remote(a).fetch(7, tmp_path / "one")
    assert not (tmp_path / "one").exists()
    assert fetched(store, tmp_path / "two") == contents(checkpoint)
    (tmp_path / "b/7/state/small2").unlink()
    with pytest.raises(Damaged, match="state/small2 is not there"):
        remote(b).fetch(7, tmp_path / "three")
    # What one store lacks and what is damaged in the other make a whole.
    assert fetched(store, tmp_path / "four") == contents(checkpoint)


def test_one_store_that_fails_does_not_hold_up_the_other(tmp_path, checkpoint, monkeypatch):
    events, put = [], obstore.put
    bad, good = copies.open_store(f"file://{tmp_path}/bad", create=True), f"file://{tmp_path}/good"

    def failing(store, *args, **kwargs):
        if store is bad:
            raise OSError("down")
        return put(store, *args, **kwargs)

    monkeypatch.setattr(obstore, "put", failing)
    store = remote(f"file://{tmp_path}/bad", good, events=events)
    store.copy(7, checkpoint)
    assert not store.wait(1.5)
    assert store.busy() == {7}
    assert remote(good).newest() == 7
    begin = time.monotonic()
    store.close(grace=0.2)
    assert time.monotonic() - begin < 3
    kinds = [kind for kind, _ in events]
    assert {"checkpoint_copied", "copy_failed", "copy_abandoned"} == set(kinds)


def test_old_copies_go_and_only_the_newest_waits(tmp_path, checkpoint):
    store, root = remote(f"file://{tmp_path}/store", keep=2), tmp_path / "store"
    for step in (1, 2, 3):
        shutil.copytree(checkpoint, tmp_path / "run" / str(step))
    (root / "0").mkdir(parents=True)
    (root / "0" / "part").write_bytes(b"of a copy that never was whole")
    for step in (1, 2, 3):
        store.copy(step, tmp_path / "run" / str(step))
        assert store.wait(30)
    assert sorted(path.name for path in root.iterdir()) == ["2", "3"]
    store.close()


def test_the_pace_is_kept_and_a_stop_is_at_once(tmp_path, checkpoint):
    begin = time.monotonic()
    copies.send(copies.open_store(f"file://{tmp_path}/s", create=True), 7, checkpoint, copies.Pace(15e6))
    assert time.monotonic() - begin > 1.0  # 21 MB, of which the last part need not be waited for.
    slow = remote(f"file://{tmp_path}/t", bandwidth_mb=0.5)
    slow.copy(7, checkpoint)
    time.sleep(0.3)
    begin = time.monotonic()
    slow.close(grace=0.1)
    assert time.monotonic() - begin < 2.0
    assert remote(f"file://{tmp_path}/t").newest() is None


def test_faults_are_told(tmp_path):
    with pytest.raises(ConfigError, match="gopher://x: cannot be opened"):
        remote("gopher://x")
    (tmp_path / "store" / "7").mkdir(parents=True)
    (tmp_path / "store" / "7" / "manifest.json").write_text(json.dumps({"files": {"../x": {"bytes": 1}}}))
    with pytest.raises(InputError, match="a file outside of it"):
        remote(f"file://{tmp_path}/store").fetch(7, tmp_path / "to")


# ---- a real server -----------------------------------------------------------------------------


@pytest.mark.slow
def test_s3_holds_a_checkpoint_that_restores(tmp_path, server, s3):
    state = {"w": np.arange(3_000_000, dtype=np.float32)}
    disk = DiskCheckpoints(tmp_path / "run")
    disk.save(3, state, {})
    disk.close()
    store = remote("s3://bucket/a/b")
    assert store.newest() is None
    store.copy(3, tmp_path / "run" / "3")
    assert store.wait(60)
    shutil.rmtree(tmp_path / "run")
    assert store.newest() == 3
    store.fetch(3, tmp_path / "run" / "3")
    part = DiskCheckpoints(tmp_path / "run").restore_part(3, {"w": _like(state["w"])})
    np.testing.assert_array_equal(part["w"], state["w"])
    store.close()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_told(server, s3):
    with pytest.raises(InputError, match=r"s3://nobucket/x: cannot be read .*bucket does not exist"):
        remote("s3://nobucket/x").newest()


@pytest.mark.slow
def test_s3_that_is_down_for_a_while_is_waited_for(tmp_path, server, s3, checkpoint, monkeypatch, free_port):
    monkeypatch.setattr("dsjax.checkpoint.remote._WAITS", (0.5,))
    monkeypatch.setattr(copies, "_seconds", lambda seconds: datetime.timedelta(seconds=1))
    events, port = [], free_port
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    store = remote("s3://bucket/down", events=events)
    with pytest.raises(InputError, match="s3://bucket/down: cannot be read"):
        store.newest()
    store.copy(7, checkpoint)
    assert not store.wait(3)
    with _Faulty(server, port, every=10**6):
        assert store.wait(60)
        assert fetched(store, tmp_path / "back") == contents(checkpoint)
    kinds = [kind for kind, _ in events]
    assert kinds[0] == "copy_failed"
    assert kinds[-1] == "checkpoint_copied"
    store.close()


@pytest.mark.slow
def test_s3_that_answers_500_now_and_then(tmp_path, server, s3, checkpoint, monkeypatch):
    with _Faulty(server) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{faulty.port}")
        monkeypatch.setattr("dsjax.checkpoint.remote._WAITS", (0.2,))
        store = remote("s3://bucket/faulty")
        store.copy(7, checkpoint)
        assert store.wait(90)
        assert faulty.refused > 3
        assert fetched(store, tmp_path / "back") == contents(checkpoint)
        store.close()


def _like(array):
    import jax

    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )


class _Faulty:
    """A server in front of another that answers every third request, say, with 500."""

    def __init__(self, port: int, own: int = 0, every: int = 3):
        self.refused, owner = 0, self
        count = iter(range(10**6))

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if next(count) % every == 1:
                    owner.refused += 1
                    self.answer(500, {}, b"")
                    return
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}{self.path}",
                    data=body or None,
                    method=self.command,
                    headers=dict(self.headers),
                )
                try:
                    with urllib.request.urlopen(request) as reply:
                        self.answer(reply.status, reply.headers, reply.read())
                except urllib.error.HTTPError as error:
                    self.answer(error.code, error.headers, error.read())

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

            def answer(self, status, headers, body) -> None:
                self.send_response(status)
                for name, value in dict(headers).items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", own), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()
