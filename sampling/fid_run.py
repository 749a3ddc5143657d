"""Make the evaluations of checkpoints that `sampling.fid_plan` has planned, and write tables of results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from accelerate import Accelerator

from configs.schema import SharedEvaluationSettings
from evaluations.features import Features
from evaluations.record import EvaluationRecord, PlannedEvaluation, Results, lowest_figure
from evaluations.suite import format_metrics, primary_metric
from evaluations.tables import ResultsTable, format_settings, write_tables
from latents import autoencoders
from runtime.processes import on_main
from sampling.evaluator import Evaluator, build_evaluator
from sampling.fid_plan import FidPlan, FidPoint, TableRow
from sampling.score import score_samples

log = logging.getLogger(__name__)

NUM_GROUPS = 10  # groups of samples for the jackknife


def evaluate_points(plan: FidPlan, accelerator: Accelerator) -> None:
    """Evaluate the points that have no results yet. Every process must call this function."""
    if not plan.missing:
        return
    log_if_no_errors([point.planned for point in plan.missing])
    for autoencoder in dict.fromkeys(point.recipe.config.sampling.autoencoder for point in plan.missing):
        autoencoders.find_weights(autoencoder)  # fail early, because loading the detectors takes minutes
    with ThreadPoolExecutor(1) as thread:
        runner = PointRunner(plan, accelerator, thread)
        for number, point in enumerate(plan.missing, 1):
            if on_main(partial(runner.is_missing, point)):
                runner.evaluate(point, f"point {number} of {len(plan.missing)}")
    on_main(runner.finish)


class PointRunner:
    """Evaluates one point after another. On the main process, `thread` computes the standard errors and stores the results.

    Points that another command has stored meanwhile are skipped. So are points of checkpoints that a running trainer has removed
    meanwhile, if there are several checkpoints.
    """

    def __init__(self, plan: FidPlan, accelerator: Accelerator, thread: ThreadPoolExecutor):
        self.plan, self.accelerator, self._thread = plan, accelerator, thread
        self.has_several = len({point.recipe.checkpoint for point in plan.points}) > 1
        self._storing: list[Future] = []  # filled only on the main process
        self._evaluator: Evaluator | None = None  # built by the first point, after its network is loaded

    def is_missing(self, point: FidPoint) -> bool:
        """Return whether a point is still to evaluate. Raises an error of the thread, such as one of a full disk."""
        for future in self._storing:
            if future.done():
                future.result()
        if point.find():
            log.info("%s: another command has stored this point", describe_point(point, self.plan))
            return False
        if self.has_several and not point.recipe.checkpoint.path.exists():
            log.warning("%s was removed meanwhile; this point is left out", point.recipe.checkpoint.path)
            return False
        return True

    def evaluate(self, point: FidPoint, title: str) -> None:
        """Score a point. Its record is stored while the next point is sampled."""
        plan, recipe = self.plan, point.recipe
        image_sampler = recipe.load_image_sampler(self.accelerator.device, plan.machine.compile)
        if self._evaluator is None:
            cache = plan.points[0].results.reference_cache
            self._evaluator = build_evaluator(plan.evaluation, self.accelerator, plan.reference, plan.batch_size, cache)
        scored = score_samples(self._evaluator, image_sampler, point.planned, recipe.checkpoint.class_names, name=title)
        if self.accelerator.is_main_process:
            described = describe_point(point, plan)
            self._storing.append(self._thread.submit(store_scored, self._evaluator, point.results, described, *scored))

    def finish(self) -> None:
        """Wait until all results are stored. The main process calls this method."""
        for future in self._storing:
            future.result()


def describe_point(point: FidPoint, plan: FidPlan) -> str:
    """Return the settings in which a point differs from the others."""
    differing = {key: x for key, x in plan.columns(point).items() if key in plan.differing_columns}
    return format_settings({"step": point.planned.step, **differing})


def log_if_no_errors(planned: Sequence[PlannedEvaluation]) -> None:
    """Log that evaluations of few samples have no standard errors."""
    if any(evaluation.settings["num_samples"] < 2 * NUM_GROUPS for evaluation in planned):
        log.info("no standard errors: they need at least %d samples", 2 * NUM_GROUPS)


def store_scored(
    evaluator: Evaluator,
    results: Results,
    described: str,
    record: EvaluationRecord,
    features: list[Features],
    labels: Sequence[int] | None,
) -> None:
    """Compute the standard errors of scored images, log the figures, and add the record to the results."""
    errors = evaluator.jackknife(features, labels, NUM_GROUPS)
    log.info("%s: %s", described, format_metrics(record.metrics))  # first, because writing may fail
    results.add(record.model_copy(update={"jackknife": errors}))


def write_results(rows: Sequence[TableRow], evaluation: SharedEvaluationSettings) -> float | None:
    """Write the tables and plots of a command's evaluations, and print a table. The main process calls this function.

    Return the lowest value of the first metric, which sweepers minimise.
    """
    metric = primary_metric(evaluation.all_detectors)
    for results in dict.fromkeys(row.results for row in rows):
        write_tables(results, [(row.planned, row.columns) for row in rows if row.results is results], metric)
    found = [(record, row.columns) for row in rows if (record := row.results.find(row.planned))]
    sys.stdout.write(ResultsTable(*zip(*found), metric).terminal() if found else "")
    return lowest_figure((record for record, _ in found), metric)
