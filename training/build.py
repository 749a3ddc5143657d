"""From a checked configuration to the objects of a run: data, network, diffusion, guidance, autoencoder, detector."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

import dit
import guidance
from common.errors import UserError
from configs import schema
from configs.settings import validate
from edm import EDM
from edm.sampler import HeunSampler
from evaluations.detector import InceptionDetector, fetch_weights
from evaluations.digits_detector import DigitsDetector
from evaluations.digits_encoder import DigitsEncoder
from evaluations.dinov2_detector import DINOV2, DINOv2Detector
from evaluations.encoders import EXAMPLE, Encoder, find_encoder_weights
from evaluations.features import Detector
from evaluations.images import ImageSet, open_images
from evaluations.reference import check_reference
from evaluations.small_detector import MAKE, SmallDetector
from evaluations.suite import set_of
from extras.alignment import Alignment, Projector
from extras.ddpm import DDPM
from extras.ddpm.sampler import AncestralSampler
from latents import autoencoders
from latents.shards import LatentDataset, ShardInfo
from routing_module import Route, num_kept_tokens
from sampling.sampler import Diffusion
from sit import SiT
from sit.sampler import FlowSampler
from training.sharding import processes_per_node

log = logging.getLogger(__name__)

Dataset = LatentDataset

# TREAD's (section 4), for sparse guidance of a network that was trained without routes.
DEFAULT_ROUTE = Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-4)


# ----------------------------------------------------------------------------------------------------------------------
# Data.


def open_data(cfg: schema.TrainConfig) -> tuple[schema.TrainConfig, Dataset]:
    """Open the latents, compare them with data.*, and return a configuration that has what it left to them."""
    data = cfg.data
    if data.path is None:
        made = data.model_copy(update={"path": f"latents/{data.name}"})
        raise UserError(
            f"data.path is not set: give the folder that holds the latent shards (*.safetensors) of {data.name}; "
            f"to make it: {command_for(made)}"
        )
    if not Path(data.path).exists():
        raise UserError(f"data.path={data.path} does not exist; to make it: {command_for(data)}, or give another data.path=")
    dataset = LatentDataset(data.path)
    info = dataset.info
    if dataset.height != dataset.width:
        raise UserError(f"{dataset.path}: latents of {dataset.height}x{dataset.width} are not square")
    if data.in_channels not in (None, dataset.channels):
        hint = ""
        if info.kind == "sample" and dataset.channels == 2 * data.in_channels:
            again = "set data.kind=moments" if data.format == "webdataset" else "make the shards again with kind=moments"
            hint = f"; they look like moments (mean and log-variance) taken for kind=sample: {again}"
        latents = f"the latents of {dataset.path} have {dataset.channels} channels"
        raise UserError(f"data.in_channels={data.in_channels}, but {latents}{hint}")
    found = {"in_channels": dataset.channels, "input_size": dataset.height}
    found |= {key: getattr(info, key) for key in ("num_classes", "kind", "scale_factor", "resolution")}
    found |= {
        key: values and list(values) for key, values in (("latents_mean", info.latents_mean), ("latents_std", info.latents_std))
    }
    for key, value in found.items():
        if getattr(data, key) not in (None, value):
            raise UserError(
                f"data.{key}={getattr(data, key)}, but the latents of {dataset.path} say {value}; "
                f"set data.{key}={value} or choose other data"
            )
    found |= {"resolution": data.resolution, "autoencoder": data.autoencoder or info.autoencoder}
    return cfg.model_copy(update={"data": data.model_copy(update=found)}), dataset


# The data of experiments, by data.name: torchvision's name of the set, and what `encode` needs beside it.
OF_TORCHVISION = {"fashion_mnist": "FashionMNIST pad=2 grey=true", "cifar10": "CIFAR10 flips=true"}


def command_for(data: schema.Data) -> str:
    """The command that makes the latents of data.*."""
    if data.name == "digits":
        return f"python prepare_latents.py digits output={data.path}"
    if data.name == "vavae_imagenet256":
        source = f"path=<latents as LightningDiT stores them> output={data.path}"
        return f"python prepare_latents.py convert {source} autoencoder=va-vae:<file of VA-VAE's weights>"
    if data.name in OF_TORCHVISION:
        source = f"{OF_TORCHVISION[data.name]} output={data.path} autoencoder=identity kind=sample"
        return f"python prepare_latents.py encode images=torchvision:{source} resolution={data.input_size} sigma_data=0.5"
    if data.autoencoder == "none":  # one that is not here: its project has made the latents
        source = f"path=<latents as its project stores them> output={data.path} autoencoder=none"
        return f"python prepare_latents.py convert {source} resolution={data.resolution or '<of the images>'}"
    size = "" if data.input_size in (None, 32) else f" resolution={8 * data.input_size}"
    return f"accelerate launch prepare_latents.py encode images=<folder of images> output={data.path}{size}"


# ----------------------------------------------------------------------------------------------------------------------
# Network, diffusion, guidance.


def _grid_size(cfg: schema.TrainConfig) -> int:
    """Tokens along one side of the latents."""
    return cfg.data.input_size // schema.BACKBONES[cfg.model.backbone][-1]


def build_network(cfg: schema.TrainConfig) -> dit.DiT:
    """The network of a configuration whose data.in_channels, input_size and num_classes are filled in."""
    model, data = cfg.model, cfg.data
    network, _ = schema.family_of(model.backbone)
    try:
        return network.build(
            model.backbone,
            input_size=data.input_size,
            in_channels=data.in_channels,
            num_classes=data.num_classes,
            learn_sigma=model.learn_sigma,
            class_dropout=model.class_dropout,
            routes=[Route(**route) for route in model.routes],
            selection=model.selection,
            fp32_after_route=model.fp32_after_route,
            init=model.init,
        )
    except ValueError as e:
        raise UserError(f"model: {e}") from e


def build_diffusion(settings: schema.Diffusion, **sampler_overrides) -> Diffusion:
    """diffusion.* with its sampler; `sampler_overrides` that are None change nothing.

    Raises UserError for an override that the sampler of this diffusion does not have.
    """
    sampler = settings.sampler.model_dump()
    for key, value in sampler_overrides.items():
        if value is None:
            continue
        if key not in sampler:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UserError(
                f"{key}={shown} is not a setting of the sampler of diffusion={settings.name}, with which the run was trained; "
                f"leave it out. It has {', '.join(sampler)}"
            )
        sampler[key] = value
    sampler = validate(sampler, type(settings.sampler)).model_dump()  # each diffusion has solvers of its own
    own = settings.model_dump(exclude={"name", "sampler"})
    if settings.name == "sit":
        return SiT(**own, sampler=FlowSampler(**sampler))
    if settings.name == "ddpm":
        return DDPM(**own, sampler=AncestralSampler(**sampler))
    if not sampler["sigma_min"] < sampler["sigma_max"]:
        raise UserError(f"diffusion.sampler.sigma_min={sampler['sigma_min']} must be below sigma_max={sampler['sigma_max']}")
    return EDM(**own, sampler=HeunSampler(**sampler))


def check_loss(settings: schema.Diffusion) -> None:
    """Raises UserError for a diffusion that cannot be trained."""
    if settings.name == "ddpm":
        raise UserError(
            "diffusion=ddpm is for sampling from imported weights (kind=dit) and has no loss to train with; train with "
            "diffusion=edm or diffusion=sit, from the start or from weights of the same diffusion"
        )


def build_guidance(settings: schema.Guidance) -> guidance.Guidance:
    """guidance.* as a function of what a batch has, `guidance.GuidanceInputs`; autoguidance's second network is among that."""
    return partial(guidance.GUIDANCES[settings.name], **settings.model_dump(exclude={"name", "checkpoint", "weights"}))


def with_scale(settings: schema.Guidance, cfg_scale: float | None) -> schema.Guidance:
    """cfg_scale is guidance.cfg_scale by its short name."""
    if cfg_scale is None:
        return settings
    if not hasattr(settings, "cfg_scale"):
        raise UserError(
            f"cfg_scale={cfg_scale:g} needs guidance=cfg or guidance=interval, not guidance={settings.name}"
            + (f"; its own scale is guidance.w={settings.w:g}" if hasattr(settings, "w") else "")
        )
    return settings.model_copy(update={"cfg_scale": cfg_scale})


def check_guidance(settings: schema.Guidance, run_cfg: schema.TrainConfig, diffusion: Diffusion) -> None:
    """Compare guidance.* with the run that it is to guide; `diffusion` has the sampler that is to be used.

    Raises:
        UserError: the null class was never trained; more channels than the latents have; an interval outside the sampler's
            noise levels, or between them; two branches of sparse guidance that keep the same number of tokens.
    """
    scale = getattr(settings, "cfg_scale", 1.0)
    if scale != 1 and run_cfg.model.class_dropout == 0:
        raise UserError(
            f"guidance={settings.name} with cfg_scale={scale:g} needs the null class, which was never trained: the run has "
            "model.class_dropout=0. Use guidance=none, or guidance=sparse, which keeps the label"
        )
    if settings.name == "sparse":
        num_tokens = _grid_size(run_cfg) ** 2
        strong, weak = (num_kept_tokens(num_tokens, ratio) for ratio in (settings.r_strong, settings.r_weak))
        if strong == weak:
            raise UserError(
                f"guidance.r_strong={settings.r_strong} and guidance.r_weak={settings.r_weak} both keep {weak} of the "
                f"{num_tokens} tokens of {run_cfg.model.backbone}, so that there is nothing to guide by; raise guidance.r_weak"
            )
    channels = getattr(settings, "channels", None)
    if channels is not None and channels > run_cfg.data.in_channels:
        raise UserError(
            f"guidance.channels={channels}, but the latents have {run_cfg.data.in_channels} channels; give at most as many, or "
            "guidance.channels=null for all"
        )
    levels = diffusion.sampler.evaluated_levels()
    low, high = getattr(settings, "level_lo", None), getattr(settings, "level_hi", None)
    symbol = {"edm": "sigma", "sit": "t", "ddpm": "t"}[run_cfg.diffusion.name]
    sampler = f"the sampler of diffusion={run_cfg.diffusion.name}, whose {symbol} goes from {levels[0]:g} to {levels[-1]:.3g}"
    top = levels[0] * (1 + 1e-6)  # levels are rounded to float32 when they are compared
    for key, value in (("level_lo", low), ("level_hi", high)):
        if value is not None and value > top:
            raise UserError(f"guidance.{key}={value:g} is outside {sampler}; give {symbol} within it")
    if not any((low is None or low < level) and (high is None or level <= high * (1 + 1e-6)) for level in levels):
        raise UserError(
            f"guidance.level_lo={low} and guidance.level_hi={high} hold none of the {len(levels)} noise levels of {sampler}; "
            "widen the interval, or raise num_steps"
        )


def warn_of_guidance(settings: schema.Guidance, run_cfg: schema.TrainConfig) -> None:
    """Say where a guidance is not likely to do what it is for."""
    if settings.name == "sparse" and not any(route["selection_ratio"] > 0 for route in run_cfg.model.routes):
        log.warning(
            "guidance=sparse on a network that was trained without routes: it never saw a part of its tokens skip, so that the "
            "branch of r_weak is not a weaker version of it but a broken one, and the images are likely to be worse than "
            "with guidance=none or cfg. The tokens skip blocks %s to %s",
            DEFAULT_ROUTE.start_layer_idx,
            DEFAULT_ROUTE.end_layer_idx,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Alignment.


def check_alignment(cfg: schema.TrainConfig, dataset: Dataset) -> None:
    """Compare alignment.* with network and data.

    Raises:
        UserError: a block that is not there; latents without images or features; features that are not of the tokens.
    """
    settings = cfg.alignment
    if not _is_aligned(cfg):
        return
    depth = schema.BACKBONES[cfg.model.backbone][0]
    if settings.block > depth:
        raise UserError(
            f"alignment.block={settings.block} is beyond the {depth} blocks of {cfg.model.backbone}; give 1 to {depth}"
        )
    if not dataset.has_images:
        raise UserError(
            f"alignment.encoder={settings.encoder} needs the images of the latents, and {dataset.path} holds none; make other "
            f"shards: {_command_for_alignment(cfg, dataset.info)}"
        )
    elif settings.encoder == DigitsEncoder.name and dataset.info.resolution != (own := DigitsEncoder.resolution):
        raise UserError(
            f"alignment.encoder=digits sees images of {own}x{own} pixels, and those of {dataset.path} have "
            f"{dataset.info.resolution}; use alignment.encoder={EXAMPLE}"
        )


def _is_aligned(cfg: schema.TrainConfig) -> bool:
    return cfg.alignment.name != "none" and cfg.alignment.weight > 0


def _command_for_alignment(cfg: schema.TrainConfig, info: ShardInfo) -> str:
    """The command that makes shards for alignment.*, and what it takes to do without the images."""
    own = "" if info.autoencoder == "none" else f" autoencoder={info.autoencoder}"
    return (
        f"python prepare_latents.py encode images=<folder of images> output=<another folder>{own} resolution={info.resolution} "
        f"keep_images=jpeg; or set alignment=none"
    )


def build_alignment(cfg: schema.TrainConfig, dataset: LatentDataset, accelerator: Accelerator) -> Alignment | None:
    """alignment.* after `check_alignment`, its encoder on this process's device; None: without."""
    settings = cfg.alignment
    if not _is_aligned(cfg):
        return None
    options = {"tap": settings.block, "weight": settings.weight, "stop_step": settings.stop_step}
    precision = "fp32" if cfg.train.precision == "fp32" else "bf16"
    key = "alignment.encoder"
    encoder = build_encoder(settings.encoder, settings.weights, _grid_size(cfg), accelerator, precision, key)
    options |= {"encoder": encoder.weights_hash, "encoder_bytes": sum(p.nbytes for p in encoder.net.parameters())}
    encode, fetch, encoder_width = lambda images: encoder.encode(images)[1], dataset.fetch_with_images, encoder.width
    with torch.random.fork_rng(devices=[]):  # whatever random numbers the encoder has taken
        torch.manual_seed(2**32 + cfg.seed)  # no seed of a run
        width = schema.BACKBONES[cfg.model.backbone][1]
        projector = Projector(width, settings.projector_width, encoder_width)
    return Alignment(projector, encode, fetch, **options)


def build_encoder(
    name: str, weights: str | None, grid: int, accelerator: Accelerator, precision: str, key: str
) -> Encoder | DigitsEncoder:
    """The encoder of alignment, with `grid` patches along one side of an image. Raises UserError where it cannot be had.

    Args:
        precision: fp32 | bf16.
        key: that gave `name`, for the messages; that of the weights is derived from it.
    """
    weights_key = "alignment.weights" if key == "alignment.encoder" else f"{key}_weights"
    if name == DigitsEncoder.name:
        if weights is not None or grid != DigitsEncoder.grid:
            found, own = f"{weights_key}={weights}" if weights is not None else f"{grid}x{grid} tokens", DigitsEncoder.grid
            raise UserError(
                f"{key}=digits has weights of its own and {own}x{own} patches, which do not fit {found}; it is for "
                "data=digits with patches of 2 pixels (model.backbone=DiT-XS/2)"
            )
        return DigitsEncoder(accelerator.device)
    patch = re.search(r"_patch(\d+)_", name)
    if patch is None:
        raise UserError(f"{key}={name} has no patches of a known size (_patch<N>_) in its name; use {EXAMPLE}")
    size = int(patch[1]) * grid
    # As REPA shows images to its encoder: bicubic without antialias.
    how = dict(antialias=False, precision=precision, key=weights_key)
    with accelerator.local_main_process_first():  # one process of a machine downloads, the others find the file
        return Encoder(name, weights, size, accelerator.device, **how)


# ----------------------------------------------------------------------------------------------------------------------
# The run.


def check_batch_size(cfg: schema.TrainConfig, num_processes: int) -> None:
    """Raises UserError where the global batch cannot be cut into equal parts."""
    parts = num_processes * cfg.train.grad_accum_steps
    if cfg.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={cfg.train.batch_size} does not divide by {num_processes} processes x "
            f"train.grad_accum_steps={cfg.train.grad_accum_steps} = {parts} parts"
        )


def check_parallel(train: schema.Train, num_processes: int, launched_as: str) -> None:
    """Raises UserError where train.parallel cannot be had with these processes, accelerate's distributed_type and this torch."""
    if launched_as in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UserError(
            f"accelerate was launched with {launched_as}, which this trainer does not use; launch it without, and set "
            "train.parallel=fsdp to shard weights and states"
        )
    if train.parallel == "ddp":
        if train.fsdp_shard == "node":
            raise UserError("train.fsdp_shard=node is not accepted with train.parallel=ddp; add train.parallel=fsdp")
        return
    if num_processes == 1:
        raise UserError(
            "train.parallel=fsdp cuts weights and states into a part for each process, and there is one process; "
            "start more (accelerate launch --multi_gpu --num_processes 2 train.py ...), or set train.parallel=ddp"
        )
    if train.compile not in ("auto", "none", "blocks"):
        raise UserError(
            f"train.compile={train.compile} is not accepted with train.parallel=fsdp, which gathers the weights of every "
            "block between them; use none | blocks | auto"
        )
    if not torch.distributed.is_available() or torch.__version__ < (2, 11):
        raise UserError(
            f"train.parallel=fsdp needs torch 2.11 or newer, built with torch.distributed; this is torch {torch.__version__}; "
            "install it, or set train.parallel=ddp"
        )
    per_node = processes_per_node(num_processes)
    if train.fsdp_shard == "node" and (per_node == 1 or num_processes % per_node):
        raise UserError(
            f"train.fsdp_shard=node shards over the processes of a node, at least two and as many on every node; here are "
            f"{num_processes} processes in all and {per_node} on this node; use train.fsdp_shard=all"
        )


def check_initial(stored: schema.TrainConfig, step: int, cfg: schema.TrainConfig, imported_from: str | None = None) -> None:
    """Compare the checkpoint that init_from names (`stored`, `step`) with the run that is to start from it.

    Routes may differ: they have no weights. Raises UserError with the keys that differ; with init_state=all, also when no step
    is left to do, and for imported weights, which have no optimizer.
    """
    if cfg.init_state == "all" and imported_from:
        raise UserError(
            f"init_from={cfg.init_from} with init_state=all needs an optimizer, and weights imported from {imported_from} have "
            "none; set init_state=weights"
        )
    if cfg.init_state == "all" and (
        changed := [line for line in schema.differences(stored, cfg, [schema.Role.FIXED]) if line.startswith("alignment.")]
    ):
        raise UserError(
            f"init_from={cfg.init_from} with init_state=all goes on with the optimizer of its projector: {'; '.join(changed)}. "
            "Set these keys to the first values, or set init_state=weights"
        )
    if changed := schema.differences(stored, cfg, [schema.Role.ARCHITECTURE]):
        raise UserError(
            f"init_from={cfg.init_from}: its weights are of another architecture: {'; '.join(changed)}. Set these keys to the "
            "first values, or start from another checkpoint"
        )
    if cfg.init_state == "all" and step >= cfg.train.num_steps:
        raise UserError(
            f"init_from={cfg.init_from} with init_state=all goes on from step {step}, which leaves nothing to do for "
            f"train.num_steps={cfg.train.num_steps}; raise it, or set init_state=weights"
        )


def check_resume(stored: schema.TrainConfig, cfg: schema.TrainConfig, checkpoint: Path) -> None:
    """Compare a checkpoint with the run that is to go on from it; log what may change and did.

    Raises UserError with the keys that differ, if they make it a checkpoint of another run.
    """
    if changed := schema.differences(stored, cfg, schema.SAME_RUN):
        raise UserError(
            f"resume: {checkpoint} cannot go on under this configuration: {'; '.join(changed)}. "
            "Restore these settings, or start another run with name=..."
        )
    for line in schema.differences(stored, cfg, [schema.Role.NOTED]):
        log.warning("resumed with another setting: %s", line)


# ----------------------------------------------------------------------------------------------------------------------
# Looking at samples.


def build_autoencoder(cfg: schema.TrainConfig, device: torch.device) -> autoencoders.Autoencoder:
    try:
        return autoencoders.build(cfg.data.autoencoder, device, cfg.data.in_channels)
    except UserError as e:
        raise UserError(f"{e}; or train without looking at samples: sample.every=0 eval.every=0") from e


def build_detectors(settings: schema.DetectorSettings, accelerator: Accelerator) -> list[Detector]:
    """What evaluation.* asks for, on this process's device. Raises UserError where the weights cannot be had."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def _build_detector(name: str, settings: schema.DetectorSettings, accelerator: Accelerator) -> Detector:
    how = (accelerator.device, settings.precision, settings.compile)
    if name == DigitsDetector.name:
        return DigitsDetector(accelerator.device)
    if set_of(name):
        if settings.weights is None:
            raise UserError(f"evaluation.detector={name} needs evaluation.weights=<its file>; make it: {MAKE}")
        return SmallDetector(name, settings.weights, accelerator.device)
    if name == DINOv2Detector.name:
        with accelerator.local_main_process_first():  # one process of a machine downloads, the others find the file
            weights = find_encoder_weights(DINOV2, settings.dinov2_weights, "evaluation.dinov2_weights")
        return DINOv2Detector(weights, *how)
    with accelerator.local_main_process_first():
        weights = settings.weights or fetch_weights(accelerator.is_local_main_process)
    return InceptionDetector(weights, *how)


def open_reference(path: str | None, key: str, detectors: Sequence[str]) -> ImageSet:
    """The reference that `key` names, for detectors by name."""
    if path is None:
        raise UserError(
            f"{key} is not set: give a reference batch, VIRTUAL_imagenet256_labeled.npz of ADM's evaluation suite, say, or a "
            "folder of images"
        )
    if not (Path(path).is_dir() or Path(path).is_file()):
        found = "is not a file" if Path(path).exists() else "does not exist"
        adm = "https://github.com/openai/guided-diffusion/tree/main/evaluations"
        raise UserError(
            f"{key}={path} {found}; reference batches are at {adm}, and `prepare_latents.py reference` makes one of "
            "images of your own"
        )
    images = open_images(path)
    for name in detectors:  # before their weights are downloaded
        check_reference(images, name)
    return images
