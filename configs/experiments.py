"""The paper's tables as runs of train.py: `experiment=table2/dit_b2_tread` sets all keys of a row; any key can be overridden.

A row holds what the paper (TREAD, arXiv 2501.04765) reports, and the overrides that train it, as a user would type them. `--cfg
job` prints the whole configuration. To add a row, yield it from the function of its table, or add a function to TABLES.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.settings import GROUPS


@dataclass(frozen=True)
class Row:
    """A row of a table. Its run is named after it and the seed: table2_dit_b2_tread_seed0."""

    name: str
    table: str  # its heading in reports
    source: str  # the paper and table of the figures
    overrides: dict[str, Any]  # choices of groups ("model": "tread") and values of keys ("train.num_steps": 400_000)
    paper: dict[str, float] = field(default_factory=dict)  # the paper's figure for each metric, without guidance
    differs: str | None = None  # differences from the protocol of the figure, beyond docs/faithfulness.md
    baseline: str | None = None  # name of the dense row to compare with
    paper_guided: dict[str, float] = field(default_factory=dict)  # like `paper`, with guidance
    num_samples: int = 50_000  # for the paper's figures

    def to_config(self) -> DictConfig:
        """The row as Hydra would read it from a file."""
        groups = [{f"override /{group}": choice} for group, choice in self.overrides.items() if group in GROUPS]
        about = {key: value for key, value in asdict(self).items() if key != "overrides"}
        run_name = f"{self.name.replace('/', '_')}_seed${{seed}}"
        config = OmegaConf.create({"defaults": [*groups, "_self_"], "name": run_name, "experiment": about})
        for key, value in self.overrides.items():
            if key not in GROUPS:
                OmegaConf.update(config, key, value)
        return config


# Settings that rows share.
IMAGENET_256 = {
    "data": "imagenet256", "data.path": "data/imagenet256",
    "evaluation.reference": "references/VIRTUAL_imagenet256_labeled.npz",
    "train.num_steps": 400_000, "train.batch_size": 256, "train.lr": 1e-4, "train.ema_decay": 0.9999, "train.precision": "bf16",
    "eval.every": 50_000, "eval.num_samples": 5_000,  # for the curve: when is a routed run as good as the dense one?
    "eval.final_num_samples": 50_000, "eval.cfg_scales": [1.0],  # for the paper's figure
}  # fmt: skip
IMAGENET_512 = IMAGENET_256 | {
    "data": "imagenet512", "data.path": "data/imagenet512", "evaluation.reference": "references/VIRTUAL_imagenet512.npz",
    "eval.final_num_samples": 10_000,
}  # fmt: skip
LIGHTNING_DIFFUSION = {  # LightningDiT's loss and sampler; its 250 points are the ends of 249 steps
    "diffusion.timestep": "logit_normal", "diffusion.cosine_weight": 1.0,
    "diffusion.sampler.solver": "euler", "diffusion.sampler.num_steps": 249, "diffusion.sampler.timestep_shift": 0.3,
}  # fmt: skip
LIGHTNING = IMAGENET_256 | LIGHTNING_DIFFUSION | {  # its configs/lightningdit_xl_vavae_f16d32.yaml, which clips no gradients
    "model.backbone": "LightningDiT-XL/1", "diffusion": "sit",
    "data": "custom", "data.name": "vavae_imagenet256", "data.path": "data/vavae_imagenet256",
    "data.in_channels": 32, "data.input_size": 16, "data.num_classes": 1000,
    "train.num_steps": 80_000, "train.batch_size": 1024, "train.lr": 2e-4, "train.betas": [0.9, 0.95], "eval.every": 10_000,
    "checkpoint.every": 10_000, "sample.every": 10_000,
}  # fmt: skip
SIT_SAMPLER = {"diffusion.sampler.solver": "euler_maruyama", "diffusion.sampler.num_steps": 250}  # as SiT and REPA publish it
REPA = IMAGENET_256 | SIT_SAMPLER | {  # REPA's published training script and README; `block` differs with the size
    "diffusion": "sit", "train.grad_clip_norm": 1.0,
    "alignment": "repa", "alignment.encoder": "vit_base_patch14_dinov2.lvd142m", "alignment.weight": 0.5,
}  # fmt: skip
FASHION = {  # Fashion-MNIST, padded to 32x32; see docs/experiments.md for data and reference
    "data": "custom", "data.name": "fashion_mnist", "data.path": "data/fashion",
    "data.in_channels": 1, "data.input_size": 32, "data.num_classes": 10, "data.num_workers": 0,
    "train.num_steps": 6_000, "train.batch_size": 64, "train.lr": 4e-3, "train.ema_decay": 0.9995, "train.precision": "fp32",
    "train.compile": "blocks", "checkpoint.every": 1_000, "checkpoint.keep_last": 1, "checkpoint.keep_every": 0,
    "eval.every": 1_000, "eval.num_samples": 1_000, "eval.num_steps": 12, "eval.cfg_scales": [1.0], "eval.batch_size": 100,
    "sample.every": 2_000, "evaluation.detector": "small-fashion",
    "evaluation.weights": "evaluations/fashion_detector.safetensors", "evaluation.reference": "references/fashion.npz",
}  # fmt: skip
DENSE = {"model": "dit"}
TREAD = {"model": "tread"}  # half of the tokens skip blocks 2 to depth - 4


def route(selection_ratio: float, start: int, end: int) -> dict[str, Any]:
    """Overrides for one route: a fraction of the tokens skips blocks start to end, inclusive."""
    return TREAD | {"model.routes": [{"selection_ratio": selection_ratio, "start_layer_idx": start, "end_layer_idx": end}]}


def backbone(size: str) -> dict[str, Any]:
    return {"model.backbone": f"DiT-{size}"}


def row_name(table: str, network: str, size: str) -> str:
    """("table2", "dit", "B/2") -> table2/dit_b2."""
    return f"{table}/{network}_{size.replace('/', '').lower()}"


# The paper's tables. FID of 50,000 unguided samples after 400,000 steps, unless a table says otherwise.
TABLE_2 = {
    #       DiT    +TREAD SiT    +TREAD
    "S/2": (68.40, 47.04, 57.60, 38.08),
    "B/2": (43.47, 21.34, 33.00, 15.98),
    "L/2": (23.33, 9.10, 18.80, 5.91),
    "XL/2": (19.47, 7.38, 17.20, 4.89),
}
DENSE_PROTOCOLS = {  # the dense figures come from other papers
    "dit": "the figure is DiT's: DDPM with learned variance; here EDM, sampled by Heun",
    "sit": "the figure is SiT's, sampled by the SDE; here by Heun's ODE",
}
SELECTION_RATES = {0: 43.47, 25: 26.50, 50: 21.34, 75: 49.29}  # DiT-B/2: percent of the tokens that skip the route: FID
PLACEMENTS = {  # DiT-B/2, half of the tokens, shorter training; (first, last block): change of FID from the dense network's
    (0, 2): 2.95, (0, 3): 2.59, (0, 4): 7.23, (0, 5): 0.92, (0, 6): -12.12, (0, 7): -15.71, (0, 8): -16.31, (0, 9): -14.82,
    (0, 10): 7.47, (7, 8): 0.61, (6, 8): 0.82, (5, 8): -4.84, (4, 8): -14.20, (3, 8): -16.31, (2, 8): -21.87, (1, 8): -21.68,
}  # fmt: skip
FINAL = {  # DiT-XL/2: epochs, the run to start from; FID, sFID, IS, precision and recall, unguided and guided
    "dit": (1400, None, (9.62, 6.85, 121.50, 0.67, 0.67), (2.27, 4.60, 278.24, 0.83, 0.57)),
    "tread_160": (160, None, (4.96, 6.83, 192.49, 0.79, 0.54), ()),
    "tread_680": (680, None, (3.93, 7.32, 211.35, 0.76, 0.60), ()),
    "tread_finetune_220": (60, "tread_160", (), (2.76, 4.61, 252.78, 0.83, 0.57)),
    "tread_finetune_740": (60, "tread_680", (), (2.09, 4.46, 269.07, 0.81, 0.62)),
    "tread_finetune_740_interval": (60, "tread_680", (), (1.69, 4.73, 292.66, 0.81, 0.63)),
}


def pair(name: str, table: str, source: str, base: dict, fids: Sequence[float] = (), **about: Any) -> Iterator[Row]:
    """A dense row and the same network with TREAD, with the paper's FIDs of both."""
    dense, routed = ({"fid": fid} for fid in fids) if fids else ({}, {})
    yield Row(name, table, source, base | DENSE, dense, **about)
    yield Row(f"{name}_tread", table, source, base | TREAD, routed, baseline=name, **about)


def table_2() -> Iterator[Row]:
    for size, figures in TABLE_2.items():
        for network, diffusion, fids in (("dit", "edm", figures[:2]), ("sit", "sit", figures[2:])):
            base = IMAGENET_256 | backbone(size) | {"diffusion": diffusion}
            for row in pair(row_name("table2", network, size), "Table 2: backbones", "TREAD, Table 2", base, fids):
                yield row if row.baseline else replace(row, differs=DENSE_PROTOCOLS[network])


def selection_rate() -> Iterator[Row]:
    about = ("Selection rate", "TREAD, ablation of the selection rate")
    for rate, fid in SELECTION_RATES.items():
        overrides = IMAGENET_256 | backbone("B/2") | (route(rate / 100, 2, -4) if rate else DENSE)
        differs, baseline = (None, "selection_rate/0") if rate else (DENSE_PROTOCOLS["dit"], None)
        yield Row(f"selection_rate/{rate}", *about, overrides, {"fid": fid}, differs, baseline)


def location() -> Iterator[Row]:
    """DiT-XL/2, the route scaled with the depth B (B/6 to 2B/3), or at fixed distances from both ends (2 to B - 4)."""
    about, dense = ("Location scaling", "TREAD, ablation of the location's scaling"), "table2/dit_xl2"
    base, rounded = IMAGENET_256 | backbone("XL/2"), "B/6 = 4.67 and 2B/3 = 18.67 of 28 blocks are rounded down: 4 to 18"
    yield Row("location/relative", *about, base | route(0.5, 4, 18), {"fid": 18.81}, rounded, dense)
    yield Row("location/absolute", *about, base | route(0.5, 2, -4), {"fid": 7.38}, None, dense)


def placement() -> Iterator[Row]:
    table, source, dense = "Route placement", "TREAD, ablation of the route's placement", 49.89
    differs = "the paper trains these rows for less than 400K iterations and does not say for how many: 300K is a guess; "
    differs += "compare changes against the baseline, not the figures themselves"
    base = IMAGENET_256 | backbone("B/2") | {"train.num_steps": 300_000}
    yield Row("placement/baseline", table, source, base | DENSE, {"fid": dense}, differs)
    for (start, end), change in PLACEMENTS.items():
        about = (table, f"{source} ({dense} {change:+.2f})", base | route(0.5, start, end), {"fid": round(dense + change, 2)})
        yield Row(f"placement/{start}_{end}", *about, differs, "placement/baseline")


def imagenet_512() -> Iterator[Row]:
    base, source = IMAGENET_512 | backbone("B/2"), "TREAD, ImageNet-512 (FID of 10,000 samples)"
    yield from pair("imagenet512/dit_b2", "ImageNet-512", source, base, (62.8, 40.9), num_samples=10_000)


def lightning() -> Iterator[Row]:
    """80,000 steps of 1,024 images on VA-VAE's latents. The code of the routed row, published by an author of TREAD
    (stefan-baumann/LightningDiT_TREAD), has the default route and no block in float32 after it."""
    about = ("LightningDiT", "TREAD, LightningDiT rows")
    differs = "the paper does not say how these rows are sampled; here by LightningDiT's sampler (Euler, shift 0.3), unguided"
    dense, routed = {"model": "lightningdit"}, {"model": "lightningdit_tread", "model.fp32_after_route": False}
    yield Row("lightning/xl1", *about, LIGHTNING | dense, {"fid": 5.14}, differs)
    yield Row("lightning/xl1_tread", *about, LIGHTNING | routed, {"fid": 3.71}, differs, "lightning/xl1")


def final() -> Iterator[Row]:
    """Long runs of DiT-XL/2. Rows (F), here `finetune`, continue a routed run for 60 epochs without routes."""
    epoch = "an epoch counted as 5,000 steps of 256 images (1,281,167 / 256 = 5,004.6)"
    ddpm = "DiT's own run is DDPM with learned variances, and its guided samples use cfg 1.5 on three channels; here EDM"
    scale = "the paper's guidance scale is not known here: sweep cfg_scale with fid.py and compare the best"
    tuned = f"60 epochs are the difference between this row's and its routed run's; {epoch}; {scale}"
    interval = f"the same training as final/xl2_tread_finetune_740; {scale}, and the interval with it (guidance=interval)"
    metrics = ("fid", "sfid", "inception_score", "precision", "recall")
    for name, (epochs, init_from, *figures) in FINAL.items():
        source, differs, baseline = "TREAD, final comparison", epoch, "final/xl2_dit"
        overrides = IMAGENET_256 | backbone("XL/2") | TREAD | {"train.num_steps": 5_000 * epochs}
        overrides |= {"eval.every": 100_000, "checkpoint.keep_every": 400_000}
        if name == "dit":
            source, differs, baseline = f"DiT (arXiv 2212.09748), as quoted in {source}", f"{ddpm}; {epoch}", None
            overrides |= DENSE
        elif init_from:
            source, differs = f"{source}, rows (F)", interval if name.endswith("interval") else tuned
            overrides |= DENSE | {"init_from": f"${{output_dir}}/final_xl2_{init_from}_seed${{seed}}"}
        paper, guided = (dict(zip(metrics, values)) for values in figures)
        yield Row(f"final/xl2_{name}", "Final comparison", source, overrides, paper, differs, baseline, guided)


def repa() -> Iterator[Row]:
    """SiT with alignment to DINOv2-B; REPA's own runs have no routes."""
    table, source = "REPA", "REPA (arXiv 2410.06940), 400K iterations, 250 steps of the SDE"
    differs = "trained in bf16 (REPA: fp16), with an EMA that is warmed up"
    routed = f"{differs}; TREAD's project page says that both stack, without figures; tokens that skip are not aligned"
    for size, block, fid in (("B/2", 4, 24.4), ("XL/2", 8, 7.9)):  # B/2: sihyun-yu/REPA#5, gstoica27/DeltaFM#6
        base, name = REPA | backbone(size) | {"alignment.block": block}, row_name("repa", "sit", size)
        yield Row(name, table, source, base | DENSE, {"fid": fid}, differs)
        yield Row(f"{name}_tread", table, "after REPA and TREAD", base | TREAD, {}, routed, name)


def sprint() -> Iterator[Row]:
    """TREAD's successor, with LightningDiT's blocks in place of the paper's. For a second stage, set init_from and ratio 0."""
    differs = "see docs/train.md, SPRINT; its configuration names no mean and deviation of logit(t), here 0 and 1; "
    differs += "its figure may include the steps of a dense second stage"
    for size, dense, fused in (("B/2", {}, {"fid": 27.5}), ("XL/2", {"fid": 12.8}, {"fid": 9.30})):
        base = IMAGENET_256 | SIT_SAMPLER | {"diffusion": "sit", "model.backbone": f"LightningDiT-{size}"}
        base |= {"diffusion.timestep": "logit_normal", "train.grad_clip_norm": 1.0}
        about, name = ("SPRINT", "SPRINT (arXiv 2510.21986); B/2: its ablations"), row_name("sprint", "sit", size)
        yield Row(f"{name}_dense", *about, base | {"model": "lightningdit"}, dense, differs)
        yield Row(name, *about, base | {"model": "lightningdit_sprint"}, fused, differs, f"{name}_dense")


def small_pictures() -> Iterator[Row]:
    """Real pictures of 32x32 pixels, without an autoencoder: patches of 2 pixels give the paper's 256 tokens, of 4 pixels 64."""
    differs = "a small classifier, not Inception; pixels, not latents; ${train.num_steps} steps of ${train.batch_size} images"
    for size in ("XS/2", "XS/4"):
        for network, diffusion in (("dit", "edm"), ("sit", "sit")):
            base = FASHION | backbone(size) | {"diffusion": diffusion}
            yield from pair(row_name("fashion", network, size), "Fashion-MNIST", "after TREAD, Table 2", base, differs=differs)
    base = FASHION | backbone("XS/4") | {"model": "sprint", "train.num_steps": 8_000, "train.lr": 2e-3}  # its best at equal time
    yield Row("fashion/dit_xs4_sprint", "Fashion-MNIST", "after SPRINT", base, {}, differs, "fashion/dit_xs4")


TABLES = (table_2, selection_rate, location, placement, imagenet_512, lightning, final, repa, sprint, small_pictures)
ROWS = {row.name: row for table in TABLES for row in table()}
