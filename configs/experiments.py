"""The papers' tables as train.py runs. For example, `experiment=table2/dit_b2_tread` selects a row of Table 2.

A row contains the paper's figures and the train.py arguments, which users can override. `--cfg job` prints the complete
configuration. Call `add` or `add_pair` to add a row. extras/experiments.py adds rows that need extras.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of a table. The default run name contains the row's name and the seed, for example table2_dit_b2_tread_seed0."""

    name: str
    table: str  # table heading in reports
    source: str  # paper and table that report the figures
    arguments: str  # train.py arguments, separated by spaces; the last value of a repeated key is used
    paper: dict[str, float] = field(default_factory=dict)  # the paper's unguided figures by metric
    differs: str | None = None  # differences from the paper's protocol that docs/faithfulness.md does not list
    baseline: str | None = None  # name of the dense row that this row is compared with
    paper_guided: dict[str, float] = field(default_factory=dict)  # the paper's figures with guidance=cfg
    num_samples: int = 50_000  # number of samples behind the paper's figures
    # The paper's figures with other guidance, by the fid.py arguments that select the guidance, without its scale.
    paper_by_guidance: dict[str, dict[str, float]] = field(default_factory=dict)
    # Name of the row whose run passes through this row's last checkpoint. Train that row instead of this one.
    checkpoint_of: str | None = None


# Arguments that several rows share.
DENSE = "model=dit"
TREAD = "model=tread"  # half of the tokens skip blocks 2 to depth - 4
B, XL = "model.backbone=DiT-B/2", "model.backbone=DiT-XL/2"
# Evaluations of 5,000 samples show when a routed run matches the dense run. The last evaluation uses 50,000, as in the paper.
# The EMA has a constant decay and samples in bfloat16, as in the official code of TREAD.
IMAGENET_256 = """
    data=imagenet256 data.path=data/imagenet256 evaluation.reference=references/VIRTUAL_imagenet256_labeled.npz
    train.num_steps=400000 train.batch_size=256 train.lr=1e-4 train.ema_decay=0.9999 train.ema_schedule=constant
    train.precision=bf16 sample.precision=bf16 eval.precision=bf16
    eval.every=50000 eval.num_samples=5000 eval.final_num_samples=50000 eval.cfg_scales=[1.0]
"""
IMAGENET_512 = f"""{IMAGENET_256}
    data=imagenet512 data.path=data/imagenet512 evaluation.reference=references/VIRTUAL_imagenet512.npz
    eval.final_num_samples=10000
"""
# Fashion-MNIST, padded to 32x32. See docs/data.md for the data and extras/benchmarks/results/fashion_tokens.md for the reference.
FASHION = """
    data=custom data.name=fashion_mnist data.path=data/fashion
    data.in_channels=1 data.input_size=32 data.num_classes=10 data.num_workers=0
    train.num_steps=6000 train.batch_size=64 train.lr=4e-3 train.ema_decay=0.9995 train.precision=fp32 train.compile=blocks
    checkpoint.every=1000 checkpoint.keep_last=1 checkpoint.keep_every=0 sample.every=2000
    eval.every=1000 eval.num_samples=1000 eval.num_steps=12 eval.cfg_scales=[1.0] eval.batch_size=100
    evaluation.detector=small-fashion evaluation.detector_weights=evaluations/fashion_detector.safetensors
    evaluation.reference=references/fashion.npz
"""


def route(selection_ratio: float, start: int, end: int) -> str:
    """Return the arguments for one route. A fraction `selection_ratio` of the tokens skips blocks `start` to `end`, inclusive."""
    return f"{TREAD} model.routes=[{{selection_ratio:{selection_ratio},start_layer_idx:{start},end_layer_idx:{end}}}]"


ROWS: dict[str, Row] = {}


def add(name: str, *fields: Any, **more: Any) -> None:
    """Add a row to ROWS. The remaining arguments are the fields of `Row`, in order or by name."""
    ROWS[name] = Row(name, *fields, **more)


def add_pair(
    name: str, table: str, source: str, base: str, fids: tuple = (), dense_differs: str | None = None, **more: Any
) -> None:
    """Add a dense row and a TREAD row for the same network. `fids` contains the paper's dense FID and TREAD FID."""
    dense, routed = ({"fid": fid} for fid in fids) if fids else ({}, {})
    add(name, table, source, f"{base} {DENSE}", dense, **{"differs": dense_differs} | more)
    add(f"{name}_tread", table, source, f"{base} {TREAD}", routed, baseline=name, **more)


# Unless a table says otherwise, the figures are FIDs of 50,000 unguided samples after 400,000 steps.

# Table 2. The columns are the FIDs of DiT, DiT with TREAD, SiT and SiT with TREAD. The dense FIDs come from other papers.
DIT = "the figure is DiT's: DDPM with learned variance; here EDM, sampled by Heun"
SIT = "the figure is SiT's, sampled by the SDE; here by Heun's ODE"
for size, *fids in (
    ("S", 68.40, 47.04, 57.60, 38.08),
    ("B", 43.47, 21.34, 33.00, 15.98),
    ("L", 23.33, 9.10, 18.80, 5.91),
    ("XL", 19.47, 7.38, 17.20, 4.89),
):
    base, heading = f"{IMAGENET_256} model.backbone=DiT-{size}/2", ("Table 2: backbones", "TREAD, Table 2")
    add_pair(f"table2/dit_{size.lower()}2", *heading, f"{base} diffusion=edm", fids[:2], DIT)
    add_pair(f"table2/sit_{size.lower()}2", *heading, f"{base} diffusion=sit", fids[2:], SIT)

# DiT-B/2. The keys are the percentages of tokens that skip blocks, and the values are FIDs.
heading = ("Selection rate", "TREAD, ablation of the selection rate")
add("selection_rate/0", *heading, f"{IMAGENET_256} {B} {DENSE}", {"fid": 43.47}, DIT, checkpoint_of="table2/dit_b2")
for rate, fid in {25: 26.50, 50: 21.34, 75: 49.29}.items():
    arguments = f"{IMAGENET_256} {B} {route(rate / 100, 2, -4)}"
    same = "table2/dit_b2_tread" if rate == 50 else None
    add(f"selection_rate/{rate}", *heading, arguments, {"fid": fid}, baseline="selection_rate/0", checkpoint_of=same)

# DiT-XL/2. Row `relative` scales the route with the depth B (B/6 to 2B/3). Row `absolute` routes from block 2 to block B - 4.
heading = ("Location scaling", "TREAD, ablation of the location's scaling")
rounded = "the paper does not say how it rounds B/6 = 4.67 and 2B/3 = 18.67 of 28 blocks; here down, to 4 and 18"
add("location/relative", *heading, f"{IMAGENET_256} {XL} {route(0.5, 4, 18)}", {"fid": 18.81}, rounded, "table2/dit_xl2")
absolute = f"{IMAGENET_256} {XL} {route(0.5, 2, -4)}"
add("location/absolute", *heading, absolute, {"fid": 7.38}, None, "table2/dit_xl2", checkpoint_of="table2/dit_xl2_tread")

# The keys are the first and last block that half of the tokens skip. The values are FID changes from the dense DiT-B/2.
PLACEMENTS = {
    (0, 2): 2.95, (0, 3): 2.59, (0, 4): 7.23, (0, 5): 0.92, (0, 6): -12.12, (0, 7): -15.71, (0, 8): -16.31, (0, 9): -14.82,
    (0, 10): 7.47, (7, 8): 0.61, (6, 8): 0.82, (5, 8): -4.84, (4, 8): -14.20, (3, 8): -16.31, (2, 8): -21.87, (1, 8): -21.68,
}  # fmt: skip
table, source, dense = "Route placement", "TREAD, ablation of the route's placement", 49.89
differs = "the paper trains these rows for less than 400K iterations and does not say for how many: 300K is a guess; "
differs += "compare changes against the baseline, not the figures themselves"
base = f"{IMAGENET_256} {B} train.num_steps=300000"
add("placement/baseline", table, source, f"{base} {DENSE}", {"fid": dense}, differs, checkpoint_of="table2/dit_b2")
for (start, end), change in PLACEMENTS.items():
    heading = (table, f"{source} ({dense} {change:+.2f})", f"{base} {route(0.5, start, end)}", {"fid": round(dense + change, 2)})
    same = "table2/dit_b2_tread" if (start, end) == (2, 8) else None
    add(f"placement/{start}_{end}", *heading, differs, "placement/baseline", checkpoint_of=same)

heading = ("ImageNet-512", "TREAD, ImageNet-512 (FID of 10,000 samples)")
add_pair("imagenet512/dit_b2", *heading, f"{IMAGENET_512} {B}", (62.8, 40.9), num_samples=10_000)

# Long DiT-XL/2 runs. The paper's rows (F), called `finetune` here, train a routed run without routes for 60 more epochs.
# Each row lists epochs, arguments, differences, and the figures (unguided, then guided) in the order of METRICS.
# TREAD gives no learning rate for fine-tuning. Its authors' later paper (arXiv 2601.01608) uses 1e-5 with batches of 256.
METRICS = ("fid", "sfid", "inception_score", "precision", "recall")
epoch = "an epoch counted as 5,000 steps of 256 images (1,281,167 / 256 = 5,004.6)"
ddpm = f"the figure is DiT's (arXiv 2212.09748): DDPM, learned variances, cfg 1.5 on three channels; here EDM; {epoch}"
tuned = f"rows (F): 60 epochs are the difference between this row's and its routed run's; {epoch}; the learning rate is that of "
tuned += "arXiv 2601.01608, by the same authors; the guidance scale (and its interval) is not known here: sweep it with fid.py "
tuned += "and compare the best"
start = f"{DENSE} train.lr=1e-5 init_from=${{output_dir}}/final_xl2_tread_"
SAME_RUN = {"tread_160": "final/xl2_tread_680", "tread_finetune_740_interval": "final/xl2_tread_finetune_740"}
FINAL = {
    "dit": (1400, DENSE, ddpm, (9.62, 6.85, 121.50, 0.67, 0.67), (2.27, 4.60, 278.24, 0.83, 0.57)),
    "tread_160": (160, TREAD, epoch, (4.96, 6.83, 192.49, 0.79, 0.54), ()),
    "tread_680": (680, TREAD, epoch, (3.93, 7.32, 211.35, 0.76, 0.60), ()),
    "tread_finetune_220": (60, f"{start}160_seed${{seed}}", tuned, (), (2.76, 4.61, 252.78, 0.83, 0.57)),
    "tread_finetune_740": (60, f"{start}680_seed${{seed}}", tuned, (), (2.09, 4.46, 269.07, 0.81, 0.62)),
    "tread_finetune_740_interval": (60, f"{start}680_seed${{seed}}", tuned, (), (1.69, 4.73, 292.66, 0.81, 0.63)),
}
heading = ("Final comparison", "TREAD, final comparison")
base = f"{IMAGENET_256} {XL} eval.every=100000 checkpoint.keep_every=400000"
for name, (epochs, own, differs, *figures) in FINAL.items():
    arguments, baseline = f"{base} {own} train.num_steps={5_000 * epochs}", None if name == "dit" else "final/xl2_dit"
    paper, guided = (dict(zip(METRICS, values)) for values in figures)
    guided = {"paper_by_guidance": {"guidance=interval": guided}} if "interval" in name else {"paper_guided": guided}
    add(f"final/xl2_{name}", *heading, arguments, paper, differs, baseline, checkpoint_of=SAME_RUN.get(name), **guided)

# Sparse guidance, by TREAD's authors. docs/sample_and_evaluate.md has the commands of fid.py, which search the weight w. SG_FLOPS
# is one network. In SG_FID, the weak branch is the checkpoint of step 50,000. The figures with cfg are those of the best scale.
heading = ("Sparse guidance", "Guiding Token-Sparse Diffusion Models (arXiv 2601.01608)")
SG_FLOPS = "guidance=sparse guidance.r_strong=0.5 guidance.r_weak=0.9"
SG_FID = "guidance=sparse guidance.r_strong=0.0 guidance.r_strong_last=0.6 guidance.r_weak=0.6 guidance.r_weak_last=0.0"
SG_FID += " guidance.checkpoint=step_0050000"
differs = f"w is not published: search it; {epoch}; the distribution of t and the precision of sampling are not stated, here "
differs += "uniform and bf16"
unguided = "; its unguided 4.89 is also what TREAD's Table 2 has for 400K steps"
base = f"""{IMAGENET_256} {XL} {TREAD} diffusion=sit diffusion.sampler.solver=euler checkpoint.keep_every=50000
    eval.every=100000 eval.cfg_scales=[1.0,1.5] guidance@eval.guidance=sparse eval.guidance.r_strong=0.5 eval.guidance.r_weak=0.9
"""
add(
    "sparse_guidance/sit_xl2_tread", *heading, f"{base} train.num_steps=2000000", {"fid": 4.89}, differs + unguided,
    paper_guided=dict(zip(METRICS, (2.57, 4.99, 275.26, 0.82, 0.57))),
    paper_by_guidance={SG_FLOPS: {"fid": 2.14}, SG_FID: dict(zip(METRICS, (1.58, 4.45, 249.70, 0.80, 0.63)))},
)  # fmt: skip
add(
    "sparse_guidance/sit_xl2_tread_160", *heading, f"{base} train.num_steps=800000", {}, differs,
    paper_guided=dict(zip(METRICS, (2.95, 4.84, 233.3, 0.82, 0.56))),
    paper_by_guidance={SG_FID: dict(zip(METRICS, (2.07, 3.98, 223.4, 0.80, 0.58)))},
    checkpoint_of="sparse_guidance/sit_xl2_tread",
)  # fmt: skip

# Images of 32x32 pixels need no autoencoder. A patch size of 2 gives 256 tokens, as in the paper. A patch size of 4 gives 64.
FASHION_DIFFERS = "a small classifier, not Inception; pixels, not latents; ${train.num_steps} steps of ${train.batch_size} images"
for patch_size in (2, 4):
    for network, diffusion in (("dit", "edm"), ("sit", "sit")):
        name, base = f"fashion/{network}_xs{patch_size}", f"{FASHION} model.backbone=DiT-XS/{patch_size} diffusion={diffusion}"
        add_pair(name, "Fashion-MNIST", "after TREAD, Table 2", base, differs=FASHION_DIFFERS)
