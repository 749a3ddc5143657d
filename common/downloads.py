"""Files of the Hugging Face hub: one attempt, and an error within seconds where nothing answers."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError

TIMEOUT_SEC = 10.0  # until a server answers, and without a byte during a download


def find_on_hub(repository: str, *names: str, otherwise: str) -> list[Path]:
    """Files of a model of the Hugging Face hub: from its cache, without asking the hub, or downloaded into it.

    Of several processes one downloads, the others wait. Raises UserError, which begins with what to do `otherwise`.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    try:
        cached = [try_to_load_from_cache(repository, name) for name in names]
        if all(isinstance(file, str) for file in cached):
            return [Path(file) for file in cached]
        HfApi().model_info(repository, timeout=TIMEOUT_SEC)  # a download would try again and again
        return [Path(hf_hub_download(repository, name)) for name in names]
    except (OSError, HTTPError, ValueError) as e:  # ValueError: what cannot be a name on the hub
        where = f"{repository} is not in the cache of the Hugging Face hub and cannot be downloaded"
        raise UserError(f"{otherwise}; {where} ({' '.join(str(e).split())})") from e
