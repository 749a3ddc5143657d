"""Fine-tune a Flux or PixArt transformer of diffusers with LoRA and token routes, from latents made before.

    python -m examples.finetune_diffusers --model <folder or hub id> --data <folder> --output <folder>
    python -m examples.finetune_diffusers --model ... --data ... --output ... --routes fastest --steps 2000
    python -m examples.finetune_diffusers --model ... --data ... --output ... --routes none       # the same, dense

More flags: `FinetuneSettings`, below. --data holds *.safetensors files with, for every item,
    latents               [M, C, H, W]  as the network sees them: shifted and scaled
    prompt_embeds         [M, T, D]     of the text encoder
    pooled_prompt_embeds  [M, P]        Flux only
    prompt_mask           [M, T]        PixArt only, optional: 1 is text, 0 is padding
    loss_mask             [M, H, W]     optional: learn only what is inside; its tokens never skip
all of one shape. --output gets the LoRA weights in PEFT's format: `PeftModel.from_pretrained(transformer, output)`.

Shapes: B batch, N image tokens, T text tokens.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import UserError
from configs.command_line import guard, parse_arguments
from configs.settings import Count, Positive, Settings, Text, Whole, one_of
from extras.attach import PRESETS, attach, mask_to_tokens, masked_mse

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_out")

logger = logging.getLogger(__name__)


class FinetuneSettings(Settings):
    model: Text  # folder or hub id of the transformer (with `transformer/` inside, or not)
    data: Text
    output: Text
    routes: Annotated[str, one_of(("none", *PRESETS))] = "lora"
    steps: Count = 1000  # of the optimizer
    batch_size: Count = 1
    learning_rate: Positive = 1e-4  # of AdamW, constant
    rank: Count = 16  # of LoRA
    seed: Whole = 0  # items, noise and noise levels are functions of it
    device: Text = "cuda" if torch.cuda.is_available() else "cpu"


class StepRecord(NamedTuple):
    loss: float
    step_sec: float


def read_items(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of every file of the folder, joined along the items, in the order of the files' names."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"--data={folder} holds no *.safetensors files")
    parts = [load_file(file) for file in files]
    for name in ("latents", "prompt_embeds"):
        if name not in parts[0]:
            raise UserError(f"{files[0]} has no {name!r}; it has {', '.join(sorted(parts[0]))}")
    for file, part in zip(files, parts):
        if part.keys() != parts[0].keys():
            raise UserError(f"{file} has {', '.join(sorted(part))}, but {files[0]} has {', '.join(sorted(parts[0]))}")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def pack(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, N, 4C): Flux gets patches of 2 x 2 as tokens; within a token: channel, row, column."""
    return F.pixel_unshuffle(x, 2).flatten(2).mT.contiguous()


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, N, 4C) -> (B, C, H, W)."""
    return F.pixel_shuffle(tokens.mT.unflatten(2, (height // 2, width // 2)), 2)


def predict_flux(network: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Flow matching: x_t = (1 - t) x + t noise, target noise - x, t from a logit-normal. (prediction, target)."""
    x = batch["latents"]
    B, _, H, W = x.shape
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    t = torch.sigmoid(torch.randn(B, generator=generator, device=x.device))
    x_t = torch.lerp(x, noise, t[:, None, None, None])
    rows, columns = torch.meshgrid(torch.arange(H // 2), torch.arange(W // 2), indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)  # (N, 3)
    guided = network.get_base_model().config.guidance_embeds
    tokens = network(
        hidden_states=pack(x_t),
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled_prompt_embeds"],
        timestep=t,
        guidance=torch.ones_like(t) if guided else None,
        img_ids=image_ids.to(x),
        txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3).to(x),
        return_dict=False,
    )[0]
    return unpack(tokens, H, W), noise - x


def predict_pixart(network: nn.Module, batch: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """DDPM with linear betas from 1e-4 to 0.02: the target is the noise. (prediction, target)."""
    x = batch["latents"]
    B, C, H, W = x.shape
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    t = torch.randint(0, 1000, (B,), generator=generator, device=x.device)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=x.device), dim=0)[t][:, None, None, None]
    x_t = alphas_cumprod.sqrt() * x + (1 - alphas_cumprod).sqrt() * noise
    resolution = aspect_ratio = None
    if network.get_base_model().config.sample_size == 128:  # PixArt at 1024 pixels is conditioned on the image's size
        resolution = torch.tensor([[8.0 * H, 8.0 * W]], device=x.device).expand(B, -1)
        aspect_ratio = torch.full((B, 1), H / W, device=x.device)
    prediction = network(
        hidden_states=x_t,
        encoder_hidden_states=batch["prompt_embeds"],
        encoder_attention_mask=batch.get("prompt_mask"),
        timestep=t,
        added_cond_kwargs={"resolution": resolution, "aspect_ratio": aspect_ratio},
        return_dict=False,
    )[0]
    return prediction[:, :C], noise  # the other half of the channels is a learned variance


PREDICT = {"FluxTransformer2DModel": predict_flux, "PixArtTransformer2DModel": predict_pixart}


def finetune(
    network: nn.Module,
    items: dict[str, Tensor],
    *,
    routes,
    num_steps: int,
    batch_size: int = 1,
    learning_rate: float = 1e-4,
    rank: int = 16,
    seed: int = 0,
) -> tuple[nn.Module, Iterator[StepRecord]]:
    """LoRA around `network`, and the steps of its training, which run as the iterator is read.

    Args:
        network: a transformer of diffusers; frozen here.
        items: as `read_items` returns them, on the device of the network.
        routes: anything that `attach` takes; None is dense.
        others: see `FinetuneSettings`.
    """
    from peft import LoraConfig, get_peft_model

    predict = PREDICT.get(type(network).__name__)
    if predict is None:
        raise UserError(f"{type(network).__name__} cannot be fine-tuned here; use one of {', '.join(PREDICT)}")
    if predict is predict_flux and "pooled_prompt_embeds" not in items:
        raise UserError(f"Flux needs 'pooled_prompt_embeds' in the data; it has {', '.join(sorted(items))}")
    network = get_peft_model(network, LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LORA_TARGETS)))
    try:
        attachment = attach(network, routes) if routes is not None else None
    except ValueError as e:  # routes that do not fit the network's depth
        raise UserError(str(e)) from e
    network.train()  # from_pretrained leaves networks in evaluation mode, in which nothing is routed
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    device = items["latents"].device
    generator = torch.Generator(device=device).manual_seed(seed)

    def steps() -> Iterator[StepRecord]:
        for _ in range(num_steps):
            start_sec = time.perf_counter()
            ids = torch.randint(0, len(items["latents"]), (batch_size,), generator=generator, device=device)
            batch = {name: tensor[ids] for name, tensor in items.items()}
            mask = batch.get("loss_mask")
            keep = None if mask is None else mask_to_tokens(mask, patch_size=2)
            with attachment.force_keep(keep) if attachment is not None else contextlib.nullcontext():
                prediction, target = predict(network, batch, generator)
            loss = masked_mse(prediction, target, mask).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            yield StepRecord(loss.item(), time.perf_counter() - start_sec)  # item() waits for the device
        if attachment is not None:
            logger.info("%s", attachment.statistics)
            attachment.detach()

    return network, steps()


def main(arguments: list[str]) -> None:
    settings = parse_arguments(arguments, FinetuneSettings)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from diffusers import AutoModel

    items = {name: tensor.to(settings.device) for name, tensor in read_items(settings.data).items()}
    is_pipeline = (Path(settings.model) / "transformer").is_dir() or not Path(settings.model).exists()
    network = AutoModel.from_pretrained(settings.model, subfolder="transformer" if is_pipeline else None)
    network, steps = finetune(
        network.to(settings.device),
        items,
        routes=None if settings.routes == "none" else settings.routes,
        num_steps=settings.steps,
        **settings.model_dump(include={"batch_size", "learning_rate", "rank", "seed"}),
    )
    for i, record in enumerate(steps, start=1):
        if i == 1 or i % 50 == 0 or i == settings.steps:
            logger.info("step %d  loss %.4f  %.3f s", i, record.loss, record.step_sec)
    network.save_pretrained(settings.output)


if __name__ == "__main__":
    guard(lambda: main(sys.argv[1:]))
