"""A checkpoint as a folder that diffusers loads: weights, configuration, code of network and sampler, a model card."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import math
from pathlib import Path

import torch

from checkpoints import load, store
from common.errors import UserError
from common.files import REPOSITORY, read_json, write_file
from common.types import Text
from configs import schema
from configs.schema import AutoencoderSpec, Checkpoint, Weights
from latents import autoencoders

log = logging.getLogger(__name__)

HEADER = '''"""{module} of a trainer for token-routed diffusion transformers, with every module of that project that it imports.

{license}"""

from __future__ import annotations
'''
CARD = """---
library_name: diffusers
tags: [class-conditional-image-generation, diffusion-transformer]
---
# {cfg.name}

{cfg.model.backbone} (`diffusion={cfg.diffusion.name}`) for class-conditional image generation, {cfg.data.num_classes} classes:
{weights} weights {origin}. The code has the MIT licence that its files state. It needs diffusers, pydantic and torch.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("<this folder>", trust_remote_code=True)
image = pipeline(class_labels=[0], seeds=[0]).images[0]
```
"""


def export_checkpoint(
    checkpoint: Checkpoint, output: Text, weights: Weights = "ema", autoencoder: AutoencoderSpec | None = None
) -> None:
    """Write a checkpoint as a folder that diffusers loads without this project.

    Args:
        checkpoint: a run's folder (for its newest good checkpoint) or a checkpoint's folder.
        output: a new folder.
        autoencoder: is saved with the network. None means the autoencoder of the run.

    Raises:
        UserError: the folder exists, there is no such checkpoint, its network is SPRINT, or the autoencoder cannot be loaded.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"output={output} exists; give a new folder")
    found = store.find_checkpoint(Path(checkpoint), "checkpoint")
    cfg = load.load_config(found)
    if cfg.model.name.endswith("sprint"):
        raise UserError(f"checkpoint={checkpoint} has model={cfg.model.name}, which cannot be exported")
    decoder = autoencoders.build(autoencoder or cfg.data.autoencoder, torch.device("cpu"), cfg.data.in_channels)
    vae = getattr(decoder, "vae", None)
    # Importing diffusers takes seconds.
    from extras.weights import pipeline

    network_class = {"DiT": pipeline.DiTModel, "LightningDiT": pipeline.LightningDiTModel}[cfg.model.backbone.partition("-")[0]]
    sizes = {key: getattr(cfg.data, key) for key in ("input_size", "in_channels", "num_classes")}
    with torch.device("meta"):
        net = network_class(**cfg.model.sizes, **sizes, learn_sigma=cfg.model.learn_sigma)
    net.load_state_dict(store.load_weights(found, weights), assign=True)
    if vae is not None:
        vae.register_to_config(_name_or_path="")  # a path on this machine
    pipeline.ClassToImagePipeline(net, vae, **describe_sampling(cfg)).save_pretrained(folder)
    _add_code(folder, network_class.__name__)

    source = store.imported_from(found)
    origin = f"of {Path(source).name}" if source else f"after {store.read_step(found):,} steps"
    write_file(folder / "README.md", CARD.format(cfg=cfg, weights=weights, origin=origin))
    log.info("exported %s to %s", found, folder)


def describe_sampling(cfg: schema.TrainConfig) -> dict[str, object]:
    """The settings of `ClassToImagePipeline`. The guidance of the run is kept if it is cfg or interval. Otherwise it is off."""
    settings = cfg.model_dump()
    diffusion, guidance = settings["diffusion"], settings["guidance"]
    # JSON has no infinity. Only S_max can be infinite, and that is its default.
    diffusion["sampler"] = {key: value for key, value in diffusion["sampler"].items() if value != math.inf}
    return {
        "diffusion": diffusion,
        "guidance": guidance if guidance.pop("name") in ("cfg", "interval") else {"cfg_scale": 1.0},
        "latents": {key: settings["data"][key] for key in ("scale_factor", "latents_mean", "latents_std")},
        "null_class": cfg.data.num_classes if cfg.model.class_dropout > 0 else None,
        "rounding": cfg.sample.rounding,
    }


def _add_code(folder: Path, network_class: str) -> None:
    """Write the code of pipeline and network into a saved pipeline, and name the file in model_index.json."""
    name, code = join_source("extras.weights.pipeline")
    for path in (folder, folder / "transformer"):  # diffusers looks for a component's code in the component's folder
        write_file(path / f"{name}.py", code)
    index = read_json(folder / "model_index.json")
    index |= {"_class_name": [name, "ClassToImagePipeline"], "transformer": [name, network_class]}
    write_file(folder / "model_index.json", json.dumps(index, indent=2) + "\n")


def join_source(module: str) -> tuple[str, str]:
    """(name, text) of one Python file with `module` and every module of the project that it imports by `from ... import`.

    diffusers copies the files that a pipeline imports, but not the files that those import. The name holds a hash of the text,
    because diffusers imports the code of all pipelines from one folder by name. All modules share one namespace:
    tests/test_weights_out.py checks that no two define the same name.
    """
    text = HEADER.format(module=module, license=(REPOSITORY / "LICENSE").read_text(encoding="utf-8"))
    for name in _in_order(module, []):
        source = _file_of(name).read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and (node.module == "__future__" or _file_of(node.module)):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        text += f"\n\n# {'-' * 116}\n# {name}\n\n" + "\n".join(lines).strip() + "\n"
    return f"{module.rpartition('.')[2]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text


def _file_of(module: str) -> Path | None:
    """The file of a module of the project, or None for a library."""
    path = REPOSITORY / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _in_order(module: str, before: list[str]) -> list[str]:
    """`before`, then the project's modules that `module` imports and `before` lacks, then `module`."""
    for node in ast.parse(_file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and _file_of(node.module) and node.module not in before:
            before = _in_order(node.module, before)
    return [*before, module]
