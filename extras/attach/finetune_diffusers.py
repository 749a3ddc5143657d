"""Fine-tune a Flux or PixArt transformer of diffusers with LoRA and token routes: a script to start from.

    python -m extras.attach.finetune_diffusers --model <hub id> --data <folder> --output <folder> [--routes fastest]

--model is a pipeline of the hub, or a folder with transformer/ inside. --data holds *.safetensors files with, for every item,
    latents               [M, C, H, W]  as the network sees them: shifted and scaled
    prompt_embeds         [M, T, D]     of the text encoder
    pooled_prompt_embeds  [M, P]        Flux only
    prompt_mask           [M, T]        PixArt only, optional: 1 is text, 0 is padding
    loss_mask             [M, H, W]     optional: learn only what is inside; its tokens never skip
all of one shape. --output gets the LoRA weights in PEFT's format: `PeftModel.from_pretrained(transformer, output)`.

Shapes: B batch, N image tokens, T text tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from extras.attach import PRESETS, attach, mask_to_tokens, masked_mse
from routing_module import Route

log = logging.getLogger(__name__)


def read_items(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every file of the folder, joined along the items, in the order of the files' names."""
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    if not parts:
        raise FileNotFoundError(f"{folder} holds no *.safetensors files")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def pack(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, N, 4C): Flux gets patches of 2 x 2 as tokens; within a token: channel, row, column."""
    return F.pixel_unshuffle(x, 2).flatten(2).mT


def predict_flux(network: nn.Module, batch: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """Flow matching: x_t = (1 - t) x + t noise, target noise - x, t from a logit-normal. (prediction, target)."""
    x, (height, width) = batch["latents"], batch["latents"].shape[2:]
    t = torch.randn(len(x), device=x.device).sigmoid()
    positions = torch.cartesian_prod(torch.tensor([0]), torch.arange(height // 2), torch.arange(width // 2))  # (N, 3)
    tokens = network(
        hidden_states=pack(torch.lerp(x, noise, t[:, None, None, None])),
        encoder_hidden_states=batch["prompt_embeds"],
        pooled_projections=batch["pooled_prompt_embeds"],
        timestep=t,
        guidance=torch.ones_like(t) if network.get_base_model().config.guidance_embeds else None,
        img_ids=positions.to(x),
        txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3).to(x),
    ).sample
    return F.pixel_shuffle(tokens.mT.unflatten(2, (height // 2, width // 2)), 2), noise - x


def predict_pixart(network: nn.Module, batch: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """DDPM with linear betas from 1e-4 to 0.02: the target is the noise. (prediction, target)."""
    x, (B, C, H, W) = batch["latents"], batch["latents"].shape
    t = torch.randint(1000, (B,), device=x.device)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=x.device), dim=0)[t][:, None, None, None]
    conditions = {"resolution": None, "aspect_ratio": None}
    if network.get_base_model().config.sample_size == 128:  # PixArt at 1024 pixels is conditioned on the image's size
        conditions["resolution"] = torch.tensor([[8.0 * H, 8.0 * W]], device=x.device).expand(B, -1)
        conditions["aspect_ratio"] = torch.full((B, 1), H / W, device=x.device)
    prediction = network(
        hidden_states=alphas_cumprod.sqrt() * x + (1 - alphas_cumprod).sqrt() * noise,
        encoder_hidden_states=batch["prompt_embeds"],
        encoder_attention_mask=batch.get("prompt_mask"),
        timestep=t,
        added_cond_kwargs=conditions,
    ).sample
    return prediction[:, :C], noise  # the other half of the channels is a learned variance


PREDICT = {"FluxTransformer2DModel": predict_flux, "PixArtTransformer2DModel": predict_pixart}


def main(arguments: list[str]) -> None:
    from diffusers import AutoModel
    from peft import LoraConfig, get_peft_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--data", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--routes", choices=["none", *PRESETS], default="lora")
    for name, default in (("--steps", 1000), ("--batch-size", 1), ("--learning-rate", 1e-4), ("--rank", 16), ("--seed", 0)):
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)

    items = {name: tensor.to(args.device) for name, tensor in read_items(Path(args.data)).items()}
    network = AutoModel.from_pretrained(args.model, subfolder="transformer").to(args.device)
    predict = PREDICT[type(network).__name__]
    lora = LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj_out"])
    network = get_peft_model(network, lora).train()  # from_pretrained leaves it in evaluation mode, in which nothing is routed
    attachment = attach(network, [Route(0.0, 0, -1)] if args.routes == "none" else args.routes)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], args.learning_rate, weight_decay=0.0)

    for step in range(1, args.steps + 1):
        ids = torch.randint(0, len(items["latents"]), (args.batch_size,), device=args.device)
        batch = {name: tensor[ids] for name, tensor in items.items()}
        mask = batch.get("loss_mask")
        with attachment.force_keep(None if mask is None else mask_to_tokens(mask, patch_size=2)):
            prediction, target = predict(network, batch, torch.randn_like(batch["latents"]))
        loss = masked_mse(prediction, target, mask).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0:
            log.info("step %d  loss %.4f  saving %.2f", step, loss.item(), attachment.saving)
    network.save_pretrained(args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
