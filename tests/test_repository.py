"""Checks of the whole repository."""

import re

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, run_python
from PIL import Image
from sklearn.datasets import load_digits
from test_architecture import sources

import prepare_latents
from common.errors import UserError
from common.files import hash_file
from latents.shards import ShardInfo, write_shard

SLOW = {"timm", "torchvision", "diffusers", "transformers", "wandb", "matplotlib", "scipy", "torch_fidelity"}


def test_attach_needs_only_torch_and_imports_are_fast_draw_no_random_number_and_touch_no_device():
    code = f"""
import importlib, random, sys
import extras.attach
assert not (found := {SLOW | {"hydra", "accelerate", "pydantic"}!r} & set(sys.modules)), found
import train, sample, fid, prepare_latents
assert not (found := {SLOW!r} & set(sys.modules)), found  # what only some commands need
import numpy as np, torch
before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
for name in {[*sources()]!r}:
    importlib.import_module(name)
after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
assert not torch.cuda.is_initialized()
"""
    code, output = run_python("-c", code)
    assert code == 0, output


def test_links_between_pages_have_targets():
    pages = [REPOSITORY / "README.md", REPOSITORY / "evidence" / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    headings = {page: re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE) for page in pages}
    anchors = {page: {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings[page]} for page in pages}
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and (not anchor or anchor in anchors[target]), f"{page}: {link}"


def test_the_embedded_digits_are_those_of_scikit_learn_bit_for_bit(tmp_path):
    """Pixels in [-1, 1] are exact in float16. A scale factor of 2/3 brings their standard deviation (0.75) to EDM's 0.5."""
    digits = load_digits()
    latents = torch.from_numpy(digits.images / 8 - 1).to(torch.float16)[:, None]
    info = ShardInfo(kind="sample", scale_factor=2 / 3, autoencoder="identity", resolution=8, num_classes=10)
    write_shard(made := tmp_path / "digits.safetensors", latents, torch.from_numpy(digits.target).to(torch.int64), info)
    assert made.read_bytes() == (REPOSITORY / "latents" / "digits.safetensors").read_bytes() and len(latents) == 1797


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latents/digits.safetensors", "5954c40b7098a16a001024db55e54a6c"),
        ("evaluations/digits_reference.npz", "185ba94f0aecc55fa9ffbac86b390440"),
        ("evaluations/digits_detector.safetensors", "ea50597c03f5ba583e7ddc44cfa8dd1a"),
        ("evaluations/fashion_detector.safetensors", "6fff15722dd10a5d94c4a0671962ea95"),
    ],
)
def test_files_whose_hashes_identify_stored_results_never_change(name, expected):
    assert hash_file(REPOSITORY / name) == expected


def test_a_reference_is_made_from_a_folder_of_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{i}.png")
    output = tmp_path / "out" / "ref.npz"
    arguments = ["reference", f"images={tmp_path / 'images'}", f"output={output}"]
    prepare_latents.main(arguments)
    with np.load(output) as file:
        assert np.array_equal(file["arr_0"], pixels)
    with pytest.raises(UserError, match="ref.npz exists; give a new file"):
        prepare_latents.main(arguments)
