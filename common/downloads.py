"""Files of the Hugging Face hub: one attempt, and an error within seconds where nothing answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import UserError

TIMEOUT_SEC = 10.0  # until a server answers, and without a byte during a download


class NotDownloaded(UserError):
    """The reason why a file could not be downloaded. The caller adds what helps."""


def download_from_hub(repository: str, choose: Callable[[list[str]], Iterable[str]]) -> list[Path]:
    """Download files of a model of the Hugging Face hub into its cache. Of several processes one downloads, the others wait.

    Args:
        choose: the names of all files of the model -> of those to download. Its errors are raised as they are.

    Returns:
        The files, in the order of `choose`. Raises NotDownloaded.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HTTPError

    try:
        names = choose([file.rfilename for file in HfApi().model_info(repository, timeout=TIMEOUT_SEC).siblings or ()])
        return [Path(hf_hub_download(repository, name)) for name in names]
    except (OSError, HTTPError) as e:  # the hub's client raises errors of connections that are no OSErrors
        raise NotDownloaded(f"it cannot be downloaded ({' '.join(str(e).split())})") from e
