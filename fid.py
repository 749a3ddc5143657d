"""Judge checkpoints, or images on disk, with ADM's evaluation suite: FID, sFID, Inception Score, precision and recall.

    accelerate launch fid.py checkpoint=runs/x/checkpoints/step_0400000 reference=VIRTUAL_imagenet256_labeled.npz \\
        num_samples=50000 guidance=cfg cfg_scale=1.5
    accelerate launch fid.py checkpoints=runs/x num_samples=5000 guidance=cfg cfg_scale=[1.0,1.25,1.5]     # a sweep
    accelerate launch fid.py images=samples.npz reference=VIRTUAL_imagenet256_labeled.npz

A list of checkpoints, weights, cfg_scale, num_steps, S_churn, solver or of a setting of the guidance (guidance.w=[1.2,1.5]) makes
a sweep over all combinations: a table (CSV and Markdown) and a plot. Finished points are kept in results.jsonl; the same command
again computes those that are missing.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf

from evaluations.images import open_images
from sample import guidance_settings
from training import checkpoint as checkpoints
from training import cli, config
from training.engine import check_compile
from training.evaluation import Evaluator, build_detector, open_reference, short_count
from training.sampling import ImageSampler, find_weak, load_sampler, load_weak

log = logging.getLogger("fid")

# The settings of the sampler that a sweep can go over, where the checkpoint's diffusion has them.
SWEPT_OF_SAMPLER = ("num_steps", "S_churn", "solver")
PAPER_NUM_SAMPLES = 50_000
# The metric that is plotted, by detector.
PLOTTED = {"inception": "fid", "digits": "fd_digits"}


def main(cfg: DictConfig) -> None:
    cfg = config.check(cfg, config.FID_KEYS, config.GUIDANCE_SWEEP_KEYS)
    given = [key for key in ("checkpoint", "checkpoints", "images") if cfg[key] is not None]
    if len(given) != 1:
        raise ValueError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(given) or 'none of them'}")
    guidance_settings(cfg)
    accelerator = cli.start_accelerator(cfg.cpu_threads)
    check_compile("compile", cfg.compile, accelerator.device)
    # One process chooses: in a run that goes on, another could find a newer one.
    folders = broadcast_object_list([find_checkpoints(cfg) if accelerator.is_main_process else None])[0]
    run_cfg = checkpoints.load_config(folders[0]) if folders else None
    fill_in(cfg, run_cfg)
    reference = open_reference(cfg.reference, "reference")
    images = open_images(cfg.images, cfg.convert_to_rgb) if cfg.images else None

    if cfg.num_samples is None:
        cfg.num_samples = PAPER_NUM_SAMPLES if images is None else len(images)
    if images and cfg.num_samples > len(images):
        raise ValueError(f"num_samples={cfg.num_samples}, but {cfg.images} holds {len(images)} images; make more or lower it")
    points = [{"images": cfg.images}] if images else sweep(cfg, folders, accelerator)
    results = Results(cfg, folders, reference.fingerprint(), images.fingerprint() if images else None)
    missing = broadcast_object_list([[point for point in points if not results.has(point)]])[0]
    log.info("%d of %d evaluations to do, in %s", len(missing), len(points), results.folder)
    if missing:
        evaluator = Evaluator.open(accelerator, build_detector(cfg.evaluation, accelerator), reference, cfg.batch_size)
    for point in missing:
        cost = {}
        if images:
            metrics = evaluator.of_images(images, cfg.num_samples)
        else:
            sampler = sampler_of_point(cfg, point, accelerator.device)
            metrics = evaluator.of_samples(sampler, cfg.num_samples)
            cost = {"network_evaluations": sampler.evaluations_per_image, "gflops_per_image": sampler.flops_per_image / 1e9}
        if accelerator.is_main_process:
            results.add(point, metrics, cost)
            log.info("%s: %s", point_name(shown(point)), ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    if accelerator.is_main_process:
        table = results.write(points, PLOTTED[cfg.evaluation.detector])
        sys.stdout.write(table)
    accelerator.end_training()


def find_checkpoints(cfg: DictConfig) -> list[Path]:
    """The verified checkpoints that the command names."""
    if cfg.checkpoints is not None:
        root = Path(cfg.checkpoints) / "checkpoints"
        folders = list(checkpoints.list_steps(root).values())
        if not folders:
            raise ValueError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
        for folder in folders:
            checkpoints.verify(folder)
        return folders
    if cfg.checkpoint is None:
        return []
    return [checkpoints.find_checkpoint(Path(folder), "checkpoint") for folder in as_list(cfg.checkpoint)]


def as_list(value) -> list:
    return list(value) if OmegaConf.is_list(value) else [value]


def fill_in(cfg: DictConfig, run_cfg: DictConfig | None) -> None:
    """Take from the run what the command leaves open."""
    stored = OmegaConf.select(run_cfg, "evaluation") if run_cfg is not None else None
    cfg.reference = cfg.reference or (stored.reference if stored else None)
    cfg.evaluation.detector = cfg.evaluation.detector or (stored.detector if stored else "inception")
    cfg.evaluation.weights = cfg.evaluation.weights or (stored.weights if stored else None)


def sweep(cfg: DictConfig, folders: list[Path], accelerator: Accelerator) -> list[dict]:
    """All combinations of what the command lists, each checked against its checkpoint.

    Raises:
        ValueError: a setting that the checkpoint's diffusion does not have, or a guidance that it cannot have.
    """
    for folder in folders:
        config.warn_of_guidance(cfg.guidance, checkpoints.load_config(folder))
    points, weak = [], {}
    for folder, weights, guidance in itertools.product(folders, as_list(cfg.weights), config.combinations(cfg.guidance)):
        run_cfg, settings = checkpoints.load_config(folder), OmegaConf.create(guidance)
        if settings.name == "autoguidance":
            pair = (folder, settings.checkpoint)
            if pair not in weak:  # once for each: it reads the whole file
                weak[pair] = str(find_weak(settings, run_cfg, accelerator))
            settings.checkpoint = weak[pair]
        for overrides in config.combinations({key: cfg[key] for key in SWEPT_OF_SAMPLER}):
            diffusion = config.build_diffusion(run_cfg, **overrides)
            config.check_guidance(settings, run_cfg, diffusion)
            sampler = {key: getattr(diffusion.sampler, key) for key in SWEPT_OF_SAMPLER if hasattr(diffusion.sampler, key)}
            points.append({"checkpoint": str(folder), "weights": weights, **guidance_of_point(settings), **sampler})
    return points


def guidance_of_point(settings: DictConfig) -> dict:
    """The guidance as a point holds it: cfg_scale alone says none and cfg, `guidance` and its keys anything else."""
    if settings.name in ("none", "cfg"):
        return {"cfg_scale": float(settings.get("cfg_scale", 1.0))}
    own = {key: float(value) if isinstance(value, int) else value for key, value in settings.items() if key != "name"}
    scale = {"cfg_scale": own.pop("cfg_scale")} if "cfg_scale" in own else {}
    return {"guidance": settings.name, **scale, **{f"guidance.{key}": value for key, value in own.items()}}


def settings_of_point(point: dict) -> DictConfig:
    """The guidance.* of a point, back."""
    own = {key.removeprefix("guidance."): value for key, value in point.items() if key.startswith("guidance.")}
    scale = {"cfg_scale": point["cfg_scale"]} if "cfg_scale" in point else {}
    return OmegaConf.create({"name": point.get("guidance", "cfg"), **scale, **own})


def sampler_of_point(cfg: DictConfig, point: dict, device) -> ImageSampler:
    folder, settings = Path(point["checkpoint"]), settings_of_point(point)
    overrides = {key: point[key] for key in SWEPT_OF_SAMPLER if key in point}
    return load_sampler(
        folder,
        point["weights"],
        cfg.autoencoder,
        device,
        cfg.compile,
        diffusion=config.build_diffusion(checkpoints.load_config(folder), **overrides),
        guide=config.build_guidance(OmegaConf.create({"guidance": settings})),
        precision=cfg.precision,
        weak=load_weak(settings, device, cfg.compile),
    )


def shown(point: dict) -> dict:
    """A point as tables and plots show it: a checkpoint as run and step, images by their name."""
    if "images" in point:
        return {"images": Path(point["images"]).name}
    return run_and_step(Path(point["checkpoint"])) | {name: value for name, value in point.items() if name != "checkpoint"}


def run_and_step(checkpoint: Path) -> dict:
    folder = checkpoint.resolve()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    return {"run": run.name, "step": checkpoints.step_of(folder)}


def point_name(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


class Results:
    """The finished points of a folder: results.jsonl, and the table and plot made of them.

    A point is the same one when its settings, the content of its checkpoint or images, the reference and the detector are.
    """

    def __init__(self, cfg: DictConfig, folders: list[Path], reference: str, images_fingerprint: str | None):
        default = folders[0].resolve().parent.parent / "evaluations" if folders else Path("evaluations")
        self.folder = Path(cfg.output) if cfg.output else default
        self.file = self.folder / "results.jsonl"
        self.num_samples, self.images_fingerprint = cfg.num_samples, images_fingerprint
        self.conditions = {
            "num_samples": cfg.num_samples,
            "precision": cfg.precision,
            "autoencoder": cfg.autoencoder,
            "detector": cfg.evaluation.detector,
            "detector_weights": cfg.evaluation.weights,
            "detector_precision": cfg.evaluation.precision,
            "reference": reference,
        }
        self.lines: list[dict] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.file.exists():
                self.lines = [line for line in map(parsed, self.file.read_text().splitlines()) if line is not None]
        except OSError as e:
            raise ValueError(f"cannot write to {self.folder} ({e.strerror}); choose another output=...") from e

    def _key(self, point: dict) -> dict:
        is_checkpoint = "checkpoint" in point
        content = checkpoints.identity(Path(point["checkpoint"])) if is_checkpoint else self.images_fingerprint
        if "guidance.checkpoint" in point:
            content += checkpoints.identity(Path(point["guidance.checkpoint"]))
        return json.loads(json.dumps({**point, **self.conditions, "content": content}))

    def _find(self, point: dict) -> dict | None:
        key = self._key(point)
        return next((line for line in self.lines if line["point"] == key), None)

    def has(self, point: dict) -> bool:
        return self._find(point) is not None

    def add(self, point: dict, metrics: dict[str, float], cost: dict[str, float]) -> None:
        line = {"point": self._key(point), "metrics": metrics} | ({"cost": cost} if cost else {})
        self.lines.append(line)
        with open(self.file, "a+b") as f:
            f.seek(max(f.tell() - 1, 0))
            torn = f.read(1) not in (b"", b"\n")  # the last line was cut off: this one must not be joined to it
            f.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")

    def write(self, points: list[dict], plotted: str) -> str:
        """results.csv, results.md and, for a sweep, results.png of these points; returns the Markdown."""
        found = [self._find(point) for point in points]
        rows = []
        for point, line in zip(points, found):
            rows.append({**shown(point), "num_samples": self.num_samples, **line["metrics"], **line.get("cost", {})})
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(self.folder / "results.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, names)
            writer.writeheader()
            writer.writerows(rows)
        lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        for row in rows:
            cells = [row.get(name, "") for name in names]
            lines.append("| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")
        table = "\n".join(lines) + "\n"
        (self.folder / "results.md").write_text(table)
        if len(points) > 1:
            plot(
                points,
                [line["metrics"][plotted] for line in found],
                f"{plotted}{short_count(self.num_samples)}",
                self.folder / "results.png",
            )
        return table


def parsed(line: str) -> dict | None:
    """A line of results.jsonl; None for one that was cut off."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "point" in value and "metrics" in value else None


def plot(points: list[dict], values: list[float], label: str, file: Path) -> None:
    """The metric against the setting with the most values; a line for each combination of the others."""
    import matplotlib

    matplotlib.use("Agg")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib import pyplot

    settings = [shown(point) for point in points]
    names = dict.fromkeys(name for row in settings for name in row)  # checkpoints of two diffusions differ in some
    choices = {name: list(dict.fromkeys(row.get(name) for row in settings)) for name in names}
    numbers = [name for name, values in choices.items() if all(isinstance(value, (int, float)) for value in values)]
    axis = max(numbers, key=lambda name: len(choices[name]))
    others = [name for name in choices if name != axis and len(choices[name]) > 1]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    curves: dict[str, list[tuple]] = {}
    for row, value in zip(settings, values):
        curves.setdefault(point_name({name: row[name] for name in others if name in row}), []).append((row[axis], value))
    for name, curve in curves.items():
        axes.plot(*zip(*sorted(curve)), marker="o", label=name or None)
    axes.set_xlabel(axis)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if others:
        axes.legend()
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    cli.run(main, "fid", config.FID_KEYS)
