"""What a folder of latents holds, and whether a training can use it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError, reading
from common.progress import progress_bar
from latents.channel_statistics import USUAL_STD, are_mirrored, channel_sums, for_network, mean_and_std, overall_std
from latents.prepare.images import open_labelled_images, read_cropped
from latents.shards import MANIFEST, UNFINISHED, LatentDataset, is_intact, mean_and_log_variance, read_manifest, spread_items

CHUNK = 1024  # latents that are read at once


@dataclass
class Findings:
    """What the folder holds (lines), and what is wrong with it (problems)."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect_latents(dataset: LatentDataset, sigma_data: float = 0.5) -> Findings:
    """Read all latents and check them. `sigma_data` is the standard deviation that the diffusion assumes."""
    info, findings = dataset.info, Findings()
    findings.lines += [
        f"{dataset.path}: {len(dataset)} latents in {len(dataset.files)} files",
        f"kind {info.kind}, {dataset.channels}x{dataset.height}x{dataset.width}, for images of {info.resolution} pixels, latents "
        f"of mirrored images: {dataset.has_flips}, JPEG files: {dataset.has_jpegs}",
        f"autoencoder {info.autoencoder}, scale factor {info.scale_factor:g}, normalised: {info.latents_mean is not None}",
    ]
    _inspect_files(dataset, findings)
    if dataset.has_jpegs:
        try:
            fetch_images(dataset, 256)
        except UserError as e:
            findings.problems.append(str(e))
    _inspect_classes(dataset, findings)
    _inspect_values(dataset, sigma_data, findings)
    if dataset.has_flips:
        latents, flipped = (x[:, : dataset.channels] for x in _fetch(dataset, spread_items(len(dataset), 256)))
        if not are_mirrored(latents, flipped):
            findings.problems.append("latents_flip do not resemble the mirrored latents: they belong to other images")
    return findings


def _inspect_files(dataset: LatentDataset, findings: Findings) -> None:
    intact = [file for file in progress_bar(dataset.files, unit="shards", desc="checksums") if is_intact(file)]
    findings.lines.append(f"{len(intact)} of {len(dataset.files)} files agree with their checksums")
    findings.problems += [f"{file}: its checksum differs" for file in dataset.files if file not in intact]
    first_file = {}  # by checksum
    for name, checksum in dataset.hashes.items():
        if (first := first_file.setdefault(checksum, name)) != name:
            findings.problems.append(f"{dataset.path / name} is a copy of {first}")
    manifest = read_manifest(dataset.path)
    if manifest is None:
        findings.lines.append(f"no {MANIFEST}: nothing says whether all latents are there")
        if (dataset.path / UNFINISHED).exists():
            findings.problems.append("not finished: run the command that makes it again")
        return
    listed = manifest["shards"]
    for name in sorted(listed.keys() | dataset.hashes.keys()):
        if name not in dataset.hashes or name not in listed:
            findings.problems.append(f"{dataset.path / name} is only {f'in {MANIFEST}' if name in listed else 'in the folder'}")
        elif dataset.hashes[name] != listed[name]:
            findings.problems.append(f"{dataset.path / name} is not the file that {MANIFEST} lists")
    findings.lines.append(f"{len(manifest['left_out'])} items could not be read when it was made")


def _inspect_classes(dataset: LatentDataset, findings: Findings) -> None:
    counts = np.bincount(dataset.labels, minlength=dataset.info.num_classes)
    names = [f" ({name})" for name in dataset.class_names] if dataset.class_names else [""] * len(counts)
    counts = counts[: len(names)]  # num_classes= of encode may be larger
    smallest = [f"{label}{names[label]} {counts[label]}" for label in np.argsort(counts, kind="stable")]
    findings.lines.append(f"{len(counts)} classes of {counts.min()} to {counts.max()} items; smallest: {', '.join(smallest[:3])}")
    if num_empty := int((counts == 0).sum()):
        findings.problems.append(f"{num_empty} of {len(counts)} classes have no item: {', '.join(smallest[: min(num_empty, 5)])}")


def _inspect_values(dataset: LatentDataset, sigma_data: float, findings: Findings) -> None:
    """Find NaN and Inf, and compare the standard deviation that the network sees with the one that the diffusion assumes."""
    info, sums, not_finite = dataset.info, np.zeros((3, dataset.channels)), []
    for start in progress_bar(range(0, len(dataset), CHUNK), unit=f"x {CHUNK} latents", desc="reading"):
        latents, *flipped = _fetch(dataset, np.arange(start, min(start + CHUNK, len(dataset))))
        finite = torch.cat([latents, *flipped], dim=1).flatten(1).isfinite().all(dim=1)
        not_finite += (start + (~finite).nonzero()[:, 0]).tolist()
        sums += channel_sums(latents[finite], info.kind)
    if not_finite:
        findings.problems.append(f"{len(not_finite)} items hold NaN or Inf, {not_finite[0]} first")
    if not sums.any():
        return
    stored_mean, stored_std = mean_and_std(sums)
    mean, std = for_network(stored_mean, stored_std, info)
    findings.lines.append(" " * 20 + "".join(f"{f'channel {c}':>12}" for c in range(dataset.channels)))
    for title, values in {"stored mean": stored_mean, "stored std": stored_std, "network mean": mean, "network std": std}.items():
        findings.lines.append(f"{title:20}" + "".join(f"{value:12.4f}" for value in values))
    overall = overall_std(mean, std)
    words = f"a standard deviation of {overall:.3f} over all channels, {overall / sigma_data:.2f} times sigma_data={sigma_data:g}"
    findings.lines.append(f"the network sees {words}")
    if not USUAL_STD[0] <= overall / sigma_data <= USUAL_STD[1]:
        reasons = f"a wrong scale factor ({info.scale_factor:g}) or kind ({info.kind}), or scale= of convert"
        findings.problems.append(f"{words}, cannot be right: {reasons}")


def _fetch(dataset: LatentDataset, indices: np.ndarray) -> list[Tensor]:
    """Stored latents of these items, and those of the mirrored images if there are any."""
    return [dataset.fetch(indices, np.full(len(indices), flip))[0] for flip in (False, True)[: 1 + dataset.has_flips]]


def fetch_spread(dataset: LatentDataset) -> tuple[Tensor, list[int]]:
    """Latents [16, C, h, w] float32 (for `moments` the means; 0 for NaN and Inf) and labels of items spread over the data."""
    indices = spread_items(len(dataset), 16)
    stored, labels = dataset.fetch(indices, np.zeros(len(indices), dtype=bool))
    return mean_and_log_variance(stored.float(), dataset.info.kind)[0].nan_to_num(0, 0, 0), labels.tolist()


def fetch_images(dataset: LatentDataset, num_items: int = 16) -> np.ndarray:
    """uint8 [n, R, R, 3], the stored images of the items that `fetch_spread` takes."""
    indices = spread_items(len(dataset), num_items)
    return dataset.fetch_with_images(indices, np.zeros(len(indices), dtype=bool))[2].numpy()


def fetch_originals(dataset: LatentDataset, folder: str) -> np.ndarray:
    """Like `fetch_images`, from the folder that was encoded. Raises UserError if it holds another number of images."""
    source = open_labelled_images(folder, "none" if dataset.info.num_classes == 1 else "auto")
    manifest, crops = read_manifest(dataset.path) or {}, []
    left_out = {entry["name"] for entry in manifest.get("left_out", [])}
    numbers = [i for i, name in enumerate(source.names) if name not in left_out]
    if len(numbers) != len(dataset):
        raise UserError(f"images={folder} holds {len(numbers)} images, and {dataset.path} {len(dataset)} latents")
    defaults = {"background": "white", "pad": 0, "grey": False}
    settings = {key: dataset.settings.get(key, default) for key, default in defaults.items()}
    for i in spread_items(len(dataset), 16):
        with reading(source.names[numbers[i]]):
            crops.append(read_cropped(source, numbers[i], dataset.info.resolution, **settings)[0])
    return np.stack(crops)
