"""Judge checkpoints, or images on disk, with ADM's evaluation suite: FID, sFID, Inception Score, precision and recall.

    python fid.py checkpoint=runs/x/checkpoints/step_0400000 reference=references/VIRTUAL_imagenet256_labeled.npz \\
        num_samples=50000 guidance=cfg cfg_scale=1.5
    python fid.py checkpoints=runs/x num_samples=5000 guidance=cfg cfg_scale=[1.0,1.25,1.5]     # a sweep
    python fid.py images=samples.npz reference=references/VIRTUAL_imagenet256_labeled.npz

A list of checkpoints, weights, cfg_scale, ema_length, num_steps, S_churn, solver or of a setting of the guidance
(guidance.w=[1.2,1.5]) makes a sweep over all combinations: tables with standard errors, and a plot. search=[cfg_scale:1:3] looks
for the best value instead. Finished points are kept; the same command again computes those that are missing.
"""

from __future__ import annotations

from configs import command_line

if __name__ == "__main__":  # before torch, whose import takes seconds that --help and a wrong key need not wait for
    command_line.run("fid:main", "fid", "configs.schema:FidConfig", __doc__, at_end="sampling.processes:leave")

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from accelerate import Accelerator

import evaluations
from common.errors import UserError
from common.files import lock_file
from configs import schema
from configs.settings import as_list
from evaluations.features import Features
from evaluations.images import ImageSet, open_images
from evaluations.results import Point, Results, in_words
from evaluations.suite import format_metrics, metrics_of
from latents import autoencoders
from sampling.evaluator import Evaluator, build_detectors, hash_weights, open_reference
from sampling.processes import check_same, check_shared, on_main
from sampling.sampler import NAMED_OF_SAMPLER, ImageSampler, labels_of, sampler_with, settings_of_sampler
from training import checkpoint as checkpoints
from training import load, machine
from training.speed import check_compile

log = logging.getLogger("fid")


def main(cfg: schema.FidConfig) -> None:
    given = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(given) or 'none of them'}")
    of_sampler = [key for key in ("cfg_scale", "ema_length", "search") if getattr(cfg, key) is not None]
    if cfg.images and of_sampler:
        raise UserError(f"{of_sampler[0]}= is for sampling from a checkpoint, and images={cfg.images} are made already")
    accelerator = machine.start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    check_compile("compile", cfg.compile, accelerator.device)
    # One process chooses: while a run trains, another could find a newer checkpoint.
    folders = on_main(lambda: find_checkpoints(cfg))
    for folder in folders:
        check_shared(folder / checkpoints.MANIFEST, "checkpoints" if cfg.checkpoints else "checkpoint")
    runs = {folder: load.load_config(folder) for folder in folders}
    cfg = with_settings_of_run(cfg, runs[folders[0]] if folders else None)
    images = open_images(cfg.images, cfg.convert_to_rgb, background=cfg.evaluation.background) if cfg.images else None
    if images is not None:
        check_same(images.outline(), "images", images.path)
    if images is not None and len(images) == 0:
        raise UserError(f"images={cfg.images} holds statistics and no images")
    sizes = {run_cfg.data.resolution: folder for folder, run_cfg in runs.items()}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need a command each: {in_words(sizes)}")
    resolution = images.shape[1] if images else next(iter(sizes))
    judged = cfg.evaluation.all_detectors, resolution, cfg.evaluation.background
    reference = open_reference(cfg.reference, "reference", *judged)
    num_samples = cfg.num_samples or (50_000 if images is None else len(images))
    if images and num_samples > len(images):
        raise UserError(f"num_samples={num_samples}, but {cfg.images} holds {len(images)} images; make more or lower it")
    output = Path(cfg.output) if cfg.output else default_folder(cfg, folders)
    judge = Judge(cfg, accelerator, runs, images, reference, output)
    metric, axes = metrics_of(cfg.evaluation.all_detectors[0])[0].name, ()
    if cfg.search:
        from extras import search  # the registry's line

        axes = search.open_axes(judge)
    elif images:
        points = [(Point({"images": cfg.images}, images.fingerprint(), {"images": Path(cfg.images).name}), None)]
    else:
        points = judge.sweep(cfg)
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(lock_file(output / ".lock", "evaluating into", "output"))

        on_main(lock)
        if axes:
            points, num_samples = search.search(judge, axes, metric, num_samples)
        results = judge(points, num_samples)
        if accelerator.is_main_process:
            sys.stdout.write(results.write([point for point, _ in points], metric, [axis.name for axis in axes]))


@dataclass
class Judge:
    """Evaluates points. They share detectors, features of the reference and networks."""

    cfg: schema.FidConfig
    accelerator: Accelerator
    runs: dict[Path, schema.TrainConfig]
    images: ImageSet | None
    reference: ImageSet
    output: Path
    _second_checkpoints: dict = field(default_factory=dict)  # of autoguidance: to verify one reads the whole file

    @cached_property
    def evaluator(self) -> Evaluator:
        for run_cfg in self.runs.values():  # before a detector and a reference that take minutes
            autoencoders.find(self.cfg.autoencoder or run_cfg.data.autoencoder)
        detectors = build_detectors(self.cfg.evaluation, self.accelerator)
        # Runs lie side by side and often share a reference.
        run = None if self.cfg.output or not self.runs else checkpoints.run_of(next(iter(self.runs)))
        cache = (run.parent if run else self.output) / "reference_features"
        return Evaluator(self.accelerator, detectors, self.reference, self.cfg.batch_size, cache)

    def results(self, num_samples: int) -> Results:
        """The finished points of this number of samples."""
        conditions = {"num_samples": num_samples, **self.same_for_all}
        if not self.images:
            conditions |= {"first_seed": self.cfg.first_seed, "labels": self.cfg.labels}
        about = {key: conditions[key] for key in ("detector", "num_samples", "first_seed", "labels") if key in conditions}
        conditions["reference"] = self.reference.fingerprint()
        return Results(self.output, conditions, {"reference": Path(self.cfg.reference).name, **about})

    @cached_property
    def same_for_all(self) -> dict:
        """What features depend on, beside their point and their seed."""
        detectors = self.cfg.evaluation
        about = {"autoencoder": self.cfg.autoencoder, "detector": "+".join(detectors.all_detectors)}
        return about | hash_weights(detectors)

    def __call__(self, points: Sequence[tuple[Point, Callable | None]], num_samples: int) -> Results:
        """Evaluate those points that are not finished."""
        results = self.results(num_samples)
        missing = on_main(lambda: [i for i, (point, _) in enumerate(points) if not results.find(point)])
        log.info("%d of %d evaluations to do, in %s", len(missing), len(points), self.output)
        finished = []

        def finish(point: Point, features: list[Features], labels: Sequence[int] | None, metrics: dict, cost: dict) -> None:
            results.add(point, metrics, self.evaluator.jackknife(features, labels, num_groups=10), cost)
            log.info("%s: %s", in_words(point.shown), format_metrics(metrics))

        with ThreadPoolExecutor(1) as thread:  # the main process computes errors while the next point is sampled
            for number, (point, load_sampler) in enumerate((points[i] for i in missing), start=1):
                on_main(lambda: [one.result() for one in finished if one.done()])
                features, labels, cost = self.features(point, load_sampler, num_samples, f"point {number} of {len(missing)}")
                metrics = on_main(partial(self.evaluator.evaluate, features, labels))
                if self.accelerator.is_main_process:
                    finished.append(thread.submit(finish, point, features, labels, metrics, cost))
        on_main(lambda: [one.result() for one in finished])
        return results

    def features(self, point: Point, load_sampler: Callable | None, num_samples: int, name: str) -> tuple:
        """Features of a point, the labels that were asked for, and the cost of an image."""
        if self.images:
            labels = self.images.labels
            return self.evaluator.features_of_set(self.images, num_samples), None if labels is None else labels[:num_samples], {}
        num_classes = self.runs[Path(point.settings["checkpoint"])].data.num_classes
        labels = labels_of(range(self.cfg.first_seed, self.cfg.first_seed + num_samples), num_classes, self.cfg.labels)
        if self.cfg.keep_features:
            from extras import kept_features  # the registry's line

            where = self.output / "features", [point.identity, self.cfg.labels, self.same_for_all]
            features, cost = kept_features.features_of_samples(self.evaluator, load_sampler, labels, name, *where)
        else:
            sampler = load_sampler()
            features, cost = self.evaluator.features_of_samples(sampler, labels, name=name), sampler.cost
        return features, list(labels.values()), cost

    def sweep(self, cfg: schema.FidConfig) -> list[tuple[Point, Callable[[], ImageSampler]]]:
        """The points: all combinations of what `cfg` lists, each checked against its checkpoint.

        Returns:
            Each point, and what loads its sampler.

        Raises:
            UserError: a setting that the checkpoint's diffusion does not have, or a guidance that it cannot have.
        """
        points = []
        choices = schema.combinations({key: getattr(cfg, key) for key in NAMED_OF_SAMPLER})
        guidances = [load.with_scale(guidance, scale) for guidance in cfg.guidance for scale in as_list(cfg.cfg_scale)]
        lists = as_list(cfg.weights), as_list(cfg.ema_length), guidances, choices
        for folder, run_cfg in self.runs.items():
            for weights, ema_length, guidance, overrides in itertools.product(*lists):
                if guidance.name == "autoguidance":
                    key = folder, guidance.checkpoint
                    if key not in self._second_checkpoints:
                        self._second_checkpoints[key] = load.find_second_checkpoint(guidance, run_cfg).checkpoint
                    guidance = guidance.model_copy(update={"checkpoint": self._second_checkpoints[key]})
                diffusion = sampler_with(run_cfg.diffusion, **overrides)
                load.check_guidance(guidance, run_cfg, diffusion)
                settings = {"weights": weights, **guidance_settings(guidance), **settings_of_sampler(diffusion)}
                content = checkpoints.identity(folder)
                if ema_length is not None:
                    from extras import posthoc_ema  # the registry's line

                    settings["ema_length"] = ema_length
                    content += posthoc_ema.check_length(folder, weights, ema_length)
                if guidance.name == "autoguidance":
                    content += checkpoints.identity(Path(guidance.checkpoint))
                run = checkpoints.run_of(folder) or folder.resolve().parent
                shown = {"run": run.name, "step": checkpoints.step_of(folder), **settings}
                precision = cfg.precision or run_cfg.eval.precision
                options = {"weights": weights, "ema_length": ema_length, "diffusion": diffusion, "precision": precision}
                loader = partial(load.load_sampler, folder, run_cfg, guidance, self.accelerator.device, command=cfg, **options)
                point = Point({"checkpoint": str(folder), **settings, "precision": precision}, content, shown)
                if point.identity not in (known.identity for known, _ in points):  # intervals of cfg_scale=1 are one point
                    points.append((point, loader))
        return points


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


def with_settings_of_run(cfg: schema.FidConfig, run_cfg: schema.TrainConfig | None) -> schema.FidConfig:
    """Take from the run what the command leaves open: reference, detector, and weights if the detector is the run's."""
    own, stored = cfg.evaluation, run_cfg.evaluation.model_dump() if run_cfg else {"detector": "inception"}
    if own.detector not in (None, stored["detector"]):
        stored["weights"] = None
    given = {key: getattr(own, key) or stored.get(key) for key in ("detector", "weights", "dinov2_weights")}
    given["background"] = own.background or stored.get("background") or "white"
    evaluation = own.model_copy(update=given)
    return cfg.model_copy(update={"evaluation": evaluation, "reference": cfg.reference or stored.get("reference")})


def guidance_settings(guidance: schema.Guidance) -> dict:
    """Guidance in the settings of a point: cfg_scale alone means none (1) or cfg; others have `guidance` and `guidance.*`."""
    if guidance.name == "none" or getattr(guidance, "cfg_scale", None) == 1:
        return {"cfg_scale": 1.0}
    own = guidance.model_dump(exclude={"name"}, exclude_defaults=True)
    if own.keys() == {"cfg_scale"}:
        return own
    scale = {"cfg_scale": own.pop("cfg_scale")} if "cfg_scale" in own else {}
    return {"guidance": guidance.name, **scale, **{f"guidance.{key}": value for key, value in own.items()}}


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
