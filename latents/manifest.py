"""manifest.json: what a folder of shards holds, written once it is complete; and its check against the files."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from common.files import hash_file, read_json

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
    expected = {record["file"]: record["bytes"] for record in manifest["shards"] if record["file"]}
    found = {file.name: file.stat().st_size for file in files}
    differing = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"{folder / name} has {found.get(name, 'no')} bytes, and {MANIFEST} lists {expected.get(name, 'no')}: restore the "
            "folder, or make it again"
        )


def find_changed_files(folder: Path, manifest: dict) -> list[Path]:
    """The shards whose contents are no longer those of the manifest; reads them all."""
    hashes = {folder / record["file"]: record["hash"] for record in manifest["shards"] if record["file"]}
    return [file for file, expected in hashes.items() if not file.exists() or hash_file(file) != expected]
