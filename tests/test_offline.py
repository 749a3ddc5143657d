"""Without a network: what is in a cache is used, and what is not is asked for once, within seconds."""

import hashlib
import http.server
import json
import logging
import socket
import threading
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from conftest import make_shard
from huggingface_hub import close_session

import prepare_latents
from common.downloads import ANSWER_SEC, answer_within, download
from evaluations import inception as detectors
from latents import autoencoders

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = autoencoders.SD_VAES[0]


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """The folder of a tiny AutoencoderKL."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("vae")
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, layers_per_block=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """An empty cache, and a hub that nobody can reach; hub(url) sets another. Gives the cache's folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def at(url: str) -> Path:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(detectors, "WEIGHTS_URL", f"{url}/inception.pth")
        close_session()
        return tmp_path / "hub"

    at(f"http://127.0.0.1:{closed_port()}")
    yield at
    close_session()


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def server(vae, hub):
    """A hub with the tiny autoencoder under the usual name, and Inception's file; gives the paths that it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(f"{self.command} {self.path}")
            kind, content = "application/json", None
            if self.path == f"/api/models/{NAME}":
                siblings = [{"rfilename": name} for name in ("README.md", *(file.name for file in vae.iterdir()))]
                content = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
            elif self.path == "/api/models/other/model":
                content = json.dumps({"id": "other/model", "sha": COMMIT, "siblings": [{"rfilename": "README.md"}]}).encode()
            elif self.path.startswith(f"/{NAME}/resolve/main/"):
                kind, content = "application/octet-stream", (vae / Path(self.path).name).read_bytes()
            elif self.path == "/inception.pth":
                content = b"inception"
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            content = content or b""
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        hub(f"http://127.0.0.1:{running.server_port}")
        yield asked
        running.shutdown()


def build(name: str = NAME):
    return autoencoders.build(f"sd-vae:{name}", torch.device("cpu"), 4, "data.autoencoder")


@pytest.fixture
def seconds():
    """Fails a test that takes longer than a user without a network is to wait."""
    start_sec = time.perf_counter()
    yield
    assert time.perf_counter() - start_sec < ANSWER_SEC + 1


def test_a_missing_autoencoder_is_downloaded_once_and_then_used_without_asking(server, hub, caplog):
    with caplog.at_level(logging.INFO):
        first = build()
    assert f"of {NAME} from the Hugging Face hub to the cache" in caplog.text
    hub(f"http://127.0.0.1:{closed_port()}")
    asked = len(server)
    assert build().fingerprint() == first.fingerprint()
    assert len(server) == asked and not any("README" in path for path in server)


def test_a_cached_autoencoder_works_in_the_hubs_offline_mode(server, monkeypatch):
    first = build()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert build().fingerprint() == first.fingerprint()


def test_the_hubs_offline_mode_is_named_where_nothing_is_cached(monkeypatch, seconds):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"is not in the cache of the Hugging Face hub, and HF_HUB_OFFLINE=1 forbids"):
        build()


def test_a_hub_that_refuses_connections_gives_one_message_at_once(caplog, seconds):
    with pytest.raises(ValueError, match="cannot be downloaded .*refused.*run `python prepare_latents.py fetch` once") as error:
        build()
    assert "or give a local copy with data.autoencoder=sd-vae:<folder>" in str(error.value) and "\n" not in str(error.value)
    assert caplog.records == []


def test_a_hub_that_never_answers_is_given_up_within_seconds(hub, silent, caplog, seconds):
    hub(silent)
    with pytest.raises(ValueError, match="cannot be downloaded .*(timed out|no answer)"):
        build()
    assert caplog.records == []


def test_a_proxy_that_never_answers_is_given_up_within_seconds(hub, silent, monkeypatch, seconds):
    hub("https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", silent)
    with pytest.raises(ValueError, match="cannot be downloaded"):
        build()


def test_a_name_server_that_never_answers_is_given_up_within_seconds(hub, monkeypatch, seconds):
    hub("https://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(60))
    with pytest.raises(ValueError, match="no answer within 2.5 s"):
        build()


def test_a_download_from_a_server_that_never_answers_is_given_up_within_seconds(silent, tmp_path, seconds):
    with pytest.raises(ValueError, match="no answer within 2.5 s"):
        download(f"{silent}/file", tmp_path / "file", "", show_progress=False)


def test_an_id_that_the_hub_does_not_know_is_said_to_be_wrong(server):
    with pytest.raises(ValueError, match="hub has no model .* that you may read; the usual one is sd-vae:stabilityai/"):
        build("stabilityai/sd-vae-ft-emma")


def test_a_model_of_the_hub_that_is_no_autoencoder_is_refused(server):
    with pytest.raises(ValueError, match="sd-vae:other/model: this model of the hub is not an AutoencoderKL .*config.json"):
        build("other/model")


def test_the_message_for_another_autoencoder_names_it_in_the_command():
    with pytest.raises(ValueError, match="`python prepare_latents.py fetch autoencoder=sd-vae:my/vae` once"):
        build("my/vae")


def test_an_autoencoder_whose_weights_are_missing_from_the_cache_is_completed(server, vae):
    build()
    for file in autoencoders.find_files(NAME, "").glob("*.safetensors"):
        file.resolve().unlink()
        file.unlink()
    assert build().factor == 2


# ----------------------------------------------------------------------------------------------------------------------
# fetch.


def test_fetch_fills_both_caches_and_then_needs_no_network(server, hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(detectors, "WEIGHTS_SHA256", hashlib.sha256(b"inception").hexdigest()[:8])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            prepare_latents.main(["fetch"])
        assert f"sd-vae:{NAME} is complete: {tmp_path / 'hub'}" in caplog.text
        assert f"Inception is complete: {tmp_path / 'torch'}" in caplog.text
        hub(f"http://127.0.0.1:{closed_port()}")
    assert "downloading" not in caplog.text


def test_fetch_without_a_network_has_a_line_for_each_of_both(seconds):
    with pytest.raises(ValueError, match="the autoencoder sd-vae:stabilityai") as error:
        prepare_latents.main(["fetch"])
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and lines[1].startswith("the Inception weights cannot be downloaded (")
    assert "fetch` once" in lines[1] and "TORCH_HOME" in lines[1]


def test_a_download_that_is_cut_off_leaves_nothing(server, tmp_path):
    with pytest.raises(ValueError, match="its SHA-256 is .* instead of 6726825d"):
        detectors.fetch_weights()
    assert not [file for file in tmp_path.rglob("*") if "weights-inception" in file.name]


def test_an_error_of_what_is_asked_for_reaches_who_waits():
    with pytest.raises(KeyError, match="mine"):
        answer_within(1.0, lambda: {}["mine"])


# ----------------------------------------------------------------------------------------------------------------------
# Cheap checks come first.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["images=/nowhere", "output=out"], "images=/nowhere"),
        (["images=IMAGES", "output=out", "labels=/nowhere.csv"], "/nowhere.csv"),
        (["images=IMAGES", "output=out", "resolution=33"], "resolution=33 is not a multiple of 8"),
        (["images=IMAGES", "output=FILE"], "is a file; give a folder"),
        (["images=IMAGES", "output=SHARDS"], "already holds shard.safetensors, which this command did not write"),
    ],
)
def test_encode_checks_its_arguments_before_it_looks_for_the_autoencoder(tmp_path, given, message, monkeypatch):
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "images" / name / "0.png")
    (tmp_path / "file").touch()
    make_shard(tmp_path / "shards" / "shard.safetensors")
    monkeypatch.chdir(tmp_path)
    places = {"IMAGES": "images", "FILE": "file", "SHARDS": "shards"}
    for name, place in places.items():
        given = [argument.replace(name, str(tmp_path / place)) for argument in given]
    with pytest.raises(ValueError, match=message):
        prepare_latents.main(["encode", *given])
