"""manifest.json: what a folder of shards holds, written once it is complete; and its check against the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from errors import UserError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"  # a folder beside the shards, as long as some of them are missing


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a folder, or None where there is none.

    Raises:
        UserError: it is not a manifest of latents.
    """
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        stated = json.loads(file.read_text())
        for entry in stated["shards"]:
            entry["file"], entry["bytes"], entry["hash"], entry["num_items"]
        stated["fingerprint"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{file} is not a manifest of latent shards ({e!r}); make the folder again, or remove this file") from e
    return stated


def check_files(folder: Path, files: list[Path], stated: dict) -> None:
    """Raises UserError where names or sizes of the shards are not those of the manifest. Reads no data."""
    sizes = {entry["file"]: entry["bytes"] for entry in stated["shards"]}
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            raise UserError(f"{file} is missing, but {MANIFEST} lists it; restore it, or make the folder again")
        if file.stat().st_size != size:
            raise UserError(
                f"{file} has changed since {MANIFEST} was written: {file.stat().st_size} bytes, not {size}; "
                "restore it, or make the folder again"
            )
    extra = [file for file in files if file.name not in sizes]
    if extra:
        raise UserError(f"{extra[0]} is not in {folder / MANIFEST}; move it to a folder of its own")


def changed_files(folder: Path, stated: dict) -> list[Path]:
    """The shards whose contents are no longer those of the manifest; reads them all."""
    return [
        file
        for file, entry in ((folder / entry["file"], entry) for entry in stated["shards"])
        if not file.exists() or hash_of(file.read_bytes()) != entry["hash"]
    ]


def hash_of(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=16).hexdigest()
