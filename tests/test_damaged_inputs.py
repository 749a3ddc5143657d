"""Files that a user plausibly meets: cut off, of the wrong kind, or with values that are no numbers. The error names the file."""

import json

import numpy as np
import pytest
import torch
from conftest import make_shard
from PIL import Image
from safetensors.torch import load_file, save_file

from common.errors import UserError
from evaluations.images import open_images
from latents.shards import LatentDataset


def npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)


def cut(make, name):
    def make_and_cut(folder):
        make(folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:-300])

    return make_and_cut


def shard(**tensors):
    def make(folder):
        make_shard(folder / "a.safetensors")
        about = {"kind": "sample", "scale_factor": "0.5", "autoencoder": "identity", "resolution": "4", "num_classes": "3"}
        about |= {key: value for key, value in tensors.items() if isinstance(value, str)}
        changed = {key: value for key, value in tensors.items() if not isinstance(value, str)}
        save_file(load_file(folder / "a.safetensors") | changed, folder / "a.safetensors", metadata=about)

    return make


def png(folder):
    for name in ("a.png", "b.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name)


IMAGES = np.zeros((20, 8, 8, 3), np.uint8)
LABELS = torch.zeros(24, dtype=torch.int64)
# what: (how it is made, what of it is read)
FILES = {
    "half an npz": (cut(lambda folder: npz(folder, arr_0=IMAGES), "a.npz"), "a.npz"),
    "an npz of objects": (lambda folder: npz(folder, arr_0=np.array([{}], dtype=object)), "a.npz"),
    "an npz of floats": (lambda folder: npz(folder, arr_0=IMAGES / 255), "a.npz"),
    "an npz of something else": (lambda folder: npz(folder, weights=np.zeros(3)), "a.npz"),
    "JSON under the name of an npz": (lambda folder: (folder / "a.npz").write_text(json.dumps([1, 2])), "a.npz"),
    "half an image": (cut(png, "b.png"), "."),
    "text under the name of an image": (lambda folder: (png(folder), (folder / "b.png").write_text("hello")), "."),
    "half a shard": (cut(shard(), "a.safetensors"), "a.safetensors"),
    "a pickle under the name of a shard": (lambda folder: torch.save({}, folder / "a.safetensors"), "a.safetensors"),
    "an empty shard": (lambda folder: (folder / "a.safetensors").write_bytes(b""), "a.safetensors"),
    "labels of another length": (shard(labels=LABELS[:3]), "a.safetensors"),
    "labels that no class has": (shard(labels=LABELS + 3), "a.safetensors"),
    "negative labels": (shard(labels=LABELS - 1), "a.safetensors"),
    "latents in the wrong type": (shard(latents=torch.zeros(24, 2, 4, 4, dtype=torch.int64)), "a.safetensors"),
    "a scale that is NaN": (shard(scale_factor="nan"), "a.safetensors"),
    "a kind that does not exist": (shard(kind="moment"), "a.safetensors"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_damaged_file_is_one_line_that_names_it(what, tmp_path):
    make, name = FILES[what]
    make(tmp_path)
    with pytest.raises(UserError) as error:
        if name.endswith(".safetensors"):
            dataset = LatentDataset(tmp_path)
            dataset.fetch(np.arange(len(dataset)), np.zeros(len(dataset), dtype=bool))
        else:
            list(open_images(tmp_path / name).batches(20))
    assert "\n" not in str(error.value) and ("b.png" if name == "." else name) in str(error.value)
