"""Build the EMA, alignment and hooks for a configuration."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from checkpoints.run import RunFolder
from common.interfaces import TokenAlignment
from configs import schema
from latents import autoencoders
from latents.dataset import LatentDataset
from runtime.compilation import compile_network, resolve_compile
from sampling.evaluator import build_evaluator
from sampling.recipe import compile_mode_for
from training import hooks
from training.ema import EMA
from training.hooks import Hook
from training.plan import TrainPlan
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


def build_hooks(
    cfg: schema.TrainConfig, plan: TrainPlan, ema: EMA, run: RunFolder, validation: LatentDataset | None, accelerator: Accelerator
) -> list[Hook]:
    """Build the hooks of the training loop, and compile the EMA network, from which they sample or compute the loss."""
    mode = compile_mode_for(plan.recipes, resolve_compile(cfg.machine.compile, accelerator.device))
    compile_network(ema.net, mode)
    active: list[Hook] = []
    if cfg.train.ema_lengths:
        from extras import tracked_ema  # imported only for train.ema_lengths

        active.append(tracked_ema.SnapshotHook(run, cfg.train.ema_snapshot_every))
    if plan.recipes:
        active += build_sampling_hooks(cfg, plan, ema, run, accelerator, mode)
    if validation:
        active.append(ValidationLossHook(run.results, cfg.evaluation.every, validation))
    return active


def build_sampling_hooks(
    cfg: schema.TrainConfig, plan: TrainPlan, ema: EMA, run: RunFolder, accelerator: Accelerator, compile_mode: str
) -> list[Hook]:
    """Build the hooks for grids and evaluations of samples. Load what decodes and scores them, and the reference's features."""
    device = accelerator.device
    decoder = autoencoders.build(cfg.sampling.autoencoder, device, cfg.data.in_channels)
    active: list[Hook] = []
    if plan.grid_recipe:
        image_sampler = plan.grid_recipe.build_image_sampler(ema.net, decoder, device, compile_mode)
        active.append(hooks.SampleGridHook(run, cfg.sample_grid.every, image_sampler))
    if plan.evaluations:
        cache = run.results.reference_cache
        evaluator = build_evaluator(cfg.evaluation, accelerator, plan.reference, cfg.sampling.batch_size, cache)
        names = hooks.names_of_guidances([evaluation.guidance for evaluation, _ in plan.evaluations])
        for (evaluation, recipe), name in zip(plan.evaluations, names):
            image_sampler, every = recipe.build_image_sampler(ema.net, decoder, device, compile_mode), cfg.evaluation.every
            active.append(hooks.SampleEvaluationHook(run.results, every, evaluator, image_sampler, evaluation, name))
    return active
