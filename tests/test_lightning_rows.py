"""LightningDiT's rows, from a folder of its latents to images."""

import numpy as np
import pytest
import torch
from conftest import metrics, run_sample
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import save_file
from stand_ins import untrained_va_vae

import prepare_latents


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    """Fixture: (folder of latents in LightningDiT's shape, autoencoder=). A latent position covers 4x4 pixels."""
    folder = tmp_path_factory.mktemp("lightning")
    untrained_va_vae(folder / "vae" / "vavae.pt", channels=32)
    latents = 3 + 5 * torch.randn(24, 32, 16, 16, generator=torch.Generator().manual_seed(0))
    (folder / "theirs").mkdir()
    tensors = {"latents": latents, "latents_flip": latents.flip(-1).contiguous(), "labels": torch.arange(24)}
    save_file(tensors, folder / "theirs" / "latents_rank00_shard000.safetensors")
    statistics = {"mean": latents.mean(dim=[0, 2, 3], keepdim=True), "std": latents.std(dim=[0, 2, 3], keepdim=True)}
    torch.save(statistics, folder / "theirs" / "latents_stats.pt")
    autoencoder = f"va-vae:{folder / 'vae'}"
    settings = [f"autoencoder={autoencoder}", "resolution=64", "num_classes=1000"]
    prepare_latents.main(["convert", f"path={folder / 'theirs'}", f"output={folder / 'ours'}", *settings])
    return folder / "ours", autoencoder


def test_a_lightning_row_trains_draws_a_grid_and_samples_with_published_guidance(lightning, train, tmp_path):
    latents, autoencoder = lightning
    tiny = ["model.backbone=LightningDiT-XS/2", "train.precision=fp32", "train.num_steps=2", "sample_grid.every=2"]
    tiny += ["sample_grid.num_samples=2"]
    run = train("run", "experiment=lightning_xl1_tread", f"data.path={latents}", *tiny, "sampler.num_steps=3")
    # The network predicts a velocity of 0: its squared error is about 2, and its cosine with any target is 0, which adds 1.
    assert metrics(run)[0]["loss"] == pytest.approx(3, abs=0.15)
    with Image.open(next((run / "samples").glob("*.png"))) as grid:
        assert grid.size == (2 * 68 + 4, 64 + 18 + 4)
    guided = ["guidance=interval", "guidance.cfg_scale=10", "guidance.level_lo=0", "guidance.level_hi=0.9", "guidance.channels=3"]
    common = [f"checkpoint={run}", "seeds=0-1", "sampler.num_steps=3", "machine.cpu_threads=1", "sampling.weights=raw"]
    run_sample(*common, *guided, f"output={tmp_path / 'guided'}")
    run_sample(*common, f"output={tmp_path / 'plain'}")
    images = [np.asarray(Image.open(next((tmp_path / name).glob("seed_000001*.png")))) for name in ("guided", "plain")]
    assert images[0].shape == (64, 64, 3) and (images[0] != images[1]).any()
    stored, plain = (OmegaConf.load(tmp_path / name / "settings.yaml") for name in ("guided", "plain"))
    assert stored.guidance.channels == 3 and stored.sampler.timestep_shift == 0.3 and plain.autoencoder == autoencoder
