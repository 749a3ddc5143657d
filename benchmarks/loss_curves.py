"""Do the fast paths train as the plain one does? Loss curves of both from the same seeds, and the errors of one step.

    python -m benchmarks.loss_curves                                     # the digits: DiT-XS/2, 200 steps, 3 seeds
    python -m benchmarks.loss_curves 'variants=[fp32/blocks,bf16/none]' models=tread steps=500
    python -m benchmarks.loss_curves backbone=DiT-B/2 resolution=256 batch_size=64 'variants=[bf16/blocks,fp8/blocks]'

A variant is <train.precision>/<train.compile>. The reference is the plain step (benchmarks/plain.py) in float32. All start with
the same weights and see the same images, noise, labels and routes. NOTES says what is compared; curves are smoothed by means
over `window` steps. <output>.jsonl holds every loss. One process.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.harness import Backbone, Report, Several, open_accelerator, table
from benchmarks.trainers import MODELS, StepSettings, data_overrides, open_trainer, step_overrides
from errors import UserError
from setup import cli
from setup.schema import Compile
from setup.settings import Accepts, Count, Text
from training.speed import MIXED_PRECISION
from training.trainer import Trainer

VARIANTS = [f"{precision}/{mode}" for precision in MIXED_PRECISION for mode in get_args(Compile)]
Variant = Annotated[str, Accepts(VARIANTS.__contains__, "<train.precision>/<train.compile>, bf16/blocks say")]


class LossCurvesSettings(StepSettings):
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
    accelerator = open_accelerator(settings.device, settings.cpu_threads, "fp32" if in_float32 else "bf16")
    if accelerator.num_processes > 1:
        raise UserError(f"benchmarks.loss_curves runs in one process, not in {accelerator.num_processes}")
    report = Report("Loss curves of fast and plain steps", settings, accelerator.device)
    curves, rows, lines, sections = [], [], [], [NOTES]
    with data_overrides(settings) as data:
        for model in settings.models:
            curves, rows = compare_curves(Runs(accelerator, settings, data, model))
            lines += [*curves, *rows]
            sections += [f"## {settings.backbone}, {model}\n", table(rows)]
    rows = [line for line in lines if "losses" not in line]
    report.save_and_print(lines, sections, "; ".join(map(in_words, rows)), printed=rows)
    accelerator.end_training()


class Runs:
    """The training runs of one model, by variant and seed; `plain` is the reference."""

    def __init__(self, accelerator: Accelerator, settings: LossCurvesSettings, data: Sequence[str], model: str):
        self.accelerator, self.settings, self.data, self.model = accelerator, settings, data, model

    def _open(self, variant: str, seed: int) -> Trainer:
        plain = variant == "plain"
        precision, mode = ("fp32", "none") if plain else variant.split("/")
        overrides = step_overrides(
            self.settings, self.data, self.settings.backbone, self.model, precision=precision, compile=mode
        )
        trainer = open_trainer(self.accelerator, [*overrides, f"seed={seed}"], plain=plain)
        if precision == "fp32":  # accelerate has one precision for all; this takes its autocast off again
            trainer.model = self.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return trainer

    def _close(self) -> None:
        self.accelerator.free_memory()
        torch.compiler.reset()

    def train(self, variant: str, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(losses [steps] float64, last weights)."""
        trainer, losses = self._open(variant, seed), []
        for _, micro_batches in zip(range(self.settings.steps), trainer.batches()):
            trainer.loss_sum.zero_()
            trainer.train_step(micro_batches)
            losses.append(trainer.loss_sum.clone())
        weights = {name: w.clone() for name, w in trainer.net.state_dict().items()}
        self._close()
        return torch.stack(losses).double().cpu(), weights

    def step(self, variant: str, weights: dict[str, Tensor]) -> tuple[float, Tensor]:
        """(loss, gradient as one vector) at these weights."""
        trainer = self._open(variant, seed=0)
        trainer.net.load_state_dict(weights)
        loss = trainer.loss(trainer.parts[0], *next(trainer.batches())[0])
        self.accelerator.backward(loss)
        gradient = torch.cat([p.grad.flatten().double().cpu() for p in trainer.net.parameters() if p.requires_grad])
        self._close()
        return loss.item(), gradient


def compare_curves(runs: Runs) -> tuple[list[dict], list[dict]]:
    """(every loss of every run, a row for each variant)."""
    window, seeds = runs.settings.window, range(runs.settings.seeds)

    def smooth(losses: Tensor) -> Tensor:  # means over whole windows; steps beyond the last one are left out
        return losses[: len(losses) // window * window].unflatten(0, (-1, window)).mean(1)

    trained = {variant: [runs.train(variant, seed) for seed in seeds] for variant in ("plain", *runs.settings.variants)}
    smoothed = {variant: [smooth(losses) for losses, _ in of_seeds] for variant, of_seeds in trained.items()}
    plain, weights = smoothed["plain"], trained["plain"][0][1]
    seed_difference = root_mean_square([a - b for a, b in itertools.combinations(plain, 2)])
    loss, gradient = runs.step("plain", weights)
    rows = []
    for variant in runs.settings.variants:
        difference = root_mean_square([fast - slow for fast, slow in zip(smoothed[variant], plain)])
        fast_loss, fast_gradient = runs.step(variant, weights)
        rows.append(
            {
                "model": runs.model,
                "variant": variant,
                "curve_difference": difference,
                "seed_difference": seed_difference,
                "share": difference / seed_difference,
                "last_plain": torch.stack([curve[-1] for curve in plain]).mean().item(),
                "last": torch.stack([curve[-1] for curve in smoothed[variant]]).mean().item(),
                "step_loss_error": abs(fast_loss - loss) / loss,
                "gradient_error": ((fast_gradient - gradient).norm() / gradient.norm()).item(),
            }
        )
    curves = [
        {"model": runs.model, "variant": variant, "seed": seed, "losses": losses.tolist()}
        for variant, of_seeds in trained.items()
        for seed, (losses, _) in enumerate(of_seeds)
    ]
    return curves, rows


def root_mean_square(differences: Sequence[Tensor]) -> float:
    return math.sqrt(torch.stack(list(differences)).square().mean().item())


def in_words(row: dict[str, object]) -> str:
    return (
        f"{row['model']} {row['variant']}: curves differ by {100 * row['share']:.3g}% of what seeds do, "
        f"one step's gradient by {row['gradient_error']:.2g}"
    )


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
