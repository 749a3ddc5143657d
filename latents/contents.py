"""What a path holds, told from names alone (and the header of one .safetensors file), and the command that reads it."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path

from safetensors import SafetensorError, safe_open

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
# {format: what messages call its files}; latents.prepare.formats reads all but the first and the last.
CONTENTS = {
    "native": "native latent shards",
    "maskdit_lmdb": "an LMDB of MaskDiT",
    "webdataset": "WebDataset tars",
    "fast_dit": "features of fast-DiT",
    "repa": "latents of REPA or EDM2",
    "lightningdit": "safetensors without a header of ours, such as LightningDiT's",
    "images": "images",
}
PEEK = 64  # entries of a folder that are looked at in the search for images and for shards below it


def find_formats(path: Path, at_most: int | None = None) -> tuple[list[str], list[str]]:
    """(the keys of CONTENTS whose signs a path shows, the names that it holds). `images` only where nothing else fits.

    Args:
        at_most: entries of the folder that are looked at; None is all of them.
    """
    names, folders = [path.name], []
    if path.is_dir():
        entries = [e for e in _peek(path, at_most) if not e.name.startswith(".")]
        names, folders = (sorted(e.name for e in entries if is_kind(e)) for is_kind in (os.DirEntry.is_file, os.DirEntry.is_dir))
    shards = [path / n if path.is_dir() else path for n in names if n.endswith(".safetensors")]
    is_native = bool(shards) and shards[0].is_file() and _has_native_header(shards[0])
    signs = {
        "native": is_native,
        "maskdit_lmdb": any(n.endswith(".mdb") for n in names) or any((path / n / "data.mdb").exists() for n in ("train", "val")),
        "webdataset": any(n.endswith((".tar", ".tgz")) or ".tar." in n for n in names),
        "fast_dit": any(n.endswith("_features") for n in folders) or path.name.endswith("_features"),
        "repa": (path / "dataset.json").exists()
        or (path / "vae-sd" / "dataset.json").exists()
        or (path.is_file() and path.suffix == ".zip"),
        "lightningdit": bool(shards) and not is_native,
    }
    fitting = [format for format, fits in signs.items() if fits]
    if not fitting and _has_images(path, depth=2):
        fitting = ["images"]
    return fitting, [*names, *(f"{n}/" for n in folders)]


def way_on(path: Path, key: str, format_key: str | None = None) -> str:
    """`holds ...: <command>`, for messages: what a path holds that is not what was asked for, and how to use it.

    Args:
        key: that gave the path.
        format_key: chooses between shards and tars, where the command reads both.
    """
    fitting, held = find_formats(path, at_most=10_000)
    prepare, where = "python prepare_latents.py", shlex.quote(f"path={path}")
    output = shlex.quote(f"output=latents/{path.resolve().name.partition('.')[0]}_shards")
    if not fitting:
        below = _shards_below(path)
        more = f" and {len(held) - 8} more" if len(held) > 8 else ""
        if below is not None:
            return f"holds no latents itself, but {below} does: {shlex.quote(f'{key}={below}')}"
        return f"holds neither latents nor images; found {', '.join(held[:8]) or 'nothing'}{more}"
    ways = {
        "native": f"training reads them as they are: python train.py data=custom {shlex.quote(f'data.path={path}')}",
        "images": f"encode them: {prepare} encode {shlex.quote(f'images={path if path.is_dir() else path.parent}')} {output}",
    }
    if format_key is not None:
        ways["native"] = f"leave out {format_key}=webdataset"
        ways["webdataset"] = f"give {format_key}=webdataset, which reads them as they are, or {prepare} convert {where} {output}"
    if fitting[0] == "maskdit_lmdb" and (split := next((n for n in ("train", "val") if (path / n / "data.mdb").exists()), None)):
        where = shlex.quote(f"path={path / split}")
    return f"holds {CONTENTS[fitting[0]]}: " + ways.get(fitting[0], f"convert them: {prepare} convert {where} {output}")


def _has_native_header(file: Path) -> bool:
    try:
        with safe_open(file, framework="np") as f:
            return "kind" in (f.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _peek(folder: Path, at_most: int | None = PEEK) -> list[os.DirEntry]:
    """The first entries of a folder, without links that lead nowhere; none of what cannot be read."""
    try:
        # Not Path.iterdir: asking each of a million files whether it is one takes long.
        with os.scandir(folder) as listing:
            entries = list(itertools.islice(listing, at_most))
    except OSError:
        return []
    return [e for e in entries if not e.is_symlink() or os.path.exists(e.path)]  # asking a link to itself what it is raises


def _has_images(path: Path, depth: int) -> bool:
    """Whether an image is among the first entries of a folder, or of the first folders in it."""
    if not path.is_dir():
        return path.name.lower().endswith(IMAGE_SUFFIXES)
    entries = _peek(path)
    if any(e.name.lower().endswith(IMAGE_SUFFIXES) for e in entries):
        return True
    return depth > 0 and any(_has_images(Path(e), depth - 1) for e in entries[:4] if e.is_dir())


def _shards_below(path: Path) -> Path | None:
    """A folder in this one that holds safetensors files, if one of the first does."""
    folders = sorted(Path(e) for e in _peek(path) if e.is_dir())
    return next((f for f in folders if any(e.name.endswith(".safetensors") for e in _peek(f))), None)
