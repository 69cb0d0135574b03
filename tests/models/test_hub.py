"""Fetching from a hub: what is resumed, checked and told, with the real client and a
small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mtplx.errors import ModelLoadError
from mtplx.models import hub
from mtplx.models.cached import find_cached, local_models, remove_model
from mtplx.models.load import load_network
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import rewrite_config, saved

NAME = "org/tiny"
COMMIT = "1" * 40


class Hub:
    """Serves one repository.

    Attributes:
        ranges: Where the weights were asked to begin, when not at their beginning.
        bodies: The files that were sent.
        cut: Breaks the connection in the middle of the weights, once.
    """

    def __init__(self, folder):
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.ranges = []
        self.bodies = []
        self.cut = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, *, body):
                if self.path.startswith(f"/api/models/{NAME}"):
                    hub.tell(self)
                    return
                name = self.path.partition("?")[0].rpartition("/")[2]
                if name not in hub.files:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                hub.send(self, name, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tell(self, request):
        if "/tree/" in request.path:
            told = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
        else:
            told = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in self.files],
            }
        body = json.dumps(told).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def send(self, request, name, with_body):
        data = self.files[name]
        begin = 0
        if asked := request.headers.get("Range"):
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            if with_body and name.endswith(".safetensors"):
                self.ranges.append(begin)
        request.send_response(206 if begin else 200)
        if begin:
            span = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            request.send_header("Content-Range", span)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(data) - begin))
        request.end_headers()
        if not with_body:
            return
        self.bodies.append(name)
        if self.cut and name.endswith(".safetensors"):
            self.cut = False
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        request.wfile.write(data[begin:])

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def source(tmp_path):
    return saved(tmp_path / "source", tiny_llama())


@pytest.fixture
def served(source, tmp_path, monkeypatch):
    running = Hub(source)
    template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", running.url)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield running
    running.stop()


def test_pull(served, source):
    told = []
    folder = hub.pull(NAME, lambda what, fraction: told.append((what, fraction)))
    for name, data in served.files.items():
        assert (folder / name).read_bytes() == data
    fractions = [fraction for what, fraction in told if what == f"Downloading {NAME}"]
    assert fractions[-1] == 1.0
    assert all(0 < fraction <= 1 for fraction in fractions)
    [model] = [model for model in local_models() if model.origin == "hub"]
    assert (model.name, model.path) == (NAME, folder)


def test_a_model_of_the_hub_is_fetched_when_it_is_loaded(served):
    assert load_network(NAME, device="cpu", dtype="auto").name == NAME
    told = []
    hub.fetch(NAME, lambda what, fraction: told.append(fraction))


def test_a_broken_connection_is_gone_on_with(served, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    served.cut = True
    folder = hub.fetch(NAME)
    weights = served.files["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == weights
    (begin,) = served.ranges
    assert len(weights) // 2 - 1000 < begin <= len(weights) // 2


def test_files_that_arrived_are_not_fetched_again(served):
    folder = hub.fetch(NAME)
    assert sorted(served.bodies) == sorted(served.files)
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    served.bodies.clear()
    hub.fetch(NAME)
    assert served.bodies == ["model.safetensors"]


def test_an_architecture_that_cannot_run_is_refused_before_its_weights(served, source):
    rewrite_config(source, model_type="unheard_of")
    served.files["config.json"] = (source / "config.json").read_bytes()
    with pytest.raises(ModelLoadError, match="unheard_of"):
        hub.pull(NAME, lambda what, fraction: None)
    assert not list((hub.Path(hub.constants.HF_HUB_CACHE)).rglob("*.safetensors"))


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_disk_that_is_too_small_is_told_before_the_weights_come(served, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ModelLoadError, match="GB are free"):
        hub.pull(NAME, lambda what, fraction: None)


def test_what_arrived_is_looked_at(served):
    served.files["model.safetensors"] = served.files["model.safetensors"][:-100]
    with pytest.raises(ModelLoadError, match="should have"):
        hub.pull(NAME, lambda what, fraction: None)


def test_what_was_fetched_can_be_removed(served):
    hub.fetch(NAME)
    freed = remove_model(find_cached(NAME))
    assert freed >= len(served.files["model.safetensors"])
    assert NAME not in [model.name for model in local_models()]
