"""Files from the network: one attempt, and an error within seconds where nothing answers."""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from common.errors import UserError, first_line
from common.files import write_file
from common.progress import progress_bar

log = logging.getLogger(__name__)

ANSWER_SEC = 2.5  # until a server answers
STALL_SEC = 30.0  # without a byte, during a download
CHUNK_BYTES = 1 << 20

T = TypeVar("T")


class NotDownloaded(UserError):
    """The reason why a file could not be had from the network; whoever asked for it says what helps."""


class NotOnHub(NotDownloaded):
    """The Hugging Face hub has no such model, or none that this user may read."""


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """The result of `ask()`, or its exception; TimeoutError after `seconds`.

    A timeout of `ask` itself does not cover the lookup of a name, which can take a minute where no name server answers.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as e:  # noqa: BLE001 (passed on to the thread that waits)
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()  # the program does not wait for it at its end
    try:
        return answer.result(timeout=seconds)
    except concurrent.futures.TimeoutError as e:
        raise TimeoutError(f"no answer within {seconds:g} s") from e


def download(url: str, file: Path, sha256: str, show_progress: bool) -> None:
    """Download a file, which appears under its name only when it is whole.

    Args:
        sha256: the first digits of its SHA-256.

    Raises:
        NotDownloaded
    """
    content = bytearray()
    try:
        response = answer_within(ANSWER_SEC, lambda: urllib.request.urlopen(url, timeout=STALL_SEC))
        log.info("downloading %s to %s", url, file)
        size = response.headers.get("Content-Length")
        bar = progress_bar(
            total=size and int(size), desc=file.name, unit="B", unit_scale=True, delay=1, leave=False, disable=not show_progress
        )
        with response, bar:
            while chunk := response.read(CHUNK_BYTES):
                content += chunk
                bar.update(len(chunk))
    except (OSError, http.client.HTTPException) as e:  # urllib's errors are OSErrors
        raise NotDownloaded(str(getattr(e, "reason", e)) or type(e).__name__) from e
    digest = hashlib.sha256(content).hexdigest()
    if not digest.startswith(sha256):
        raise NotDownloaded(f"invalid hash value: its SHA-256 is {digest[:8]}... instead of {sha256}...")
    write_file(file, content)


def is_hub_id(name: str) -> bool:
    """Whether `name` can be that of a model of the Hugging Face hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def download_from_hub(repository: str, choose: Callable[[list[str]], Iterable[str]]) -> list[Path]:
    """Download files of a model of the Hugging Face hub into its cache. Of several processes one downloads, the others wait.

    Args:
        choose: the names of all files of the model -> of those to download. Its errors are raised as they are.

    Returns:
        The files, in the order of `choose`.

    Raises:
        NotDownloaded: within ANSWER_SEC where nothing answers. NotOnHub.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        listing = answer_within(ANSWER_SEC, lambda: HfApi().model_info(repository, timeout=ANSWER_SEC))
        names = list(choose([file.rfilename for file in listing.siblings or ()]))
        where = f"{constants.HF_HUB_CACHE} (HF_HOME moves it)"
        log.info("downloading %s of %s from the Hugging Face hub to the cache %s", ", ".join(names), repository, where)
        return [Path(hf_hub_download(repository, name)) for name in names]
    except OfflineModeIsEnabled as e:
        raise NotDownloaded("HF_HUB_OFFLINE=1 forbids to download it") from e
    except RepositoryNotFoundError as e:
        raise NotOnHub(f"the Hugging Face hub has no model {repository} that you may read") from e
    # HTTPError is that of the library which the hub's client uses; its errors of connections are not OSErrors.
    except (OSError, HTTPError) as e:
        raise NotDownloaded(f"it cannot be downloaded ({first_line(e)})") from e
