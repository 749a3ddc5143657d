"""Plan and make the evaluation of images on disk by fid.py (images=...)."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from common.errors import UserError, prefix_errors
from common.files import hash_bytes
from common.images import are_same_colour
from configs.sampling_schema import FidConfig
from configs.schema import Machine, SharedEvaluationSettings
from configs.settings import override
from evaluations.images import ImageSet
from evaluations.record import PlannedEvaluation, Results
from evaluations.suite import metrics_for
from evaluations.tables import columns_of, format_settings
from latents.image_sets import open_image_set
from runtime.processes import FileFingerprint, on_main
from sampling.evaluator import build_evaluator, fingerprint_weights, open_reference
from sampling.fid_plan import TableRow, given_output, log_plan
from sampling.fid_run import log_if_no_errors, store_scored
from sampling.score import score_images, scoring_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImagesPlan:
    """What fid.py evaluates with images=. The main process decides it for all processes.

    Attributes:
        planned: What the evaluation measures.
        results: The results to which its record is added.
        images: The images on disk.
        reference: Images with which they are compared.
        evaluation: The group evaluation.
        machine: The group machine.
        batch_size: Number of images in a batch.
    """

    planned: PlannedEvaluation
    results: Results
    images: ImageSet
    reference: ImageSet
    evaluation: SharedEvaluationSettings
    machine: Machine
    batch_size: int

    @property
    def rows(self) -> list[TableRow]:
        return [TableRow(self.results, self.planned, columns_of(self.planned))]

    def is_missing(self) -> bool:
        """Return whether the evaluation has no record yet."""
        return self.results.find(self.planned) is None

    def file_fingerprints(self) -> list[FileFingerprint]:
        """Return what this process sees of the files that all processes read."""
        sets = {"evaluation.reference": self.reference, "images": self.images}
        opened = [FileFingerprint(name, images.path, images.spot_check()) for name, images in sets.items()]
        return [*fingerprint_weights(self.evaluation), *opened]


def plan_image_set(cfg: FidConfig) -> ImagesPlan:
    """Open the images and the reference, and check all that can be checked before slow work."""
    images = open_images_to_evaluate(cfg)
    evaluation = cfg.evaluation_of_images(len(images), images.background)
    check_images(images, cfg.images, evaluation)
    reference = open_reference(
        evaluation.reference,
        "evaluation.reference",
        evaluation.all_detectors,
        resolution=images.shape[1],
        background=evaluation.background,
    )
    warn_of_jpegs(images, reference)
    output = output_for_images(cfg, images)
    settings = {"images": cfg.images, "images_hash": images.local_hash(), "num_samples": evaluation.num_samples}
    metrics = [metric.name for detector in evaluation.all_detectors for metric in metrics_for(detector)]
    if images.labels is not None and images.class_names and any(name.startswith("class_agreement") for name in metrics):
        settings["class_names_hash"] = hash_bytes(json.dumps(images.class_names).encode())
    planned = PlannedEvaluation(settings=settings | scoring_settings(evaluation, reference))
    plan = ImagesPlan(
        planned=planned,
        results=Results(output).ensure_writable(),
        images=images,
        reference=reference,
        evaluation=evaluation,
        machine=override(Machine(compile="none", tf32=True, cpu_threads=None), cfg.machine),
        batch_size=cfg.sampling.batch_size or 64,
    )
    log_plan(int(plan.is_missing()), plan.rows)
    return plan


def open_images_to_evaluate(cfg: FidConfig) -> ImageSet:
    with prefix_errors("images"):
        images = open_image_set(cfg.images, cfg.convert_to_rgb, background=cfg.evaluation.background or "white")
    if len(images) < 2:
        problem = "holds only one image, and a Frechet distance needs 2" if len(images) else "holds statistics but no images"
        raise UserError(f"images={cfg.images} {problem}")
    return images


def check_images(images: ImageSet, path: str, evaluation: SharedEvaluationSettings) -> None:
    """Raise UserError if images on disk were made with another background, or if there are too few."""
    if images.background is not None and not are_same_colour(images.background, evaluation.background):
        made = f"images={path} was made with background={images.background}"
        raise UserError(f"{made}, but evaluation.background={evaluation.background}")
    if evaluation.num_samples > len(images):
        problem = f"{path} holds {len(images)} images; make more, or lower it"
        raise UserError(f"evaluation.num_samples={evaluation.num_samples}, but {problem}")


def warn_of_jpegs(images: ImageSet, reference: ImageSet) -> None:
    """Warn if only one of two folders holds JPEG files."""
    formats = [{file.suffix.lower() in (".jpg", ".jpeg") for file in getattr(s, "files", ())} for s in (images, reference)]
    if {True} in formats and {False} in formats:
        message = "images=%s and evaluation.reference=%s: one set is JPEG and the other is not, which changes distances"
        log.warning(message, images.path, reference.path)


def output_for_images(cfg: FidConfig, images: ImageSet) -> Path:
    output = given_output(cfg.output) or folder_for_images(cfg.images)
    if images.path.resolve() in (output.resolve(), *output.resolve().parents):  # otherwise, results.png would become an image
        raise UserError(f"output={output} is inside images={cfg.images}; give a folder elsewhere")
    return output


def folder_for_images(images: str) -> Path:
    """Return the folder for the results of images. They never lie next to the images, where a folder would become a class."""
    return Path("runs") / "evaluations" / Path(images).resolve().name


def evaluate_images(plan: ImagesPlan, accelerator: Accelerator) -> None:
    """Score the images, unless they have a record. Every process must call this function."""
    if not on_main(plan.is_missing):
        return
    log_if_no_errors([plan.planned])
    cache = plan.results.reference_cache
    evaluator = build_evaluator(plan.evaluation, accelerator, plan.reference, plan.batch_size, cache)
    scored = score_images(evaluator, plan.images, plan.planned)
    on_main(partial(store_scored, evaluator, plan.results, format_settings({"images": plan.images.path}), *scored))
