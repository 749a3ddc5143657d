"""The model card of an export: what the network is, how it is loaded, how it was trained, and what was measured of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from common.files import markdown_table, read_lines
from configs import schema
from evaluations.suite import format_metric, read_metric_name
from training import checkpoint as checkpoints

PAPERS = {"edm": "2206.00364", "sit": "2401.08740", "ddpm": "2006.11239"}
ROUTED = (
    "In training, a part of the tokens skipped blocks (TREAD, [arXiv 2501.04765](https://arxiv.org/abs/2501.04765)): {routes}. "
)
# Of a start in starts.jsonl. The command is left out: it may name private paths.
SHOWN_OF_START = ("num_processes", "device", "torch", "commit")

TEMPLATE = """{header}
# {title}

{model} of {size:,} parameters for class-conditional image generation: {num_classes} classes, {latents}.
{routed}The network is dense when it samples.

## Use

```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True).to("cuda" if torch.cuda.is_available() else "cpu")
image = pipeline(class_labels=[0], seeds=[0]).images[0]
```

| key of the call | value |
|---|---|
| `class_labels` | one per image, 0 to {last_label}{null} |
| `seeds` or `generator` | one integer per image; or a generator that draws them |
| `num_inference_steps` | {num_steps} by default |
| `guidance_scale`, `guidance_interval` | {cfg_scale:g} by default, 1 is off; guide only at noise levels in (low, high] |
| `guidance_channels` | guide only this many first channels of the latents |
| `sampler` | a dictionary of the sampler's other settings |
| `output_type` | `pil`, `np`, `pt` or `latent` |

The code is in this folder. `trust_remote_code=True` lets diffusers run it.

## What was measured

{measured}
## Training

{training}
`training.yaml` holds the settings that figures depend on.

## Licence

The code has the MIT licence that its files state. {license}
"""


def make_card(
    checkpoint: Path, cfg: schema.TrainConfig, weights: str, net: nn.Module, factor: int, license: str | None, name: str
) -> str:
    """The text of README.md.

    Args:
        checkpoint: a verified one; figures and starts are read from the run that it lies in.
        net: the network, to count its parameters.
        factor: pixels of an image along one side of a latent.
        license: of the weights.
        name: what the example loads: a hub id or a folder's name.
    """
    from huggingface_hub import ModelCardData

    data, diffusion = cfg.data, cfg.diffusion
    is_routed = any(route["selection_ratio"] > 0 for route in cfg.model.routes)
    tags = ["class-conditional-image-generation", "diffusion-transformer", diffusion.name, *(["tread"] if is_routed else [])]
    header = ModelCardData(license=license, library_name="diffusers", tags=tags).to_yaml()
    routes = "; ".join(
        f"{route['selection_ratio']:g} of the tokens, blocks {route['start_layer_idx']} to {route['end_layer_idx']}"
        for route in cfg.model.routes
    )
    latents = f"{'pixels' if factor == 1 else 'latents'} of {data.in_channels}x{data.input_size}x{data.input_size}"
    if factor > 1:
        latents += " for images of {0}x{0}".format(factor * data.input_size)
    return TEMPLATE.format(
        header=f"---\n{header}\n---\n",
        title=cfg.name,
        name=name,
        model=f"{cfg.model.backbone} (`diffusion={diffusion.name}`, arXiv {PAPERS[diffusion.name]})",
        size=sum(parameter.numel() for parameter in net.parameters()),
        num_classes=data.num_classes,
        latents=latents,
        routed=ROUTED.format(routes=routes) if is_routed else "",
        last_label=data.num_classes - 1,
        null=f", and {data.num_classes} for no label" if cfg.model.class_dropout > 0 else "",
        num_steps=diffusion.sampler.num_steps,
        cfg_scale=getattr(cfg.guidance, "cfg_scale", 1.0),
        measured=describe_figures(checkpoint, cfg, weights),
        training=describe_training(checkpoint, cfg, weights),
        license=f"The weights have the licence `{license}`." if license else "The licence of the weights is not stated.",
    )


def describe_figures(checkpoint: Path, cfg: schema.TrainConfig, weights: str) -> str:
    """A table of what was measured of these weights, with the conditions of every figure."""
    rows = [*_figures_of_fid(checkpoint, weights), *(_figures_of_training(checkpoint, cfg) if weights == "ema" else [])]
    if not rows:
        return "Nothing was measured of these weights.\n"
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    metrics = dict.fromkeys(name for row in rows for name in row["metrics"])
    conditions = dict.fromkeys(key for row in rows for key in row if key != "metrics")
    cells = [
        [*(format_metric(name, row["metrics"][name]) if name in row["metrics"] else "" for name in metrics)]
        + [str(row.get(key, "")) for key in conditions]
        for row in rows
    ]
    return (
        "Each row is one evaluation: first its figures, then their conditions. Compare figures only if they have the same "
        "number of samples, the same reference and the same detector. fid.py names a reference by its size and a hash.\n\n"
        + markdown_table([*metrics, *conditions], cells)
    )


def _figures_of_fid(checkpoint: Path, weights: str) -> Iterator[dict]:
    """What fid.py measured of this checkpoint: `metrics`, and the conditions."""
    run = checkpoints.run_of(checkpoint)
    own = checkpoints.identity(checkpoint)
    for file in sorted(run.glob("evaluations/**/results.jsonl")) if run else []:
        for _, line in read_lines(file):
            point = line.get("point") if line else None
            if not (isinstance(point, dict) and isinstance(line.get("metrics"), dict)):
                continue
            # With autoguidance, the second checkpoint's identity follows.
            if str(point.get("content")).startswith(own) and point.get("weights") == weights:
                conditions = {key: value for key, value in point.items() if key not in ("checkpoint", "content")}
                yield {"metrics": line["metrics"], "measured by": "fid.py", **without_folders(conditions)}


def _figures_of_training(checkpoint: Path, cfg: schema.TrainConfig) -> Iterator[dict]:
    """What training measured at the checkpoint's step; a scale of guidance each."""
    run, step = checkpoints.run_of(checkpoint), checkpoints.step_of(checkpoint)
    found: dict[tuple[int, str], dict[str, float]] = {}
    for _, line in read_lines(run / "metrics.jsonl") if run else []:
        for name, value in line.items() if line and line.get("step") == step else ():
            if (parts := read_metric_name(name)) and isinstance(value, float):
                found.setdefault((parts.num_samples, parts.guidance), {})[parts.metric] = value
    for (num_samples, guidance), metrics in found.items():
        yield {
            "metrics": metrics,
            "measured by": "train.py",
            "weights": "ema",
            "cfg_scale": guidance.removeprefix("cfg"),
            **cfg.diffusion.sampler.model_dump(include={"S_churn", "solver"}),
            "num_steps": cfg.eval.num_steps or cfg.diffusion.sampler.num_steps,
            "num_samples": num_samples,
            "precision": cfg.eval.precision,
            "detector": "+".join(cfg.evaluation.all_detectors),
            "detector_precision": cfg.evaluation.precision,
            **without_folders({"reference": cfg.evaluation.reference}),
        }


def describe_training(checkpoint: Path, cfg: schema.TrainConfig, weights: str) -> str:
    """A list: steps, data and optimiser of the configuration, machines of starts.jsonl."""
    train, step = cfg.train, checkpoints.step_of(checkpoint)
    if source := checkpoints.imported_from(checkpoint):
        return f"The weights were imported from {_last_part(source)}. Its authors say how they were trained.\n"
    lines = [
        f"Weights: {'exponential moving average, decay ' + format(train.ema_decay, 'g') if weights == 'ema' else 'raw'}, "
        f"step {step:,} of {train.num_steps:,}, {step * train.batch_size:,} images in batches of {train.batch_size:,}",
        f"Data: `{cfg.data.name}`, autoencoder `{without_folders({'': cfg.data.autoencoder})['']}`, labels dropped with "
        f"probability {cfg.model.class_dropout:g}",
        f"AdamW: learning rate {train.lr:g}, betas {train.betas}, weight decay {train.weight_decay:g}; precision "
        f"{train.precision}",
    ]
    run = checkpoints.run_of(checkpoint)
    for _, start in read_lines(run / "starts.jsonl") if run else []:
        if start and isinstance(start.get("step"), int) and start["step"] <= step:
            shown = [f"{key} {start[key]}" for key in SHOWN_OF_START if start.get(key) is not None]
            changed = " (with changes)" if start.get("modified") else ""
            lines.append(f"Started at step {start['step']:,}: {', '.join(shown)}{changed}")
    return "".join(f"- {line}\n" for line in lines)


def without_folders(settings: dict[str, object]) -> dict[str, object]:
    """Settings for the public: of an absolute path, its last part."""
    return {key: _last_part(value) if isinstance(value, str) else value for key, value in settings.items()}


def _last_part(text: str) -> str:
    return re.sub(r"^([a-z-]{2,}:)?(/|[A-Za-z]:\\).*[/\\]", r"\1", text)
