"""A checkpoint as a folder that diffusers loads: weights, configuration, code of network and sampler, a model card."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import torch
from omegaconf import OmegaConf

from common.errors import UserError
from configs import schema
from configs.schema import Autoencoder, Checkpoint, Weights
from configs.settings import Text
from dit import sizes_of
from extras.weights.source import join_source
from latents import autoencoders
from training import checkpoint as checkpoints
from training import load

log = logging.getLogger(__name__)

CARD = """---
library_name: diffusers
tags: [class-conditional-image-generation, diffusion-transformer]
---
# {cfg.name}

{cfg.model.backbone} (`diffusion={cfg.diffusion.name}`) for class-conditional image generation, {cfg.data.num_classes} classes:
{weights} weights after {step:,} steps. `training.yaml` holds the settings. The code has the MIT licence that its files state.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("<this folder>", trust_remote_code=True)
image = pipeline(class_labels=[0], seeds=[0]).images[0]
```
"""


def export_checkpoint(
    checkpoint: Checkpoint, output: Text, weights: Weights = "ema", autoencoder: Autoencoder | None = None
) -> None:
    """Write a checkpoint as a folder that diffusers loads without this project.

    Args:
        checkpoint: a run's folder (its newest good checkpoint) or a checkpoint's folder.
        output: a folder that does not exist yet, or is empty.
        weights: ema | raw.
        autoencoder: None keeps the run's. It is saved with the network.

    Raises:
        UserError: the folder is not empty; there is no such checkpoint; the autoencoder cannot be loaded.
    """
    folder = Path(output)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"output={output} is not empty; export overwrites nothing: give another folder, or remove it")
    found = checkpoints.find_checkpoint(Path(checkpoint), "checkpoint")
    cfg = load.load_config(found)
    name = autoencoder or cfg.data.autoencoder
    vae = getattr(autoencoders.build(name, torch.device("cpu"), cfg.data.in_channels), "vae", None)
    # diffusers takes seconds to import, and `import` does without.
    from extras.weights import network
    from extras.weights.pipeline import ClassToImagePipeline

    network_class = {"DiT": network.DiTModel, "LightningDiT": network.LightningDiTModel}[cfg.model.backbone.partition("-")[0]]
    sizes = {key: getattr(cfg.data, key) for key in ("input_size", "in_channels", "num_classes")}
    with torch.device("meta"):
        own = sizes_of(cfg.model.backbone, schema.NETWORKS[cfg.model.name].BACKBONES)
        net = network_class(**own, **sizes, learn_sigma=cfg.model.learn_sigma)
    net.load_state_dict(checkpoints.load_weights(found, weights), assign=True)
    if vae is not None:
        vae.register_to_config(_name_or_path="")  # which is a path on this machine
    ClassToImagePipeline(net, vae, **describe_sampling(cfg)).save_pretrained(folder)
    _add_code(folder, network_class.__name__)

    groups = {"model", "diffusion"} if checkpoints.imported_from(found) else {"model", "diffusion", "alignment", "train"}
    settings = OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump(include=groups)))
    (folder / "training.yaml").write_text(settings, encoding="utf-8")
    card = CARD.format(cfg=cfg, weights=weights, step=checkpoints.step_of(found))
    (folder / "README.md").write_text(card, encoding="utf-8")
    log.info("exported %s to %s", found, folder)


def describe_sampling(cfg: schema.TrainConfig) -> dict[str, object]:
    """The settings of `ClassToImagePipeline`. Guidance is the run's, if it is cfg or interval."""
    settings = cfg.model_dump()
    diffusion, guidance = settings["diffusion"], settings["guidance"]
    # JSON has no infinity; S_max, the one setting that may be infinite, is so by default.
    diffusion["sampler"] = {key: value for key, value in diffusion["sampler"].items() if value != math.inf}
    return {
        "diffusion": diffusion,
        "guidance": guidance if guidance.pop("name") in ("cfg", "interval") else {"cfg_scale": 1.0},
        "latents": {key: settings["data"][key] for key in ("scale_factor", "latents_mean", "latents_std")},
        "null_class": cfg.data.num_classes if cfg.model.class_dropout > 0 else None,
    }


def _add_code(folder: Path, network_class: str) -> None:
    """Write the code of pipeline and network into a saved pipeline, and name the files in model_index.json."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for key, module, class_name, place in (
        ("_class_name", "extras.weights.pipeline", "ClassToImagePipeline", folder),
        ("transformer", "extras.weights.network", network_class, folder / "transformer"),
    ):
        name, code = join_source(module)
        (place / f"{name}.py").write_text(code, encoding="utf-8")
        index[key] = [name, class_name]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
