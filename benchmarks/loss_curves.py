"""Do the fast paths train as the plain one does? Loss curves of both from the same seeds, and the errors of one step.

    python -m benchmarks.loss_curves                                     # the digits: DiT-XS/2, 200 steps, 3 seeds
    python -m benchmarks.loss_curves variants=[fp32/blocks,bf16/none] model=tread steps=500
    python -m benchmarks.loss_curves backbone=DiT-B/2 resolution=256 batch_size=64 'variants=[bf16/blocks,fp8/blocks]'

A variant is <train.precision>/<train.compile>. The reference is the plain step (benchmarks/plain.py) in float32. All begin with
the same weights and see the same images, noise, labels and routes. What is compared:

- the curves: the root mean square, over steps and seeds, of the difference to the plain curve of the same seed, against the
  same between plain curves of different seeds (pairs of seeds). Curves are smoothed by means over `window` steps.
- one step at the weights where the plain run of the first seed ended: the relative error of its loss, and of its gradient as
  one vector, against plain float32.

It writes <output>.jsonl (with every loss) and <output>.md; the last line sums up. One process.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

import dit
from benchmarks.report import describe_machine, emit, markdown_table, parse_settings, prepare_output, say, write_report
from benchmarks.train_step import KEYS as TRAIN_STEP_KEYS
from benchmarks.train_step import MODELS, open_accelerator, open_trainer, random_latents, training_overrides
from errors import UserError
from setup.schema import TRAIN_KEYS, Accepts, choice, one_or_list, whole
from training.trainer import Trainer

DEFAULTS = {
    "backbone": "DiT-XS/2",
    "models": [*MODELS],
    "variants": ["fp32/none", "fp32/blocks", "bf16/none"],
    "steps": 200,
    "seeds": 3,  # at least 2: seeds 0, 1, ...
    "window": 20,  # steps that a point of a smoothed curve is the mean of
    "batch_size": 64,
    "resolution": 8,  # 8 (the embedded digits) | 256 | 512 (random latents), as for benchmarks.train_step
    "device": None,  # cpu | cuda; null: what accelerate chooses
    "cpu_threads": None,  # as train.cpu_threads
    "overrides": [],  # more of the training configuration
    "output": "runs/benchmarks/loss_curves",  # the files' name, without its ending
}


def _is_variant(value: object) -> bool:
    precision, _, mode = str(value).partition("/")
    return TRAIN_KEYS["train.precision"].test(precision) and TRAIN_KEYS["train.compile"].test(mode)


KEYS = {
    "backbone": choice(*dit.BACKBONES),
    "models": one_or_list(choice(*MODELS)),
    "variants": one_or_list(Accepts(_is_variant, "<train.precision>/<train.compile>, bf16/blocks say")),
    "steps": whole(1),
    "seeds": whole(2),
    "window": whole(1),
    **{name: TRAIN_STEP_KEYS[name] for name in DEFAULTS if name in TRAIN_STEP_KEYS and name != "models"},
}


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    if settings["window"] > settings["steps"]:
        raise UserError(f"window={settings['window']} is more than steps={settings['steps']}")
    in_float32 = all(variant.startswith("fp32/") for variant in settings["variants"])
    accelerator = open_accelerator(settings | {"precision": "fp32" if in_float32 else "bf16"})
    if accelerator.num_processes > 1:
        raise UserError(f"benchmarks.loss_curves runs in one process, not in {accelerator.num_processes}")
    prepare_output(settings["output"])
    machine = describe_machine(accelerator.device) | {"settings": settings}
    lines, sections, summary = [], [NOTES], []
    with tempfile.TemporaryDirectory() as folder:
        data = random_latents(Path(folder), settings)
        for model in settings["models"]:
            comparison = CurveComparison(accelerator, settings, data, model)
            rows = comparison.rows()
            lines += [*comparison.curves(), *rows]
            sections += [f"## {settings['backbone']}, {model}\n", markdown_table(rows)]
            summary += [curves_in_words(row) for row in rows]
    last_line = "; ".join(summary)
    write_report(settings["output"], "Loss curves of fast and plain steps", machine, lines, [*sections, last_line + "\n"])
    emit(**machine)
    for line in lines:
        if "losses" not in line:
            emit(**line)
    say(last_line)
    accelerator.end_training()


NOTES = """`curve_difference`: root mean square of the difference to the plain float32 curve of the same seed; `seed_difference`:
the same between plain curves of different seeds; smoothed curves, in units of the loss. `step_loss_error` and `gradient_error`:
of one step at the weights where the first plain run ended, relative to plain float32, the gradient as one vector.
"""


@dataclass
class CurveRun:
    """What one training run leaves.

    Attributes:
        losses: (steps,) float64.
        weights: the last ones.
    """

    losses: Tensor
    weights: dict[str, Tensor]


class CurveComparison:
    """The runs of one model: plain ones first, then those of every variant."""

    def __init__(self, accelerator: Accelerator, settings: dict, data: Sequence[str], model: str):
        self.accelerator, self.settings, self.data, self.model = accelerator, settings, data, model
        seeds = range(settings["seeds"])
        self.plain = [self._train("plain", seed) for seed in seeds]
        self.fast = {variant: [self._train(variant, seed) for seed in seeds] for variant in settings["variants"]}

    def rows(self) -> list[dict[str, object]]:
        plain = [self._smooth(run.losses) for run in self.plain]
        of_seeds = root_mean_square([a - b for a, b in itertools.combinations(plain, 2)])
        loss, gradient = self._one_step("plain")
        rows = []
        for variant, runs in self.fast.items():
            difference = root_mean_square([self._smooth(run.losses) - p for run, p in zip(runs, plain)])
            fast_loss, fast_gradient = self._one_step(variant)
            rows.append(
                {
                    "model": self.model,
                    "variant": variant,
                    "curve_difference": difference,
                    "seed_difference": of_seeds,
                    "share": difference / of_seeds,
                    "last_plain": torch.stack([p[-1] for p in plain]).mean().item(),
                    "last": torch.stack([self._smooth(run.losses)[-1] for run in runs]).mean().item(),
                    "step_loss_error": abs(fast_loss - loss) / loss,
                    "gradient_error": ((fast_gradient - gradient).norm() / gradient.norm()).item(),
                }
            )
        return rows

    def curves(self) -> list[dict[str, object]]:
        """Every loss of every run."""
        return [
            {"model": self.model, "variant": variant, "seed": seed, "losses": run.losses.tolist()}
            for variant, runs in {"plain": self.plain, **self.fast}.items()
            for seed, run in enumerate(runs)
        ]

    def _open(self, variant: str, seed: int) -> Trainer:
        plain = variant == "plain"
        precision, mode = ("fp32", "none") if plain else variant.split("/")
        settings = self.settings | {"precision": precision, "num_workers": 0}
        overrides = training_overrides(settings, self.data, self.settings["backbone"], self.model, mode)
        trainer = open_trainer(self.accelerator, [*overrides, f"seed={seed}"], plain=plain)
        if precision == "fp32":  # accelerate has one precision for all; this takes its autocast off again
            trainer.model = self.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return trainer

    def _train(self, variant: str, seed: int) -> CurveRun:
        trainer, losses = self._open(variant, seed), []
        for _, micro_batches in zip(range(self.settings["steps"]), trainer.batches()):
            before = trainer.loss_sum.clone()
            trainer.train_step(micro_batches)
            losses.append(trainer.loss_sum - before)
            trainer.loss_sum.zero_()
        run = CurveRun(torch.stack(losses).double().cpu(), {name: w.clone() for name, w in trainer.net.state_dict().items()})
        self._close()
        return run

    def _one_step(self, variant: str) -> tuple[float, Tensor]:
        """(loss, gradient as one vector) at the last weights of the first plain run."""
        trainer = self._open(variant, seed=0)
        trainer.net.load_state_dict(self.plain[0].weights)
        loss = trainer.loss(trainer.parts[0], *next(trainer.batches())[0])
        self.accelerator.backward(loss)
        gradient = torch.cat([p.grad.flatten().double().cpu() for p in trainer.net.parameters() if p.requires_grad])
        self._close()
        return loss.item(), gradient

    def _close(self) -> None:
        self.accelerator.free_memory()
        torch.compiler.reset()

    def _smooth(self, losses: Tensor) -> Tensor:
        """Means over whole windows; steps beyond the last one are left out."""
        window = self.settings["window"]
        return losses[: len(losses) // window * window].unflatten(0, (-1, window)).mean(1)


def root_mean_square(differences: Sequence[Tensor]) -> float:
    return math.sqrt(torch.stack(list(differences)).square().mean().item())


def curves_in_words(row: dict[str, object]) -> str:
    return (
        f"{row['model']} {row['variant']}: curves differ by {100 * row['share']:.3g}% of what seeds do, "
        f"one step's gradient by {row['gradient_error']:.2g}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
