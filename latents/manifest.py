"""manifest.json: what a folder of shards holds, written once it is complete; and its check against the files."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from common.files import read_json

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"  # a folder beside the shards, as long as some of them are missing


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a folder, or None where there is none. Raises UserError where it is not one of latents."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    manifest = read_json(file)
    if not (isinstance(manifest, dict) and {"shards", "settings", "fingerprint"} <= manifest.keys()):
        raise UserError(f"{file} is not a manifest of latent shards; make the folder again, or remove this file")
    return manifest


def check_files(folder: Path, files: list[Path], manifest: dict) -> None:
    """Raises UserError where names or sizes of the shards are not those of the manifest. Reads no data."""
    listed = {record["file"]: record["bytes"] for record in manifest["shards"] if record["file"]}
    found = {file.name: file.stat().st_size for file in files}
    for name in sorted(listed.keys() | found.keys()):
        if (there := found.get(name, "no")) != (needed := listed.get(name, "no")):
            raise UserError(
                f"{folder / name} has {there} bytes, and {MANIFEST} lists {needed}: restore the folder, or make it again"
            )
