"""Download files from the Hugging Face hub without retries, so that a command without internet access fails within seconds."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError

TIMEOUT_SEC = 10.0  # timeout for connecting and for receiving the next byte


def fetch_from_hub(repository: str, *names: str, otherwise: str) -> list[Path]:
    """Return the paths of a repository's files in the hub's cache. If a file is not in the cache, download all files.

    Concurrent processes wait for a single download. Raises UserError if the download fails. The message starts with `otherwise`.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    try:
        cached = [try_to_load_from_cache(repository, name) for name in names]
        if all(isinstance(file, str) for file in cached):
            return [Path(file) for file in cached]
        HfApi().model_info(repository, timeout=TIMEOUT_SEC)  # fails fast, whereas hf_hub_download would retry
        return [Path(hf_hub_download(repository, name)) for name in names]
    except (OSError, HTTPError, ValueError) as e:  # invalid hub names raise ValueError
        problem = f"{repository} is not in the cache of the Hugging Face hub and cannot be downloaded"
        raise UserError(f"{otherwise}; {problem} ({' '.join(str(e).split())})") from e
