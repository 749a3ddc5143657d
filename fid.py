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
from omegaconf import DictConfig

from errors import UserError
from evaluations.images import open_images
from evaluations.suite import format_metric, metrics_of, short_count
from files import append_line, markdown_table, read_lines
from sample import with_scale
from sampling.evaluator import Evaluator
from sampling.sampler import ImageSampler
from setup import build, cli, load, schema
from training import checkpoint as checkpoints
from training.speed import check_compile

log = logging.getLogger("fid")

# The settings of the sampler that a sweep can go over, where the checkpoint's diffusion has them.
SWEPT_OF_SAMPLER = ("num_steps", "S_churn", "solver")
PAPER_NUM_SAMPLES = 50_000


def main(cfg: DictConfig) -> None:
    cfg = schema.check(cfg, schema.FidConfig)
    given = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(given) or 'none of them'}")
    guidances = [with_scale(guidance, scale) for guidance in cfg.guidance for scale in as_list(cfg.cfg_scale)]
    accelerator = cli.start_accelerator(cfg.cpu_threads)
    check_compile("compile", cfg.compile, accelerator.device)
    # One process chooses: in a run that goes on, another could find a newer one.
    folders = broadcast_object_list([find_checkpoints(cfg) if accelerator.is_main_process else None])[0]
    runs = {folder: load.load_config(folder) for folder in folders}
    cfg = with_settings_of_run(cfg, runs[folders[0]] if folders else None)
    reference = build.open_reference(cfg.reference, "reference")
    images = open_images(cfg.images, cfg.convert_to_rgb) if cfg.images else None

    num_samples = cfg.num_samples or (PAPER_NUM_SAMPLES if images is None else len(images))
    if images and num_samples > len(images):
        raise UserError(f"num_samples={num_samples}, but {cfg.images} holds {len(images)} images; make more or lower it")
    points = [{"images": cfg.images}] if images else sweep(cfg, runs, guidances, accelerator)
    results = Results(cfg, num_samples, folders, reference.fingerprint(), images.fingerprint() if images else None)
    missing = broadcast_object_list([[point for point in points if not results.has(point)]])[0]
    log.info("%d of %d evaluations to do, in %s", len(missing), len(points), results.folder)
    if missing:
        detector = build.build_detector(cfg.evaluation, accelerator)
        evaluator = Evaluator.open(accelerator, detector, reference, cfg.batch_size)
    for point in missing:
        cost = {}
        if images:
            metrics = evaluator.of_images(images, num_samples)
        else:
            sampler = sampler_of_point(cfg, runs, point, accelerator.device)
            metrics = evaluator.of_samples(sampler, num_samples)
            cost = {"network_evaluations": sampler.evaluations_per_image, "gflops_per_image": sampler.flops_per_image / 1e9}
        if accelerator.is_main_process:
            results.add(point, metrics, cost)
            log.info(
                "%s: %s",
                point_name(shown(point)),
                ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items()),
            )
    if accelerator.is_main_process:
        table = results.write(points, metrics_of(cfg.evaluation.detector)[0].name)
        sys.stdout.write(table)
    accelerator.end_training()


def find_checkpoints(cfg: schema.FidConfig) -> list[Path]:
    """The verified checkpoints that the command names."""
    if cfg.checkpoints is not None:
        folders = list(checkpoints.list_steps(Path(cfg.checkpoints) / "checkpoints").values())
        if not folders:
            raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
        for folder in folders:
            checkpoints.verify(folder)
        return folders
    if cfg.checkpoint is None:
        return []
    return [checkpoints.find_checkpoint(Path(folder), "checkpoint") for folder in as_list(cfg.checkpoint)]


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def with_settings_of_run(cfg: schema.FidConfig, run_cfg: schema.TrainConfig | None) -> schema.FidConfig:
    """Take from the run what the command leaves open."""
    stored = {"reference": None, "detector": "inception", "weights": None}
    if run_cfg is not None:
        stored = run_cfg.evaluation.model_dump()
    own = {key: getattr(cfg.evaluation, key) or stored[key] for key in ("detector", "weights")}
    update = {"evaluation": cfg.evaluation.model_copy(update=own), "reference": cfg.reference or stored["reference"]}
    return cfg.model_copy(update=update)


def sweep(
    cfg: schema.FidConfig, runs: dict[Path, schema.TrainConfig], guidances: list[schema.Guidance], accelerator: Accelerator
) -> list[dict]:
    """All combinations of what the command lists, each checked against its checkpoint.

    Raises:
        UserError: a setting that the checkpoint's diffusion does not have, or a guidance that it cannot have.
    """
    points, found = [], {}
    for run_cfg in runs.values():
        build.warn_of_guidance(guidances[0], run_cfg)
    for (folder, run_cfg), weights, guidance in itertools.product(runs.items(), as_list(cfg.weights), guidances):
        if guidance.name == "autoguidance":
            pair = (folder, guidance.checkpoint)
            if pair not in found:  # once for each: it reads the whole file
                found[pair] = load.find_weak(guidance, run_cfg, accelerator).checkpoint
            guidance = guidance.model_copy(update={"checkpoint": found[pair]})
        for overrides in schema.combinations({key: getattr(cfg, key) for key in SWEPT_OF_SAMPLER}):
            diffusion = build.build_diffusion(run_cfg.diffusion, **overrides)
            build.check_guidance(guidance, run_cfg, diffusion)
            sampler = {key: getattr(diffusion.sampler, key) for key in SWEPT_OF_SAMPLER if hasattr(diffusion.sampler, key)}
            points.append({"checkpoint": str(folder), "weights": weights, **guidance_of_point(guidance), **sampler})
    return points


def guidance_of_point(guidance: schema.Guidance) -> dict:
    """The guidance as a point holds it: cfg_scale alone says none and cfg, `guidance` and its keys anything else."""
    if guidance.name in ("none", "cfg"):
        return {"cfg_scale": getattr(guidance, "cfg_scale", 1.0)}
    own = guidance.model_dump(exclude={"name"})
    scale = {"cfg_scale": own.pop("cfg_scale")} if "cfg_scale" in own else {}
    return {"guidance": guidance.name, **scale, **{f"guidance.{key}": value for key, value in own.items()}}


def settings_of_point(point: dict) -> schema.Guidance:
    """The guidance of a point, back."""
    own = {key.removeprefix("guidance."): value for key, value in point.items() if key.startswith("guidance.")}
    scale = {"cfg_scale": point["cfg_scale"]} if "cfg_scale" in point else {}
    return schema.read_guidance({"name": point.get("guidance", "cfg"), **scale, **own})


def sampler_of_point(cfg: schema.FidConfig, runs: dict[Path, schema.TrainConfig], point: dict, device) -> ImageSampler:
    folder = Path(point["checkpoint"])
    overrides = {key: point[key] for key in SWEPT_OF_SAMPLER if key in point}
    return load.load_sampler(
        folder,
        runs[folder],
        settings_of_point(point),
        device,
        weights=point["weights"],
        diffusion=build.build_diffusion(runs[folder].diffusion, **overrides),
        autoencoder=cfg.autoencoder,
        compile_mode=cfg.compile,
        precision=cfg.precision,
    )


def shown(point: dict) -> dict:
    """A point as tables and plots show it: a checkpoint as run and step, images by their name."""
    if "images" in point:
        return {"images": Path(point["images"]).name}
    return run_and_step(Path(point["checkpoint"])) | {name: value for name, value in point.items() if name != "checkpoint"}


def run_and_step(checkpoint: Path) -> dict:
    run = checkpoints.run_of(checkpoint) or checkpoint.resolve().parent
    return {"run": run.name, "step": checkpoints.step_of(checkpoint)}


def point_name(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


class Results:
    """The finished points of a folder: results.jsonl, and the table and plot made of them.

    A point is the same one when its settings, the content of its checkpoint or images, the reference and the detector are.
    """

    def __init__(
        self, cfg: schema.FidConfig, num_samples: int, folders: list[Path], reference: str, images_fingerprint: str | None
    ):
        self.folder = Path(cfg.output) if cfg.output else default_folder(cfg, folders)
        self.file = self.folder / "results.jsonl"
        self.num_samples, self.images_fingerprint = num_samples, images_fingerprint
        self.conditions = {
            "num_samples": num_samples,
            "precision": cfg.precision,
            "autoencoder": cfg.autoencoder,
            "detector": cfg.evaluation.detector,
            "detector_weights": cfg.evaluation.weights,
            "detector_precision": cfg.evaluation.precision,
            "reference": reference,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"cannot write to {self.folder} ({e.strerror}); choose another output=...") from e
        self.lines = [line for _, line in read_lines(self.file) if line and "point" in line and "metrics" in line]

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
        append_line(self.file, line)

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
        table = markdown_table(names, [[cell(name, row.get(name, "")) for name in names] for row in rows])
        (self.folder / "results.md").write_text(table)
        if len(points) > 1:
            plot(
                points,
                [line["metrics"][plotted] for line in found],
                f"{plotted}{short_count(self.num_samples)}",
                self.folder / "results.png",
            )
        return table


def cell(name: str, value) -> str:
    return format_metric(name, value) if isinstance(value, float) else str(value)


def default_folder(cfg: schema.FidConfig, folders: list[Path]) -> Path:
    """<run>/evaluations; beside a checkpoint that is in no run, and beside images."""
    if folders:
        return (checkpoints.run_of(folders[0]) or folders[0].resolve().parent) / "evaluations"
    images = Path(cfg.images).resolve()
    return images.with_name(f"{images.name}_evaluations")


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
    cli.run(main, "fid", schema.FidConfig)
