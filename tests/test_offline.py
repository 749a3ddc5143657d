"""Without an internet connection, commands use their caches. If a cache lacks a file, they ask once and fail within seconds."""

import hashlib
import http.server
import json
import socket
import threading
import time

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import close_session

from common import downloads
from common.downloads import fetch_from_hub
from common.errors import UserError
from evaluations import inception
from latents import autoencoders

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/vae"


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """Fixture: makes the cache empty and the hub unreachable. hub(url) sets the address of another hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def at(url):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        close_session()

    at(closed())
    yield at
    close_session()


def closed():
    """Return an address that refuses connections."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def silent(monkeypatch):
    """Fixture: the address of a server that accepts connections and never answers. Timeouts are half a second."""
    monkeypatch.setattr(downloads, "TIMEOUT_SEC", 0.5)
    monkeypatch.setattr(inception, "TIMEOUT_SEC", 0.5)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def server(vae, hub):
    """Fixture: the address of a running server. It is a hub that holds the autoencoder, and also serves /file."""
    files = {f"/{NAME}/resolve/main/{file.name}": file.read_bytes() for file in vae.iterdir()} | {"/file": b"content"}
    siblings = [{"rfilename": name} for name in ("README.md", *(file.name for file in vae.iterdir()))]
    files[f"/api/models/{NAME}"] = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = files.get(self.path, b"")
            self.send_response(200 if content else 404)
            if not content:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Type", "application/json" if "/api/" in self.path else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        hub(f"http://127.0.0.1:{running.server_port}")
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def seconds():
    """Fixture: fails a test that takes 5 seconds or more. An offline user should not wait longer for an error."""
    start_sec = time.perf_counter()
    yield
    assert time.perf_counter() - start_sec < 5


# ----------------------------------------------------------------------------------------------------------------------
# The Hugging Face hub.


def test_a_missing_autoencoder_is_downloaded_once_and_then_used_without_asking_the_hub(server, hub, monkeypatch):
    def build():
        return autoencoders.build(f"sd-vae:{NAME}", torch.device("cpu"), 4, "fp32")

    first = build()
    hub(closed())
    assert build().hash() == first.hash()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert build().hash() == first.hash()


def test_a_hub_that_refuses_connections_gives_a_one_line_error_at_once(seconds):
    with pytest.raises(UserError, match=f"^give one; {NAME} .*cannot be downloaded .*refused") as error:
        fetch_from_hub(NAME, *autoencoders.HUB_FILES, otherwise="give one")
    assert "\n" not in str(error.value)


def test_a_hub_that_never_answers_gives_an_error_within_seconds(hub, silent, seconds):
    hub(silent)
    with pytest.raises(UserError, match="cannot be downloaded .*timed out"):
        fetch_from_hub(NAME, *autoencoders.HUB_FILES, otherwise="")


def test_the_error_names_the_offline_mode_of_the_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        fetch_from_hub(NAME, *autoencoders.HUB_FILES, otherwise="")


def test_the_error_names_an_id_that_the_hub_does_not_know(server):
    with pytest.raises(UserError, match="cannot be downloaded .404.*someone/veo"):
        fetch_from_hub("someone/veo", *autoencoders.HUB_FILES, otherwise="")


# ----------------------------------------------------------------------------------------------------------------------
# Other files.


def test_downloaded_inception_weights_are_complete_or_absent(server, silent, tmp_path, seconds, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "new"))
    sha256 = hashlib.sha256(b"content").hexdigest()[:8]
    for url, digest, message in [
        (f"{server}/file", "12345678", "invalid hash value"),
        (f"{server}/nothing", sha256, "404"),
        (f"{silent}/file", sha256, "timed out"),
        (closed(), sha256, "refused"),
    ]:
        monkeypatch.setattr(inception, "WEIGHTS_URL", url)
        monkeypatch.setattr(inception, "WEIGHTS_SHA256_PREFIX", digest)
        with pytest.raises(UserError, match=f"Inception weights cannot be downloaded .*{message}.*or put {url} at"):
            inception.fetch_weights()
        assert [path.suffix for path in (tmp_path / "new" / "checkpoints").iterdir()] == [".lock"]
    monkeypatch.setattr(inception, "WEIGHTS_URL", f"{server}/file")
    assert inception.fetch_weights().read_bytes() == b"content"
