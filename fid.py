"""Judge checkpoints, or images on disk, with ADM's evaluation suite: FID, sFID, Inception Score, precision and recall.

    python fid.py checkpoint=runs/x/checkpoints/step_0400000 reference=VIRTUAL_imagenet256_labeled.npz \\
        num_samples=50000 guidance=cfg cfg_scale=1.5
    python fid.py checkpoints=runs/x num_samples=5000 guidance=cfg cfg_scale=[1.0,1.25,1.5]     # a sweep
    python fid.py images=samples.npz reference=VIRTUAL_imagenet256_labeled.npz

A list of checkpoints, weights, cfg_scale, num_steps, S_churn, solver or of a setting of the guidance (guidance.w=[1.2,1.5]) makes
a sweep over all combinations: a table (CSV and Markdown) and a plot. Finished points are kept in results.jsonl; the same command
again computes those that are missing.
"""

from __future__ import annotations

import csv
import gc
import io
import itertools
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accelerate import Accelerator

import evaluations
from common.errors import UserError
from common.files import append_line, lock_output, markdown_table, read_lines, write_file
from configs import command_line, schema
from evaluations.images import open_images
from evaluations.suite import display_name, format_metric, format_metrics, metrics_of
from latents import autoencoders
from sampling.detectors import build_detectors, open_reference
from sampling.evaluator import Evaluator
from sampling.sampler import ImageSampler
from training import checkpoint as checkpoints
from training import load, machine
from training.resume import check_shared, decide_together
from training.speed import check_compile

log = logging.getLogger("fid")

# The settings of the sampler that a sweep can go over, if the checkpoint's diffusion has them.
SWEPT_OF_SAMPLER = ("num_steps", "S_churn", "solver")
PAPER_NUM_SAMPLES = 50_000


def main(cfg: schema.FidConfig) -> None:
    given = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(given) or 'none of them'}")
    guidances = [load.with_scale(guidance, scale) for guidance in cfg.guidance for scale in as_list(cfg.cfg_scale)]
    accelerator = machine.start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    check_compile("compile", cfg.compile, accelerator.device)
    # One process chooses: while a run trains, another could find a newer checkpoint.
    folders = decide_together(lambda: find_checkpoints(cfg), accelerator)
    for folder in folders:
        check_shared(folder / checkpoints.MANIFEST, "checkpoints" if cfg.checkpoints else "checkpoint", accelerator)
    runs = {folder: load.load_config(folder) for folder in folders}
    cfg = with_settings_of_run(cfg, runs[folders[0]] if folders else None)
    reference = open_reference(cfg.reference, "reference", cfg.evaluation.all_detectors)
    images = open_images(cfg.images, cfg.convert_to_rgb) if cfg.images else None
    num_samples = cfg.num_samples or (PAPER_NUM_SAMPLES if images is None else len(images))
    if images and num_samples > len(images):
        raise UserError(f"num_samples={num_samples}, but {cfg.images} holds {len(images)} images; make more or lower it")
    points = [({"images": cfg.images}, None)] if images else sweep(cfg, runs, guidances, accelerator)

    conditions = {
        "num_samples": num_samples,
        "precision": cfg.precision,
        "autoencoder": cfg.autoencoder,
        "detector": "+".join(cfg.evaluation.all_detectors),
        "detector_weights": cfg.evaluation.weights,
        "dinov2_weights": cfg.evaluation.dinov2_weights,
        "detector_precision": cfg.evaluation.precision,
        "reference": reference.fingerprint(),
    }
    output = Path(cfg.output) if cfg.output else default_folder(cfg, folders)
    lock = lock_output(output, "evaluating into") if accelerator.is_main_process else None
    results = Results(output, conditions, images.fingerprint() if images else None)
    missing = decide_together(lambda: [i for i, (settings, _) in enumerate(points) if not results.find(settings)], accelerator)
    log.info("%d of %d evaluations to do, in %s", len(missing), len(points), output)
    if missing:
        for run_cfg in runs.values():  # before a detector and a reference that take minutes
            autoencoders.find(cfg.autoencoder or run_cfg.data.autoencoder)
        evaluator = Evaluator.open(accelerator, build_detectors(cfg.evaluation, accelerator), reference, cfg.batch_size)
    for settings, load_sampler in (points[i] for i in missing):
        cost = {}
        if images:
            metrics = evaluator.of_images(images, num_samples)
        else:
            sampler = load_sampler()
            metrics = evaluator.of_samples(sampler, num_samples)
            cost = {"network_evaluations": sampler.evaluations_per_image, "gflops_per_image": sampler.flops_per_image / 1e9}
            del sampler
            gc.collect()  # a compiled network is a cycle: Python would keep it on the device beside the next ones
        if accelerator.is_main_process:
            results.add(settings, metrics, cost)
            log.info("%s: %s", in_words(shown(settings)), format_metrics(metrics))
    if accelerator.is_main_process:
        sys.stdout.write(results.write([settings for settings, _ in points], metrics_of(cfg.evaluation.all_detectors[0])[0].name))
        lock.close()
    accelerator.end_training()


def find_checkpoints(cfg: schema.FidConfig) -> list[Path]:
    """The verified checkpoints that the command names."""
    if cfg.checkpoints is None:
        return [checkpoints.find_checkpoint(Path(folder), "checkpoint") for folder in as_list(cfg.checkpoint) if folder]
    folders = list(checkpoints.list_steps(Path(cfg.checkpoints) / "checkpoints").values())
    if not folders:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    for folder in folders:
        checkpoints.verify(folder)
    return folders


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def with_settings_of_run(cfg: schema.FidConfig, run_cfg: schema.TrainConfig | None) -> schema.FidConfig:
    """Take from the run what the command leaves open: reference, detector, and weights if the detector is the run's."""
    own, stored = cfg.evaluation, run_cfg.evaluation.model_dump() if run_cfg else {"detector": "inception"}
    if own.detector not in (None, stored["detector"]):
        stored["weights"] = None
    given = {key: getattr(own, key) or stored.get(key) for key in ("detector", "weights", "dinov2_weights")}
    evaluation = own.model_copy(update=given)
    return cfg.model_copy(update={"evaluation": evaluation, "reference": cfg.reference or stored.get("reference")})


def sweep(
    cfg: schema.FidConfig, runs: dict[Path, schema.TrainConfig], guidances: list[schema.Guidance], accelerator: Accelerator
) -> list[tuple[dict, Callable[[], ImageSampler]]]:
    """The points: all combinations of what the command lists, each checked against its checkpoint.

    Returns:
        of each point, its settings as results.jsonl holds them, and what loads its sampler.

    Raises:
        UserError: a setting that the checkpoint's diffusion does not have, or a guidance that it cannot have.
    """
    points = []
    choices = schema.combinations({key: getattr(cfg, key) for key in SWEPT_OF_SAMPLER})
    for folder, run_cfg in runs.items():
        found = {}  # each second checkpoint once: to verify it reads the whole file
        for weights, guidance, overrides in itertools.product(as_list(cfg.weights), guidances, choices):
            if guidance.name == "autoguidance":
                if guidance.checkpoint not in found:
                    found[guidance.checkpoint] = load.find_second_checkpoint(guidance, run_cfg, accelerator).checkpoint
                guidance = guidance.model_copy(update={"checkpoint": found[guidance.checkpoint]})
            diffusion = schema.sampler_with(run_cfg.diffusion, **overrides)
            load.check_guidance(guidance, run_cfg, diffusion)
            sampler = {key: getattr(diffusion.sampler, key) for key in SWEPT_OF_SAMPLER if hasattr(diffusion.sampler, key)}
            settings = {"checkpoint": str(folder), "weights": weights, **guidance_settings(guidance), **sampler}
            options = {"weights": weights, "diffusion": diffusion, "command": cfg}
            points.append((settings, partial(load.load_sampler, folder, run_cfg, guidance, accelerator.device, **options)))
    return points


def guidance_settings(guidance: schema.Guidance) -> dict:
    """Guidance in the settings of a point: cfg_scale alone means none or cfg; others have `guidance` and `guidance.*`."""
    own = guidance.model_dump(exclude={"name"}, exclude_defaults=True)
    if guidance.name == "none" or own.keys() == {"cfg_scale"}:
        return {"cfg_scale": own.get("cfg_scale", 1.0)}
    scale = {"cfg_scale": own.pop("cfg_scale")} if "cfg_scale" in own else {}
    return {"guidance": guidance.name, **scale, **{f"guidance.{key}": value for key, value in own.items()}}


def shown(settings: dict) -> dict:
    """A point's settings as tables and plots show them: run and step of a checkpoint, the name of images."""
    if "images" in settings:
        return {"images": Path(settings["images"]).name}
    checkpoint = Path(settings["checkpoint"])
    run = checkpoints.run_of(checkpoint) or checkpoint.resolve().parent
    others = {name: value for name, value in settings.items() if name != "checkpoint"}
    return {"run": run.name, "step": checkpoints.step_of(checkpoint), **others}


def in_words(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


class Results:
    """The finished points of a folder: results.jsonl, and the table and plot made of them.

    Two points are the same if their settings, the content of their checkpoint or images, and the conditions are.

    Args:
        conditions: what all points share: the number of samples, the detector, the reference and so on.
        images: the fingerprint of images on disk; None for checkpoints.
    """

    def __init__(self, folder: Path, conditions: dict, images: str | None):
        self.folder, self.conditions, self.images = folder, conditions, images
        self.file = folder / "results.jsonl"
        self.lines = [line for _, line in read_lines(self.file) if line and "point" in line and "metrics" in line]

    def _key(self, settings: dict) -> dict:
        content = checkpoints.identity(Path(settings["checkpoint"])) if "checkpoint" in settings else self.images
        if "guidance.checkpoint" in settings:
            content += checkpoints.identity(Path(settings["guidance.checkpoint"]))
        return json.loads(json.dumps({**settings, **self.conditions, "content": content}))

    def find(self, settings: dict) -> dict | None:
        """The line of results.jsonl; None if the point of these settings is not finished."""
        key = self._key(settings)
        return next((line for line in self.lines if line["point"] == key), None)

    def add(self, settings: dict, metrics: dict[str, float], cost: dict[str, float]) -> None:
        line = {"point": self._key(settings), "metrics": metrics} | ({"cost": cost} if cost else {})
        append_line(self.file, line)
        self.lines.append(line)

    def write(self, points: list[dict], plotted: str) -> str:
        """Write results.csv, results.md and, for a sweep, results.png of finished points; returns the Markdown.

        Args:
            points: their settings.
            plotted: the metric of the plot.
        """
        lines, settings = list(map(self.find, points)), list(map(shown, points))
        count = {"num_samples": self.conditions["num_samples"]}
        rows = [own | count | line["metrics"] | line.get("cost", {}) for own, line in zip(settings, lines)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.folder / "results.csv", text.getvalue())
        table = markdown_table(names, [[format_cell(name, row.get(name, "")) for name in names] for row in rows])
        write_file(self.folder / "results.md", table)
        if len(points) > 1:
            png = plot(settings, [line["metrics"][plotted] for line in lines], display_name(plotted, count["num_samples"]))
            write_file(self.folder / "results.png", png)
        return table


def format_cell(name: str, value: object) -> str:
    return format_metric(name, value) if isinstance(value, float) else str(value)


def default_folder(cfg: schema.FidConfig, folders: list[Path]) -> Path:
    """<run>/evaluations; beside a checkpoint that lies in no run; <images>_evaluations beside images."""
    if not folders:
        images = Path(cfg.images).resolve()
        return images.with_name(f"{images.name}_evaluations")
    checkpoint = folders[0].resolve()
    folder = (checkpoints.run_of(checkpoint) or checkpoint.parent) / "evaluations"
    if folder == Path(evaluations.__file__).parent:  # a checkpoint in the repository's own folder: never among the source files
        return checkpoint.with_name(f"{checkpoint.name}_evaluations")
    return folder


def plot(settings: list[dict], values: list[float], label: str) -> bytes:
    """PNG of the metric against the setting with the most values, with a line for each combination of the others."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in settings for name in row)  # checkpoints of two diffusions differ in some
    choices = {name: {row.get(name) for row in settings} for name in names}
    numbers = [name for name, chosen in choices.items() if all(isinstance(value, (int, float)) for value in chosen)]
    axis = max(numbers, key=lambda name: len(choices[name]))
    others = [name for name in choices if name != axis and len(choices[name]) > 1]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    curves: dict[str, list[tuple]] = {}
    for row, value in zip(settings, values):
        curves.setdefault(in_words({name: row[name] for name in others if name in row}), []).append((row[axis], value))
    for name, curve in curves.items():
        axes.plot(*zip(*sorted(curve)), marker="o", label=name or None)
    axes.set(xlabel=axis, ylabel=label)
    axes.grid(alpha=0.3)
    if others:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, bbox_inches="tight")
    return png.getvalue()


if __name__ == "__main__":
    command_line.run(main, "fid", schema.FidConfig)
