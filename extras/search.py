"""`fid.py search=`: the best value of one or two settings of the sampler, with fewer evaluations than a grid."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy.optimize import minimize_scalar

from common.errors import UserError
from configs.settings import validate
from evaluations.results import in_words
from runtime.processes import on_main
from sampling.judge import Judge

log = logging.getLogger(__name__)

GUIDANCE = ("w", "level_lo", "level_hi", "r_strong", "r_weak")
NAMES = ("cfg_scale", "ema_length", *(f"guidance.{key}" for key in GUIDANCE))  # besides the settings of the sampler
TOLERANCE = 0.05  # of an optimum, as a fraction of the range
MAX_TURNS = 3


class Axis(NamedTuple):
    name: str
    low: float
    high: float


def parse(texts: Sequence[str], names: Sequence[str]) -> list[Axis]:
    """`cfg_scale:1:3` -> Axis("cfg_scale", 1.0, 3.0). Raises UserError for a wrong form or name, or for more than two."""
    axes = []
    for text in texts:
        name, *bounds = text.split(":")
        try:
            low, high = map(float, bounds)
        except ValueError:
            low = high = 0.0
        if name not in names or not -math.inf < low < high < math.inf:
            raise UserError(f"search={text} is not <setting>:<lowest>:<highest>, with one of {', '.join(names)}")
        axes.append(Axis(name, low, high))
    if len({axis.name for axis in axes}) < len(axes) or len(axes) > 2:
        raise UserError(f"search={list(texts)} must name one setting or two different ones")
    return axes


def minimise(axes: Sequence[Axis], function: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
    """The point with the lowest value of a function of one or two settings, among the points tried.

    Brent's method searches one setting at a time, in turns until no setting moves by more than TOLERANCE of its range. From the
    second turn on, it searches half of the range around the best value. A deterministic function gives the same points again, so
    an interrupted search can resume.
    """
    tried: dict[tuple[float, ...], float] = {}
    best = tuple((axis.low + axis.high) / 2 for axis in axes)
    for turn in range(MAX_TURNS if len(axes) > 1 else 1):
        before = best
        for i, axis in enumerate(axes):

            def along(value: float, i: int = i, others: tuple[float, ...] = best) -> float:
                point = (*others[:i], float(f"{value:.3g}"), *others[i + 1 :])  # short numbers in tables
                if point not in tried:
                    tried[point] = function(point)
                return tried[point]

            span, (low, high) = axis.high - axis.low, axis[1:]
            if turn > 0:
                low, high = max(low, best[i] - span / 4), min(high, best[i] + span / 4)
            minimize_scalar(along, bounds=(low, high), method="bounded", options={"xatol": TOLERANCE * span})
            best = min(tried, key=tried.__getitem__)
        if all(abs(new - old) <= TOLERANCE * (axis.high - axis.low) for axis, new, old in zip(axes, best, before)):
            break
    return best


def open_axes(judge: Judge) -> list[Axis]:
    """The settings to search, with bounds checked against the checkpoint.

    Raises:
        UserError: a setting, a bound or their number is not accepted; the command names no checkpoint or several points.
    """
    of_sampler = [key for key in judge.cfg.sampler_settings if key not in ("num_steps", "solver")]
    axes = parse(judge.cfg.search, (*NAMES, *of_sampler))
    if both := [axis.name for axis in axes if getattr(judge.cfg, axis.name, None) is not None]:
        raise UserError(f"{both[0]}= and search={both[0]} cannot be combined; give one of them")
    for corner in itertools.product(*((axis.low, axis.high) for axis in axes)):
        if len(points_at(judge, axes, corner)) != 1:
            raise UserError("search= needs exactly one point: give one checkpoint= and no lists of settings")
    return axes


def points_at(judge: Judge, axes: Sequence[Axis], values: Sequence[float]) -> list:
    """The points of the command with these values. Raises UserError for a value that is not accepted."""
    sampler, guidance = {}, {}
    for axis, value in zip(axes, values):
        (guidance if "." in axis.name else sampler)[axis.name.removeprefix("guidance.")] = value
    checked = [validate(settings.model_dump() | guidance, type(settings)) for settings in judge.cfg.guidance]
    return judge.points(judge.cfg.model_copy(update={"guidance": checked, **sampler}))


def search(judge: Judge, axes: Sequence[Axis], metric: str, num_samples: int) -> tuple[list, int]:
    """Find the settings with the lowest `metric` on few samples, then evaluate them with `num_samples`.

    Returns:
        The points tried, and their number of samples.
    """
    points = []
    num_coarse = judge.cfg.search_num_samples or min(max(num_samples // 10, 1000), num_samples)

    def function(values: Sequence[float]) -> float:
        points.extend(points_at(judge, axes, values))
        results = judge(points[-1:], num_coarse)
        return on_main(lambda: results.find(points[-1][0])["metrics"][metric])

    best = minimise(axes, function)
    log.info("lowest %s of %d points: %s", metric, len(points), in_words({axis.name: x for axis, x in zip(axes, best)}))
    for axis, x in zip(axes, best):
        if min(x - axis.low, axis.high - x) <= TOLERANCE * (axis.high - axis.low):
            log.warning("%s %g is at an end of search=%s:%g:%g; widen the range", axis.name, x, *axis)
    judge(points_at(judge, axes, best), num_samples)
    return points, num_coarse
