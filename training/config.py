"""The accepted keys and values of every configuration, and the objects that are built from one.

A configuration is checked before any work: an unknown key, a missing key or a wrong value raises a ValueError that names
the key and says what is accepted.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

import dit
import guidance
from edm import EDM
from edm.sampler import HeunSampler
from latents.shards import KINDS, LatentDataset
from latents.webdataset import TarLatents
from routing_module import Route, num_kept_tokens
from sit import SiT
from sit.diffusion import TIMESTEPS
from sit.sampler import DIFFUSION_FORMS, LAST_STEPS, SOLVERS, FlowSampler

Diffusion = EDM | SiT

log = logging.getLogger(__name__)

# TREAD's (section 4), for sparse guidance of a network that has none of its own.
DEFAULT_ROUTE = Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-4)

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = str(REPOSITORY / "configs")
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
OmegaConf.register_new_resolver("folder_name", lambda name: name.replace("/", "_"), replace=True)


# ----------------------------------------------------------------------------------------------------------------------
# What a value may be: a test, and the words for it.


@dataclass(frozen=True)
class Accepts:
    test: Callable[[object], bool]
    words: str


def choice(*values: str) -> Accepts:
    return Accepts(lambda v: v in values and isinstance(v, str), " | ".join(values))


def whole(minimum: int) -> Accepts:
    def test(v):
        return isinstance(v, int) and not isinstance(v, bool) and v >= minimum

    return Accepts(test, f"a whole number of at least {minimum}")


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False, below: bool = False) -> Accepts:
    """A number in [low, high]; `above` and `below` leave out the bound itself."""

    def test(v):
        if isinstance(v, bool) or not isinstance(v, (int, float)) or math.isnan(v):
            return False
        return (v > low if above else v >= low) and (v < high if below else v <= high)

    if math.isinf(low) and math.isinf(high):
        return Accepts(lambda v: test(v) and math.isfinite(v), "a number")
    return Accepts(test, f"a number in {'(' if above else '['}{low}, {high}{')' if below or math.isinf(high) else ']'}")


def text() -> Accepts:
    return Accepts(lambda v: isinstance(v, str) and v != "", "text")


def file_name() -> Accepts:
    def test(v):
        if isinstance(v, int) and not isinstance(v, bool):
            return True  # name=2024
        return isinstance(v, str) and v not in ("", ".", "..") and not set(v) & set("/\\")

    return Accepts(test, "the name of a folder, without slashes")


def true_or_false() -> Accepts:
    return Accepts(lambda v: isinstance(v, bool), "true | false")


def or_null(accepts: Accepts) -> Accepts:
    return Accepts(lambda v: v is None or accepts.test(v), f"{accepts.words}, or null")


def one_or_list(accepts: Accepts) -> Accepts:
    def test(v):
        entries = v if isinstance(v, list) else [v]
        return len(entries) > 0 and all(accepts.test(entry) for entry in entries)

    return Accepts(test, f"{accepts.words}, or a list of them")


def _is_autoencoder(v) -> bool:
    return v in ("identity", "none") or (isinstance(v, str) and v.startswith("sd-vae:") and v != "sd-vae:")


def _is_betas(v) -> bool:
    return isinstance(v, list) and len(v) == 2 and all(number(0, 1, below=True).test(b) for b in v)


def _is_scales(v) -> bool:
    return isinstance(v, list) and len(v) > 0 and all(number().test(scale) for scale in v) and len(set(v)) == len(v)


def _is_experiment(v) -> bool:
    if not isinstance(v, dict) or v.keys() != {"name", "table", "paper", "source", "differs", "baseline"}:
        return False
    texts = [v[key] for key in ("name", "table", "source")] + [v[key] for key in ("differs", "baseline") if v[key] is not None]
    return all(text().test(entry) for entry in texts) and all(number().test(value) for value in v["paper"].values())


def _is_routes(v) -> bool:
    # The values inside are checked by the router, which knows the depth.
    return isinstance(v, list) and all(isinstance(r, dict) and r.keys() == Route.__dataclass_fields__.keys() for r in v)


def _is_numbers(v) -> bool:
    try:
        return len(parse_numbers(v)) > 0
    except ValueError:
        return False


def parse_numbers(spec: str | int | list) -> list[int]:
    """`0-3`, `[0-3,7]` -> [0, 1, 2, 3, 7]. Raises ValueError for anything else, and for a number that is named twice."""
    numbers = []
    entries = spec if isinstance(spec, (list, ListConfig)) else [spec]
    wrong = ValueError(f"{spec!r} is not a list of numbers and ranges such as [0-3,7]")
    for part in ",".join(map(str, entries)).split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or (part.strip().endswith("-")):
            raise wrong
        if int(last or first) < int(first):
            raise wrong
        numbers.extend(range(int(first), int(last or first) + 1))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{spec!r} names a number twice")
    return numbers


NUMBERS = Accepts(_is_numbers, "numbers and ranges such as 0-49 or [3,7,100-199], none of them twice")


AUTOENCODER = Accepts(_is_autoencoder, "identity | none | sd-vae:<hub id or folder>")


# ----------------------------------------------------------------------------------------------------------------------
# The keys.

LEVEL = number(0, below=True)
BOUND = Accepts(LEVEL.test, "a noise level: sigma for diffusion=edm (0.28 to 2.9, say), t for diffusion=sit (0.22 to 0.74, say)")

# What each guidance takes; guidance.name is added to it.
GUIDANCE_KEYS = {
    "none": {},
    "cfg": {"cfg_scale": number()},
    "interval": {"cfg_scale": number(), "level_lo": BOUND, "level_hi": BOUND},
    "sparse": {
        "w": number(),
        "r_strong": number(0, 1, below=True),
        "r_weak": number(0, 1, below=True),
        "subset": choice(*guidance.SUBSETS),
        "level_lo": or_null(LEVEL),
        "level_hi": or_null(LEVEL),
    },
    "autoguidance": {
        "checkpoint": Accepts(text().test, "the folder of a checkpoint or of a run: guidance.checkpoint=runs/<name>"),
        "weights": choice("ema", "raw"),
        "w": number(),
        "level_lo": or_null(LEVEL),
        "level_hi": or_null(LEVEL),
    },
}
# For fid.py, which sweeps over lists.
GUIDANCE_SWEEP_KEYS = {name: {key: one_or_list(accepts) for key, accepts in keys.items()} for name, keys in GUIDANCE_KEYS.items()}

SAMPLER_KEYS = {
    "edm": {
        "num_steps": whole(1),
        "sigma_min": number(0, above=True),
        "sigma_max": number(0, above=True, below=True),
        "rho": number(0, above=True, below=True),
        "S_churn": number(0, below=True),
        "S_min": number(0),
        "S_max": number(0),
        "S_noise": number(0, below=True),
    },
    "sit": {
        "num_steps": whole(1),
        "solver": choice(*SOLVERS),
        "diffusion_form": choice(*DIFFUSION_FORMS),
        "diffusion_norm": number(0, below=True),
        "last_step_size": number(0, 1, above=True, below=True),
        "last_step": choice(*LAST_STEPS),
    },
}
# What each diffusion takes; diffusion.name is added to it.
DIFFUSION_KEYS = {
    "edm": {
        "sigma_data": number(0, above=True, below=True),
        "P_mean": number(),
        "P_std": number(0, above=True, below=True),
        **{f"sampler.{key}": accepts for key, accepts in SAMPLER_KEYS["edm"].items()},
    },
    "sit": {
        "timestep": choice(*TIMESTEPS),
        "logit_mean": number(),
        "logit_std": number(0, above=True, below=True),
        **{f"sampler.{key}": accepts for key, accepts in SAMPLER_KEYS["sit"].items()},
    },
}
# What sample.py may set on the sampler of a run; a setting that the run's diffusion does not have is refused.
SAMPLER_OVERRIDES = {
    key: accepts
    for keys in SAMPLER_KEYS.values()
    for key, accepts in keys.items()
    if key not in ("sigma_min", "sigma_max", "rho")  # they define EDM's schedule
}

DETECTOR_KEYS = {
    "detector": choice("inception", "digits"),
    "weights": or_null(text()),
    "precision": choice("fp32", "bf16"),
    "compile": true_or_false(),
}

# Of a network: training.engine.compile_network.
COMPILE = choice("none", "blocks", "default", "reduce-overhead", "max-autotune")

TRAIN_KEYS = {
    "name": file_name(),
    "output_dir": text(),
    "experiment": or_null(Accepts(_is_experiment, "one of configs/experiment/ (name, table, paper, source, differs, baseline)")),
    "seed": whole(0),
    "resume": text(),
    "init_from": or_null(text()),
    "init_state": choice("weights", "all"),
    "model.name": choice("dit", "tread"),
    "model.backbone": choice(*dit.BACKBONES),
    "model.routes": Accepts(_is_routes, f"a list of routes, each with {', '.join(Route.__dataclass_fields__)}"),
    "model.fp32_after_route": true_or_false(),
    "model.class_dropout": number(0, 1, below=True),
    "model.learn_sigma": true_or_false(),
    "model.init": choice(*dit.INITS),
    "data.name": file_name(),
    "data.path": or_null(text()),
    "data.format": choice("native", "webdataset"),
    "data.kind": or_null(choice(*KINDS)),
    "data.stored_scale": or_null(number(0, above=True, below=True)),
    "data.scale_factor": or_null(number(0, above=True, below=True)),
    "data.resolution": or_null(whole(1)),
    "data.allow_pickle": true_or_false(),
    "data.autoencoder": or_null(AUTOENCODER),
    "data.in_channels": or_null(whole(1)),
    "data.input_size": or_null(whole(1)),
    "data.num_classes": or_null(whole(1)),
    "data.num_workers": whole(0),
    "diffusion.name": choice(*DIFFUSION_KEYS),
    "train.num_steps": whole(1),
    "train.batch_size": whole(1),
    "train.grad_accum_steps": whole(1),
    "train.lr": number(0, above=True, below=True),
    "train.betas": Accepts(_is_betas, "two numbers in [0, 1)"),
    "train.weight_decay": number(0, below=True),
    "train.grad_clip_norm": or_null(number(0, above=True, below=True)),
    "train.ema_decay": number(0, 1, below=True),
    "train.precision": choice("fp32", "bf16", "fp8"),
    "train.attention": choice("auto", "flash", "cudnn", "efficient", "math"),
    "train.parallel": choice("ddp", "fsdp"),
    "train.compile": COMPILE,
    "train.activation_checkpointing": choice("none", "blocks", "selective"),
    "train.cpu_threads": or_null(whole(1)),
    "train.log_every": whole(1),
    "checkpoint.every": whole(1),
    "checkpoint.keep_last": whole(1),
    "checkpoint.keep_every": whole(0),
    "sample.every": whole(0),
    "sample.num_samples": whole(1),
    "sample.batch_size": whole(1),
    "eval.every": whole(0),
    "eval.num_samples": whole(1),
    "eval.cfg_scales": Accepts(_is_scales, "a list of different numbers, such as [1.0, 1.5]"),
    "eval.num_steps": or_null(whole(1)),
    "eval.batch_size": whole(1),
    **{f"evaluation.{key}": accepts for key, accepts in DETECTOR_KEYS.items()},
    "evaluation.reference": or_null(text()),
    "wandb.mode": choice("disabled", "offline", "online"),
    "wandb.project": text(),
}

SAMPLE_KEYS = {
    "checkpoint": Accepts(text().test, "the folder of a checkpoint or of a run: checkpoint=runs/<name>"),
    "output": or_null(text()),
    "weights": choice("ema", "raw"),
    "autoencoder": or_null(AUTOENCODER),
    "seeds": NUMBERS,
    "classes": or_null(NUMBERS),
    "cfg_scale": or_null(number()),
    "batch_size": whole(1),
    "precision": choice("fp32", "bf16"),
    "compile": COMPILE,
    "cpu_threads": or_null(whole(1)),
    "npz": true_or_false(),
    **{key: or_null(accepts) for key, accepts in SAMPLER_OVERRIDES.items()},
}


FID_KEYS = {
    "checkpoint": or_null(one_or_list(text())),
    "checkpoints": or_null(text()),
    "images": or_null(text()),
    "reference": or_null(text()),
    "output": or_null(text()),
    "num_samples": or_null(whole(1)),
    "weights": one_or_list(choice("ema", "raw")),
    "autoencoder": or_null(AUTOENCODER),
    "cfg_scale": or_null(one_or_list(number())),
    "num_steps": or_null(one_or_list(whole(1))),
    "S_churn": or_null(one_or_list(SAMPLER_OVERRIDES["S_churn"])),
    "solver": or_null(one_or_list(SAMPLER_OVERRIDES["solver"])),
    "batch_size": whole(1),
    "precision": choice("fp32", "bf16"),
    "compile": COMPILE,
    "cpu_threads": or_null(whole(1)),
    "convert_to_rgb": true_or_false(),
    **{f"evaluation.{key}": accepts for key, accepts in DETECTOR_KEYS.items()},
    "evaluation.detector": or_null(DETECTOR_KEYS["detector"]),
}


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested dictionaries -> {"train.lr": 1e-4, ...}; lists are values, and so is `experiment`, which only says what a run is."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check(cfg: DictConfig, keys: dict[str, Accepts], guidance_keys: dict[str, dict[str, Accepts]] = GUIDANCE_KEYS) -> DictConfig:
    """Check every key and value, and return the configuration with its interpolations resolved.

    Args:
        keys: TRAIN_KEYS, SAMPLE_KEYS or FID_KEYS; those of the chosen diffusion and guidance are added here.
        guidance_keys: GUIDANCE_KEYS, or GUIDANCE_SWEEP_KEYS where lists are accepted.

    Raises:
        ValueError: naming the key, the value and what is accepted.
    """
    config = OmegaConf.to_container(cfg, resolve=True)
    flat = flatten(config)
    keys = keys | _keys_of_choice(flat, "guidance", guidance_keys)
    if "diffusion.name" in keys:
        keys |= _keys_of_choice(flat, "diffusion", DIFFUSION_KEYS)
    check_keys(flat, keys)
    for settings in combinations(config["guidance"]):
        _check_order(settings, "level_lo", "level_hi", "level_hi=null leaves it open" if settings["name"] != "interval" else "")
        _check_order(settings, "r_strong", "r_weak", "the strong branch skips fewer tokens; r_strong=0 is the dense network")
    return OmegaConf.create(config)


def check_keys(flat: dict[str, object], keys: dict[str, Accepts]) -> None:
    """Raises ValueError where a key is unknown or missing, or a value is not accepted."""
    for key in flat:
        if key not in keys:
            raise ValueError(unknown_key(key, keys))
    for key, accepts in keys.items():
        if key not in flat:
            raise ValueError(f"{key} is missing; it accepts {accepts.words}")
        if not accepts.test(flat[key]):
            raise ValueError(f"{key}={flat[key]!r} is not accepted; use {accepts.words}")


def _keys_of_choice(flat: dict[str, object], group: str, table: dict[str, dict[str, Accepts]]) -> dict[str, Accepts]:
    """The keys of the member of `group` that the configuration chooses.

    Raises:
        ValueError: it is none of the table's.
    """
    name, accepts_name = flat.get(f"{group}.name"), choice(*table)
    if not accepts_name.test(name):
        raise ValueError(f"{group}.name={name!r} is not accepted; use {accepts_name.words}")
    return {f"{group}.name": accepts_name} | {f"{group}.{key}": accepts for key, accepts in table[name].items()}


def _check_order(settings: dict[str, object], low: str, high: str, hint: str) -> None:
    if settings.get(low) is not None and settings.get(high) is not None and not settings[low] < settings[high]:
        raise ValueError(
            f"guidance.{low}={settings[low]} must be below guidance.{high}={settings[high]}{f' ({hint})' if hint else ''}"
        )


def combinations(settings: DictConfig | dict) -> list[dict]:
    """{a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}]: every choice of one entry from each list."""
    entries = [list(v) if isinstance(v, (list, ListConfig)) else [v] for v in settings.values()]
    return [dict(zip(settings, chosen)) for chosen in itertools.product(*entries)]


def unknown_key(key: str, keys: dict[str, Accepts]) -> str:
    """The message for a key that does not exist: the nearest ones, or those beside it."""
    group, _, own = key.partition(".")
    choices = {"diffusion": DIFFUSION_KEYS, "guidance": GUIDANCE_KEYS}.get(group, {})
    owners = [name for name, table in choices.items() if own in table]
    if owners:
        return f"{key} is not a key of this {group}; it belongs to {' and '.join(f'{group}={name}' for name in owners)}"
    if not any(k.startswith(f"{group}.") and k != f"{group}.name" for k in keys):  # which of them is chosen is not known yet
        keys = dict.fromkeys([*keys, *(f"{group}.{k}" for table in choices.values() for k in table)])
    near = difflib.get_close_matches(key, keys, n=3, cutoff=0.75)
    group = key.rpartition(".")[0]
    beside = near or [k for k in keys if k.rpartition(".")[0] == group] or list(keys)
    return f"{key} is not a key of the configuration; accepted: {', '.join(beside)}"


# ----------------------------------------------------------------------------------------------------------------------
# From a checked configuration to the objects.


def open_data(cfg: DictConfig) -> LatentDataset | TarLatents:
    """Open the latents, compare them with what the configuration expects, and fill in what it leaves to them.

    Raises:
        ValueError: no latents, a bad file, or other shapes, classes, kind or scale than data.* says.
    """
    data = cfg.data
    if data.path is None:
        raise ValueError(f"data.path is not set: give the folder that holds the latent shards (*.safetensors) of {data.name}")
    if not Path(data.path).exists():
        raise ValueError(f"data.path={data.path} does not exist; to make it: {making(data)}, or give another data.path=")
    if data.format == "webdataset":
        # What the shards of the native format say in their headers, tars leave to the reader.
        dataset = open_latents(
            data.path,
            data.format,
            kind=data.kind,
            stored_scale=data.stored_scale,
            scale_factor=data.scale_factor,
            autoencoder=data.autoencoder,
            resolution=data.resolution,
            num_classes=data.num_classes,
            allow_pickle=data.allow_pickle,
        )
    else:
        dataset = open_latents(data.path, data.format)
        if data.stored_scale is not None:
            raise ValueError(
                f"data.stored_scale={data.stored_scale} is for data.format=webdataset; native shards hold unscaled latents"
            )
    info = dataset.info
    if dataset.height != dataset.width:
        raise ValueError(f"{dataset.path}: latents of {dataset.height}x{dataset.width} are not square")
    expected, found = data.in_channels, dataset.channels
    if expected is not None and expected != found:
        hint = ""
        if info.kind == "sample" and found == 2 * expected:
            hint = "; they look like moments (mean and log-variance) written as kind=sample: rewrite the shards with kind=moments"
        raise ValueError(f"data.in_channels={expected}, but the latents of {dataset.path} have {found} channels{hint}")
    for key, found in (
        ("input_size", dataset.height),
        ("num_classes", info.num_classes),
        ("kind", info.kind),
        ("scale_factor", info.scale_factor),
        ("resolution", info.resolution),
    ):
        if data[key] is not None and data[key] != found:
            raise ValueError(
                f"data.{key}={data[key]}, but the latents of {dataset.path} say {found}; "
                f"set data.{key}={found} or choose other data"
            )
    data.in_channels, data.input_size, data.num_classes = dataset.channels, dataset.height, info.num_classes
    data.autoencoder = data.autoencoder or info.autoencoder
    data.kind, data.scale_factor = info.kind, info.scale_factor
    return dataset


def making(data: DictConfig) -> str:
    """The command that makes the latents of data.*."""
    if data.name == "digits":
        return f"python prepare_latents.py digits output={data.path}"
    if data.autoencoder == "none":  # one that is not here: its project has made the latents
        source = f"path=<latents as its project stores them> output={data.path} autoencoder=none"
        return f"python prepare_latents.py convert {source} resolution={data.resolution or '<of the images>'}"
    size = "" if data.input_size in (None, 32) else f" resolution={8 * data.input_size}"
    return f"accelerate launch prepare_latents.py encode images=<folder of images> output={data.path}{size}"


def unknown_choice(choice: str, options: list[str]) -> str:
    """The message for a choice that a group does not have.

    Args:
        choice: group/name, as Hydra looked for it.
        options: that Hydra found beside it; none where the choices are in folders of their own.
    """
    group, _, name = choice.partition("/")
    if not options:
        files = sorted((Path(CONFIGS) / group).rglob("*.yaml"))
        known = [file.relative_to(Path(CONFIGS) / group).with_suffix("").as_posix() for file in files]
        known = [one for one in known if not one.startswith("base/")]  # what experiments share
        options = difflib.get_close_matches(name, known, n=5) or known
    return f"{group}={name} is not a choice; accepted: {', '.join(options)}"


def open_latents(path: str | Path, format: str, **settings) -> LatentDataset | TarLatents:
    """Latents on disk, to be read by index.

    Args:
        format: `native` or `webdataset`.
        settings: of TarLatents.
    """
    return TarLatents(path, **settings, key_prefix="data.") if format == "webdataset" else LatentDataset(path)


def check_batch_size(cfg: DictConfig, num_processes: int) -> None:
    parts = num_processes * cfg.train.grad_accum_steps
    if cfg.train.batch_size % parts:
        raise ValueError(
            f"train.batch_size={cfg.train.batch_size} does not divide by {num_processes} processes x "
            f"train.grad_accum_steps={cfg.train.grad_accum_steps} = {parts} parts"
        )


def check_parallel(cfg: DictConfig, num_processes: int, launched_as: str) -> None:
    """Whether train.parallel can be had with these processes and this torch.

    Args:
        launched_as: accelerate's distributed_type.

    Raises:
        ValueError: naming the key and what is accepted.
    """
    if launched_as in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"accelerate was launched with {launched_as}, which this trainer does not use; launch it without, and set "
            "train.parallel=fsdp to shard weights and states"
        )
    if cfg.train.parallel == "ddp":
        return
    if num_processes == 1:
        raise ValueError(
            "train.parallel=fsdp cuts weights and states into a part for each process, and there is one process; "
            "start more (accelerate launch --multi_gpu --num_processes 2 train.py ...), or set train.parallel=ddp"
        )
    if cfg.train.compile not in ("none", "blocks"):
        raise ValueError(
            f"train.compile={cfg.train.compile} is not accepted with train.parallel=fsdp, which gathers the weights of every "
            "block between them; use none | blocks"
        )
    if not torch.distributed.is_available() or torch.__version__ < (2, 11):
        raise ValueError(
            f"train.parallel=fsdp needs torch 2.11 or newer, built with torch.distributed; this is torch {torch.__version__}; "
            "install it, or set train.parallel=ddp"
        )


def build_network(cfg: DictConfig) -> dit.DiT:
    """The network of a configuration whose data.in_channels, input_size and num_classes are filled in."""
    model = cfg.model
    return dit.build(
        model.backbone,
        input_size=cfg.data.input_size,
        in_channels=cfg.data.in_channels,
        num_classes=cfg.data.num_classes,
        learn_sigma=model.learn_sigma,
        class_dropout=model.class_dropout,
        routes=[Route(**route) for route in model.routes],
        fp32_after_route=model.fp32_after_route,
        init=model.init,
    )


def build_diffusion(cfg: DictConfig, **sampler_overrides) -> Diffusion:
    """The diffusion of a configuration; `sampler_overrides` that are None change nothing.

    Raises:
        ValueError: an override that the sampler of this diffusion does not have; noise levels in the wrong order.
    """
    diffusion, known = cfg.diffusion, SAMPLER_KEYS[cfg.diffusion.name]
    given = {key: value for key, value in sampler_overrides.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"{key}={value} is not a setting of the sampler of diffusion={diffusion.name}, with which the run was trained; "
                f"leave it out. It has {', '.join(known)}"
            )
    settings = dict(diffusion.sampler) | given
    if diffusion.name == "sit":
        return SiT(diffusion.timestep, diffusion.logit_mean, diffusion.logit_std, FlowSampler(**settings))
    if not settings["sigma_min"] < settings["sigma_max"]:
        raise ValueError(f"diffusion.sampler.sigma_min={settings['sigma_min']} must be below sigma_max={settings['sigma_max']}")
    return EDM(diffusion.sigma_data, diffusion.P_mean, diffusion.P_std, HeunSampler(**settings))


def build_guidance(cfg: DictConfig) -> guidance.Guide:
    """What `guidance=...` asks for, to be given what the network offers. The second network of autoguidance is part of that."""
    settings = {key: value for key, value in cfg.guidance.items() if key not in ("name", "checkpoint", "weights")}
    return partial(guidance.GUIDANCES[cfg.guidance.name], **settings)


def check_initial(stored: DictConfig, step: int, cfg: DictConfig) -> None:
    """Compare the checkpoint that init_from names with the run that is to start from it. Routes may differ: they have no weights.

    Args:
        stored, step: of the checkpoint.
        cfg: of the run, with data.* filled in.

    Raises:
        ValueError: naming the keys that differ; with init_state=all, also when no step is left to do.
    """
    changed = differences(stored, cfg, ARCHITECTURE_KEYS)
    if changed:
        raise ValueError(
            f"init_from={cfg.init_from}: its weights are of another architecture: {'; '.join(changed)}. Set these keys to the "
            "first values, or start from another checkpoint"
        )
    if cfg.init_state == "all" and step >= cfg.train.num_steps:
        raise ValueError(
            f"init_from={cfg.init_from} with init_state=all goes on from step {step}, which leaves nothing to do for "
            f"train.num_steps={cfg.train.num_steps}; raise it, or set init_state=weights"
        )


def check_guidance(settings: DictConfig | dict, run_cfg: DictConfig, diffusion: Diffusion) -> None:
    """Compare a guidance with the run that it is to guide.

    Args:
        settings: guidance.*, without lists.
        run_cfg: the configuration that the network was trained with.
        diffusion: of that run, with the sampler that is to be used.

    Raises:
        ValueError: an interval outside the sampler's noise levels, or between them; two branches of sparse guidance that
            keep the same number of tokens.
    """
    if settings["name"] == "sparse":
        _check_branches(settings, run_cfg)
    levels = diffusion.sampler.evaluated_levels()
    low, high = settings.get("level_lo"), settings.get("level_hi")
    symbol = {"edm": "sigma", "sit": "t"}[run_cfg.diffusion.name]
    sampler = f"the sampler of diffusion={run_cfg.diffusion.name}, whose {symbol} goes from {levels[0]:g} to {levels[-1]:.3g}"
    top = levels[0] * (1 + 1e-6)  # levels are rounded to float32 when they are compared
    for key, value in (("level_lo", low), ("level_hi", high)):
        if value is not None and value > top:
            raise ValueError(f"guidance.{key}={value} is outside {sampler}; give {symbol} within it")
    if not any((low is None or low < level) and (high is None or level <= high * (1 + 1e-6)) for level in levels):
        raise ValueError(
            f"guidance.level_lo={low} and guidance.level_hi={high} hold none of the {len(levels)} noise levels of {sampler}; "
            "widen the interval, or raise num_steps"
        )


def _check_branches(settings: DictConfig | dict, run_cfg: DictConfig) -> None:
    patch_size = dit.BACKBONES[run_cfg.model.backbone][-1]
    num_tokens = (run_cfg.data.input_size // patch_size) ** 2
    strong, weak = (num_kept_tokens(num_tokens, settings[key]) for key in ("r_strong", "r_weak"))
    if strong == weak:
        raise ValueError(
            f"guidance.r_strong={settings['r_strong']} and guidance.r_weak={settings['r_weak']} both keep {weak} of the "
            f"{num_tokens} tokens of {run_cfg.model.backbone}, so that there is nothing to guide by; raise guidance.r_weak"
        )


def warn_of_guidance(settings: DictConfig | dict, run_cfg: DictConfig) -> None:
    """Say where a guidance is not likely to do what it is for. Arguments as for `check_guidance`; lists may stand in them."""
    if settings["name"] == "sparse" and not any(route.selection_ratio > 0 for route in run_cfg.model.routes):
        log.warning(
            "guidance=sparse on a network that was trained without routes: it never saw a part of its tokens skip, so that the "
            "branch of r_weak is not a weaker version of it but a broken one, and the images are likely to be worse than "
            "with guidance=none or cfg. The tokens skip blocks %s to %s",
            DEFAULT_ROUTE.start_layer_idx,
            DEFAULT_ROUTE.end_layer_idx,
        )


# What weights have to share with the run that starts from them: their shapes, and what they are weights of.
ARCHITECTURE_KEYS = (
    "model.backbone",
    "model.learn_sigma",
    "data.in_channels",
    "data.input_size",
    "data.num_classes",
    "data.scale_factor",
    "diffusion.name",
    "diffusion.sigma_data",
)


def differences(stored: DictConfig, current: DictConfig, keys_under: tuple[str, ...]) -> list[str]:
    """`key: stored -> current` for every key that differs and is, or lies below, one of `keys_under`.

    A key that is absent, in a run of an earlier version, is as good as null.
    """
    old, new = (flatten(OmegaConf.to_container(cfg, resolve=True)) for cfg in (stored, current))
    return [
        f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and any(key == k or key.startswith(f"{k}.") for k in keys_under)
    ]
