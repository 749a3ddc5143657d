"""manifest.json: what a folder of shards holds, written once it is complete; and its check against the files."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import UserError
from common.files import hash_file, read_json

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
        manifest = read_json(file)
        for entry in manifest["shards"]:
            entry["bytes"], entry["hash"], entry["num_items"]
            if Path(entry["file"]).name != entry["file"]:
                raise ValueError(f"{entry['file']!r} is not the name of a file in this folder")
        manifest["fingerprint"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{file} is not a manifest of latent shards ({e!r}); make the folder again, or remove this file") from e
    return manifest


def check_files(folder: Path, files: list[Path], manifest: dict) -> None:
    """Raises UserError where names or sizes of the shards are not those of the manifest. Reads no data."""
    sizes = {entry["file"]: entry["bytes"] for entry in manifest["shards"]}
    for name, size in sizes.items():
        file = folder / name
        if not os.path.exists(file):  # False, where Path.exists raises, for a name that no file can have
            raise UserError(f"{file} is missing, but {MANIFEST} lists it; restore it, or make the folder again")
        if file.stat().st_size != size:
            raise UserError(
                f"{file} has changed since {MANIFEST} was written: {file.stat().st_size} bytes, not {size}; "
                "restore it, or make the folder again"
            )
    extra = [file for file in files if file.name not in sizes]
    if extra:
        raise UserError(f"{extra[0]} is not in {folder / MANIFEST}; move it to a folder of its own")


def find_changed_files(folder: Path, manifest: dict) -> list[Path]:
    """The shards whose contents are no longer those of the manifest; reads them all."""
    hashes = {folder / entry["file"]: entry["hash"] for entry in manifest["shards"]}
    return [file for file, expected in hashes.items() if not file.exists() or hash_file(file) != expected]
