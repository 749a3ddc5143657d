"""Make the evaluations that `sampling.points` has planned, and write tables of their results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

from accelerate import Accelerator

from evaluations.features import Features
from evaluations.record import Evaluation, lowest
from evaluations.suite import format_metrics, metrics_for
from evaluations.tables import EvaluationTable, format_settings, write_tables
from latents import autoencoders
from runtime.processes import on_main
from sampling.evaluator import Evaluator, build_detectors
from sampling.points import EvaluationPlan, Point
from sampling.score import score_images, score_samples

log = logging.getLogger(__name__)

NUM_GROUPS = 10  # groups of samples for the jackknife


def evaluate_points(plan: EvaluationPlan, accelerator: Accelerator) -> None:
    """Evaluate the points that have no results yet. Every process must call this function.

    Points that another command has stored meanwhile are skipped. So are points of checkpoints that a running trainer has removed
    meanwhile, if there are several checkpoints.
    """
    if not plan.missing:
        return
    points = [plan.points[i] for i in plan.missing]
    if any(point.cfg.evaluation.num_samples < 2 * NUM_GROUPS for point in points):
        log.info("no standard errors: they need at least %d samples", 2 * NUM_GROUPS)
    for autoencoder in dict.fromkeys(point.recipe.sampling.autoencoder for point in points if point.recipe):
        autoencoders.find_weights(autoencoder)  # fail early, because loading the detectors takes minutes
    evaluator = cache(partial(build_evaluator, plan, accelerator))  # built by the first point, after its network is loaded
    has_several = len({point.checkpoint for point in plan.points}) > 1
    finished: list[Future] = []

    def is_still_missing(point: Point) -> bool:
        for future in finished:
            if future.done():
                future.result()  # raises its error
        if point.results.find(point.wanted):
            log.info("%s: another command has stored this point", describe_point(point, plan))
            return False
        if has_several and not point.checkpoint.path.exists():
            log.warning("%s was removed meanwhile; this point is left out", point.checkpoint.path)
            return False
        return True

    def finish(point: Point, record: Evaluation, features: list[Features], labels: Sequence[int] | None) -> None:
        errors = evaluator().jackknife(features, labels, NUM_GROUPS)
        log.info("%s: %s", describe_point(point, plan), format_metrics(record.metrics))  # first, because writing may fail
        point.results.add(record.model_copy(update={"jackknife": errors}))

    with ThreadPoolExecutor(1) as thread:  # computes standard errors while we sample the next point
        for number, point in enumerate(points, 1):
            if on_main(partial(is_still_missing, point)):
                scored = score_point(point, plan, evaluator, accelerator, f"point {number} of {len(points)}")
                if accelerator.is_main_process:
                    finished.append(thread.submit(finish, point, *scored))
    on_main(lambda: [future.result() for future in finished])


def build_evaluator(plan: EvaluationPlan, accelerator: Accelerator) -> Evaluator:
    detectors = build_detectors(plan.cfg.evaluation, accelerator)
    cache = plan.points[0].results.reference_cache
    return Evaluator(accelerator, detectors, plan.reference, plan.cfg.sampling.batch_size, cache)


def score_point(
    point: Point, plan: EvaluationPlan, evaluator: Callable[[], Evaluator], accelerator: Accelerator, title: str
) -> tuple[Evaluation, list[Features], Sequence[int] | None]:
    """Return a point's record without standard errors, the features of its images, and their class labels."""
    if point.recipe is None:
        return score_images(evaluator(), plan.images, point.wanted)
    sampler = point.recipe.load_sampler(accelerator.device, point.cfg.machine.compile)
    return score_samples(evaluator(), sampler, point.wanted, point.class_names, name=title)


def describe_point(point: Point, plan: EvaluationPlan) -> str:
    """Return the settings in which a point differs from the others."""
    if point.recipe is None:
        return format_settings({"images": plan.images.path})
    differing = {key: x for key, x in point.columns.items() if len({str(other.columns.get(key)) for other in plan.points}) > 1}
    return format_settings({"step": point.wanted.step, **differing})


def write_results(plan: EvaluationPlan) -> float | None:
    """Write the tables and plots of all points, and print a table. The main process calls this function.

    Return the lowest value of the first metric, which sweepers minimise.
    """
    metric = metrics_for(plan.cfg.evaluation.all_detectors[0])[0].name
    for results in dict.fromkeys(point.results for point in plan.points):
        measured = [(point.wanted, point.columns) for point in plan.points if point.results is results]
        write_tables(results, measured, metric)
    found = [(record, point.columns) for point in plan.points if (record := point.results.find(point.wanted))]
    sys.stdout.write(EvaluationTable(*zip(*found), metric).terminal() if found else "")
    return lowest(record for record, _ in found)
