"""Download files from the Hugging Face hub. There are no retries, so a command without internet fails within seconds."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError

TIMEOUT_SEC = 10.0  # for a connection, and for the next byte of a download


def find_on_hub(repository: str, *names: str, otherwise: str) -> list[Path]:
    """Find files of a repository in the hub's cache without a request, or download them all into the cache.

    If several processes call this, one downloads and the others wait. Raises UserError, whose message starts with `otherwise`.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    try:
        cached = [try_to_load_from_cache(repository, name) for name in names]
        if all(isinstance(file, str) for file in cached):
            return [Path(file) for file in cached]
        HfApi().model_info(repository, timeout=TIMEOUT_SEC)  # fails fast; hf_hub_download would retry
        return [Path(hf_hub_download(repository, name)) for name in names]
    except (OSError, HTTPError, ValueError) as e:  # ValueError: not a valid name on the hub
        problem = f"{repository} is not in the cache of the Hugging Face hub and cannot be downloaded"
        raise UserError(f"{otherwise}; {problem} ({' '.join(str(e).split())})") from e
