"""Files from the network: one attempt, and an error within seconds where nothing answers."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from common.errors import UserError, first_line

TIMEOUT_SEC = 10.0  # until a server answers, and without a byte during a download


class NotDownloaded(UserError):
    """The reason why a file could not be downloaded. The caller adds what helps."""


def download(url: str, file: Path, sha256: str, show_progress: bool) -> None:
    """Download a file, which appears under its name only when it is whole. Raises NotDownloaded.

    Args:
        sha256: the first digits of its SHA-256.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SEC)  # torch.hub sets none, and would wait for ever
    try:
        torch.hub.download_url_to_file(url, str(file), hash_prefix=sha256, progress=show_progress)
    except (OSError, http.client.HTTPException, RuntimeError) as e:  # RuntimeError: another SHA-256
        raise NotDownloaded(first_line(e)) from e
    finally:
        socket.setdefaulttimeout(before)


def is_hub_id(name: str) -> bool:
    """Whether `name` can be that of a model of the Hugging Face hub: owner/name, or a name alone."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def download_from_hub(repository: str, choose: Callable[[list[str]], Iterable[str]]) -> list[Path]:
    """Download files of a model of the Hugging Face hub into its cache. Of several processes one downloads, the others wait.

    Args:
        choose: the names of all files of the model -> of those to download. Its errors are raised as they are.

    Returns:
        The files, in the order of `choose`. Raises NotDownloaded.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        names = choose([file.rfilename for file in HfApi().model_info(repository, timeout=TIMEOUT_SEC).siblings or ()])
        return [Path(hf_hub_download(repository, name)) for name in names]
    except OfflineModeIsEnabled as e:
        raise NotDownloaded("HF_HUB_OFFLINE=1 forbids to download it") from e
    except RepositoryNotFoundError as e:
        raise NotDownloaded(f"the Hugging Face hub has no model {repository} that you may read") from e
    except (OSError, HTTPError) as e:  # the hub's client raises errors of connections that are no OSErrors
        raise NotDownloaded(f"it cannot be downloaded ({first_line(e)})") from e
