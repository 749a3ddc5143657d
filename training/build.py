"""Build the EMA, alignment, samplers and hooks for a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator

from checkpoints.run import RunFolder
from common.interfaces import TokenAlignment
from configs import schema
from latents import autoencoders
from latents.dataset import LatentDataset
from runtime.compilation import compile_network, resolve_compile
from sampling.evaluator import Evaluator, build_detectors
from sampling.recipe import compile_mode_for
from sampling.sampler import ImageSampler
from training import hooks, saving
from training.ema import EMA
from training.plan import TrainPlan
from training.trainer import Hook
from training.validation import ValidationLossHook


def build_ema(train: schema.Train, net: torch.nn.Module) -> EMA:
    if not train.ema_lengths:
        return EMA(net, train.ema_decay, train.ema_schedule)
    from extras import tracked_ema  # imported only for train.ema_lengths

    return tracked_ema.TrackedEMA(net, train.ema_decay, train.ema_lengths, train.ema_schedule)


def build_alignment(cfg: schema.TrainConfig, dataset: LatentDataset, accelerator: Accelerator) -> TokenAlignment | None:
    if cfg.alignment.name == "none":
        return None
    from extras import alignment  # imported only for alignment=repa, because timm is slow to import

    return alignment.build(cfg, dataset, accelerator)


@dataclass(frozen=True)
class SamplingParts:
    """What samples from the EMA network during training, and what scores the samples."""

    grid_image_sampler: ImageSampler | None  # None without sample grids
    evaluation_image_samplers: list[ImageSampler]  # one for each recipe in `TrainPlan.evaluation_recipes`
    evaluator: Evaluator | None  # None if `evaluation_image_samplers` is empty


def prepare_sampling(
    cfg: schema.TrainConfig, plan: TrainPlan, ema: EMA, run: RunFolder, accelerator: Accelerator
) -> SamplingParts:
    """Compile the EMA network, load what the run samples and scores with, and compute the features of the reference."""
    device = accelerator.device
    decoder = autoencoders.build(cfg.sampling.autoencoder, device, cfg.data.in_channels) if plan.recipes else None
    mode = compile_mode_for(plan.recipes, resolve_compile(cfg.machine.compile, device))
    compile_network(ema.net, mode)
    grid = plan.grid_recipe and plan.grid_recipe.build_image_sampler(ema.net, decoder, device, mode)
    evaluator = None
    if plan.evaluation_recipes:
        detectors = build_detectors(cfg.evaluation, accelerator)
        evaluator = Evaluator(accelerator, detectors, plan.reference, cfg.sampling.batch_size, run.results.reference_cache)
    evaluation_image_samplers = [recipe.build_image_sampler(ema.net, decoder, device, mode) for recipe in plan.evaluation_recipes]
    return SamplingParts(grid, evaluation_image_samplers, evaluator)


def build_hooks(
    cfg: schema.TrainConfig, plan: TrainPlan, sampling_parts: SamplingParts, run: RunFolder, validation: LatentDataset | None
) -> list[Hook]:
    """Build the trainer's hooks. Sample grids, evaluations and the validation loss use the EMA network."""
    checkpoints = saving.CheckpointHook(run, cfg.checkpoint.every, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
    active: list[Hook] = [hooks.MetricsHook(run, cfg.train.log_every, checkpoints.raise_write_error), checkpoints]
    if cfg.train.ema_lengths:
        from extras import tracked_ema  # imported only for train.ema_lengths

        active.append(tracked_ema.SnapshotHook(run, cfg.train.ema_snapshot_every))
    if sampling_parts.grid_image_sampler:
        active.append(hooks.SampleGridHook(run, cfg.sample_grid.every, sampling_parts.grid_image_sampler))
    for recipe, image_sampler in zip(plan.evaluation_recipes, sampling_parts.evaluation_image_samplers):
        hook = hooks.SampleEvaluationHook(
            run.results, cfg.evaluation.every, sampling_parts.evaluator, recipe, image_sampler, plan.scoring
        )
        active.append(hook)
    if validation:
        active.append(ValidationLossHook(run.results, cfg.evaluation.every, validation))
    return active
