"""Rows that need extras: LightningDiT, REPA and SPRINT. ROWS also contains the rows of configs/experiments.py."""

from configs.experiments import DENSE, FASHION, FASHION_DIFFERS, IMAGENET_256, TREAD, add
from configs.experiments import ROWS as ROWS

# The samplers of SiT, REPA and LightningDiT run without autocast. SPRINT's code is based on REPA's.
FP32_SAMPLES = "sample.precision=fp32 eval.precision=fp32"
# LightningDiT's loss and sampler. LightningDiT's 250 time points bound 249 steps.
LIGHTNING_DIFFUSION = """
    diffusion.timestep=logit_normal diffusion.cosine_weight=1.0
    diffusion.sampler.solver=euler diffusion.sampler.num_steps=249 diffusion.sampler.timestep_shift=0.3
"""
# Settings from LightningDiT's configs/lightningdit_xl_vavae_f16d32.yaml, which does not clip gradients.
LIGHTNING = f"""{IMAGENET_256} {FP32_SAMPLES} {LIGHTNING_DIFFUSION}
    model.backbone=LightningDiT-XL/1 diffusion=sit
    data=custom data.name=vavae_imagenet256 data.path=data/vavae_imagenet256
    data.in_channels=32 data.input_size=16 data.num_classes=1000
    train.num_steps=80000 train.batch_size=1024 train.lr=2e-4 train.betas=[0.9,0.95]
    eval.every=10000 checkpoint.every=10000 sample.every=10000
"""
SIT_SAMPLER = "diffusion.sampler.solver=euler_maruyama diffusion.sampler.num_steps=250"  # the sampler that SiT and REPA publish
# Settings from REPA's published training script and README. alignment.block depends on the network size.
REPA = f"""{IMAGENET_256} {FP32_SAMPLES} {SIT_SAMPLER}
    diffusion=sit train.grad_clip_norm=1.0
    alignment=repa alignment.encoder=vit_base_patch14_dinov2.lvd142m alignment.weight=0.5
"""

# The LightningDiT rows train for 80,000 steps of 1,024 images on VA-VAE latents. A TREAD author published the routed row's code
# (stefan-baumann/LightningDiT_TREAD), which uses the default route and does not run the block after the route in float32.
heading = ("LightningDiT", "TREAD, LightningDiT rows")
differs = "the paper does not say how these rows are sampled; here by LightningDiT's sampler (Euler, shift 0.3), unguided"
routed = f"{LIGHTNING} model=lightningdit_tread model.fp32_after_route=false"
add("lightning/xl1", *heading, f"{LIGHTNING} model=lightningdit", {"fid": 5.14}, differs)
add("lightning/xl1_tread", *heading, routed, {"fid": 3.71}, differs, "lightning/xl1")

# SiT aligned with DINOv2-B. REPA's runs use no routes. sihyun-yu/REPA#5 and gstoica27/DeltaFM#6 report REPA's FID for SiT-B/2.
source = "REPA (arXiv 2410.06940), 400K iterations, 250 steps of the SDE"
differs = "trained in bf16 (REPA: fp16); REPA drops 19% of the labels with its `--legacy`, because it drops twice; here 10%"
routed = f"{differs}; TREAD's project page says that both stack, without figures; tokens that skip are not aligned"
for size, block, fid in (("B", 4, 24.4), ("XL", 8, 7.9)):
    base, name = f"{REPA} model.backbone=DiT-{size}/2 alignment.block={block}", f"repa/sit_{size.lower()}2"
    add(name, "REPA", source, f"{base} {DENSE}", {"fid": fid}, differs)
    add(f"{name}_tread", "REPA", "after REPA and TREAD", f"{base} {TREAD}", {}, routed, name)

# The sprint/* rows use LightningDiT's blocks instead of SPRINT's. For SPRINT's second stage, set init_from and a ratio of 0.
heading = ("SPRINT", "SPRINT (arXiv 2510.21986); B/2: its ablations")
differs = "see docs/train.md, SPRINT; its configuration names no mean and deviation of logit(t), here 0 and 1; "
differs += "its figure may include the steps of a dense second stage"
for size, dense, fused in (("B", {}, {"fid": 27.5}), ("XL", {"fid": 12.8}, {"fid": 9.30})):
    base = f"{IMAGENET_256} {FP32_SAMPLES} {SIT_SAMPLER} diffusion=sit diffusion.timestep=logit_normal train.grad_clip_norm=1.0"
    base, name = f"{base} model.backbone=LightningDiT-{size}/2", f"sprint/sit_{size.lower()}2"
    add(f"{name}_dense", *heading, f"{base} model=lightningdit", dense, differs)
    add(name, *heading, f"{base} model=lightningdit_sprint", fused, differs, f"{name}_dense")

best = f"{FASHION} model.backbone=DiT-XS/4 model=sprint train.num_steps=8000 train.lr=2e-3"  # takes as long as 6,000 TREAD steps
add("fashion/dit_xs4_sprint", "Fashion-MNIST", "after SPRINT", best, {}, FASHION_DIFFERS, "fashion/dit_xs4")
