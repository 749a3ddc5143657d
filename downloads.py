"""Files from the network: one attempt, and an error within seconds where nothing answers."""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import logging
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from errors import UserError
from files import write_file
from progress import progress_bar

log = logging.getLogger(__name__)

ANSWER_SEC = 2.5  # until a server answers
STALL_SEC = 30.0  # without a byte, during a download
CHUNK_BYTES = 1 << 20

T = TypeVar("T")


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
        UserError: with the reason alone; the caller says what helps.
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
        raise UserError(str(getattr(e, "reason", e)) or type(e).__name__) from e
    digest = hashlib.sha256(content).hexdigest()
    if not digest.startswith(sha256):
        raise UserError(f"invalid hash value: its SHA-256 is {digest[:8]}... instead of {sha256}...")
    write_file(file, content)
