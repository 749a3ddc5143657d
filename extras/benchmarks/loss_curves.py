"""Do the fast paths train as the plain one does? Loss curves of both from the same seeds, and the errors of one step.

    python -m extras.benchmarks.loss_curves                                     # the digits: DiT-XS/2, 200 steps, 3 seeds
    python -m extras.benchmarks.loss_curves 'variants=[fp32/blocks,bf16/none]' models=tread steps=500
    python -m extras.benchmarks.loss_curves backbone=DiT-B/2 resolution=256 batch_size=64 'variants=[bf16/blocks,fp8/blocks]'

A variant is <train.precision>/<train.compile>. The reference is the plain step (benchmarks/plain.py) in float32. All start with
the same weights and see the same images, noise, labels and routes. NOTES says what is compared; curves are smoothed by means
over `window` steps. <output>.jsonl holds every loss. One process.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import torch
from accelerate import Accelerator
from torch import Tensor

from common.errors import UserError
from configs import command_line as cli
from configs.schema import Compile
from configs.settings import Accepts, Count, Text
from extras.benchmarks.harness import Backbone, Report, Several, open_accelerator, table
from extras.benchmarks.trainers import MODELS, CommonSettings, data_overrides, open_trainer
from training.speed import MIXED_PRECISION
from training.trainer import Trainer

VARIANTS = [f"{precision}/{mode}" for precision in MIXED_PRECISION for mode in get_args(Compile)]
Variant = Annotated[str, Accepts(VARIANTS.__contains__, "<train.precision>/<train.compile>, bf16/blocks say")]


class LossCurvesSettings(CommonSettings):
    backbone: Backbone = "DiT-XS/2"
    models: Several[Literal[MODELS]] = [*MODELS]
    variants: Several[Variant] = ["fp32/none", "fp32/blocks", "bf16/none"]
    steps: Count = 200
    seeds: Annotated[int, Accepts(lambda count: count >= 2, "a whole number of at least 2")] = 3  # seeds 0, 1, ...
    window: Count = 20  # a point of a smoothed curve is the mean of so many steps
    batch_size: Count = 64
    resolution: Literal[8, 256, 512] = 8  # as for benchmarks.train_step
    output: Text = "runs/benchmarks/loss_curves"  # the files' name, without its ending


NOTES = """`curve_difference`: root mean square of the difference to the plain float32 curve of the same seed; `seed_difference`:
the same between plain curves of different seeds; smoothed curves, in units of the loss. `step_loss_error` and `gradient_error`:
of one step at the weights where the first plain run ended, relative to plain float32, the gradient as one vector.
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, LossCurvesSettings)
    if settings.window > settings.steps:
        raise UserError(f"window={settings.window} is more than steps={settings.steps}")
    in_float32 = all(variant.startswith("fp32/") for variant in settings.variants)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, "fp32" if in_float32 else "bf16", settings.tf32)
    if accelerator.num_processes > 1:
        raise UserError(f"benchmarks.loss_curves runs in one process, not in {accelerator.num_processes}")
    report = Report("Loss curves of fast and plain steps", settings, accelerator.device)
    lines, all_rows, sections = [], [], [NOTES]
    with data_overrides(settings) as data:
        for model in settings.models:
            curves, rows = compare_curves(accelerator, settings, data, model)
            lines += [*curves, *rows]
            all_rows += rows
            sections += [f"## {settings.backbone}, {model}\n", table(rows)]
    summary = "; ".join(map(describe_curves, all_rows))
    report.save(lines, [*sections, f"{summary}\n"], [report.machine, *all_rows, summary])
    accelerator.end_training()


def train_curve(trainer: Trainer, num_steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(losses [num_steps] float64, last weights)."""
    losses = []
    for _, micro_batches in zip(range(num_steps), trainer.batches()):
        trainer.loss_sums.zero_()
        trainer.train_step(micro_batches)
        losses.append(trainer.loss_sums[0].clone())
    return torch.stack(losses).double().cpu(), {name: w.clone() for name, w in trainer.net.state_dict().items()}


def first_step(trainer: Trainer, weights: dict[str, Tensor]) -> tuple[float, Tensor]:
    """(loss, gradient as one vector) of the first batch at these weights."""
    trainer.net.load_state_dict(weights)
    loss = sum(trainer.losses(trainer.parts[0], *next(trainer.batches())[0]))
    trainer.accelerator.backward(loss)
    return loss.item(), torch.cat([p.grad.flatten().double().cpu() for p in trainer.net.parameters() if p.requires_grad])


def compare_curves(
    accelerator: Accelerator, settings: LossCurvesSettings, data: Sequence[str], model: str
) -> tuple[list[dict], list[dict]]:
    """(every loss of every run, a row for each variant)."""

    def open_variant(variant: str, seed: int = 0) -> Trainer:
        accelerator.free_memory()  # of the one before
        torch.compiler.reset()
        plain = variant == "plain"
        precision, mode = ("fp32", "none") if plain else variant.split("/")
        trainer = open_trainer(accelerator, settings, data, plain, model=model, precision=precision, compile=mode, seed=seed)
        if precision == "fp32":  # accelerate has one precision for all; this takes its autocast off again
            trainer.model = accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return trainer

    curves, smoothed, plain_weights, window = [], {}, {}, settings.window
    for variant in ("plain", *settings.variants):
        points = []
        for seed in range(settings.seeds):
            losses, weights = train_curve(open_variant(variant, seed), settings.steps)
            plain_weights = plain_weights or weights
            curves.append({"model": model, "variant": variant, "seed": seed, "losses": losses.tolist()})
            whole = losses[: len(losses) // window * window]  # steps beyond the last whole window are left out
            points.append(whole.unflatten(0, (-1, window)).mean(1))
        smoothed[variant] = torch.stack(points)  # (seeds, windows)
    plain = smoothed["plain"]
    seed_difference = root_mean_square(torch.stack([a - b for a, b in itertools.combinations(plain, 2)]))
    loss, gradient = first_step(open_variant("plain"), plain_weights)
    rows = []
    for variant in settings.variants:
        difference = root_mean_square(smoothed[variant] - plain)
        fast_loss, fast_gradient = first_step(open_variant(variant), plain_weights)
        rows.append(
            {
                "model": model,
                "variant": variant,
                "curve_difference": difference,
                "seed_difference": seed_difference,
                "share": difference / seed_difference,
                "last_plain": plain[:, -1].mean().item(),
                "last": smoothed[variant][:, -1].mean().item(),
                "step_loss_error": abs(fast_loss - loss) / loss,
                "gradient_error": ((fast_gradient - gradient).norm() / gradient.norm()).item(),
            }
        )
    return curves, rows


def root_mean_square(differences: Tensor) -> float:
    return differences.square().mean().sqrt().item()


def describe_curves(row: dict[str, object]) -> str:
    return (
        f"{row['model']} {row['variant']}: curves differ by {100 * row['share']:.3g}% of what seeds do, "
        f"one step's gradient by {row['gradient_error']:.2g}"
    )


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
