"""Print the tables of our Fashion-MNIST runs from their evaluations.

The rules for these runs and the printed tables are in results/fashion_equal_time.md and results/fashion_tokens.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np
from scipy.stats import t

from checkpoints import store
from checkpoints.load import load_run_config
from common.files import read_json, read_lines, write_atomically
from common.types import Text
from evaluations.metrics import standard_error
from evaluations.results import markdown_table, plot
from evaluations.suite import format_mean, format_metric

EQUAL_TIME, TOKENS = (Path(__file__).parent / "results" / f"fashion_{name}.jsonl" for name in ("equal_time", "tokens"))
DISTANCE, NUM_CHOOSING_SEEDS = "fd_fashion", 3
NAMES = {
    DISTANCE: "distance", "class_agreement_fashion": "agreement", "precision_fashion": "precision", "recall_fashion": "recall",
}  # fmt: skip
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "path_drop": ", path-drop 1.5"}
DENSE = ("A", "B")
ARMS = ("routed-64", "dense-64")
LOSS, SEARCH_SEED = "validation_loss", 100
CHOOSING, COMPARING = 0, 2000  # first sampling seed for choosing a guidance scale, and for all other figures

Comparison = tuple[str, Callable[[float], str], "Contrast"]


def evidence(equal_time: str = str(EQUAL_TIME), tokens: str = str(TOKENS), pictures: str | None = None) -> None:
    """Print the tables for both sets of runs. If `pictures` names a folder, also save plots over the guidance scales there."""
    for file, print_tables in ((equal_time, show_equal_time), (tokens, show_tokens)):
        print_tables(sorted(read_lines(Path(file)), key=lambda line: line["seed"]))
    if pictures:
        draw_scales(list(read_lines(Path(tokens))), Path(pictures))


def show_equal_time(lines: list[dict]) -> None:
    """Print tables of the learning rates, of each arm at its best rate, and of differences between routed arms and earlier arms.

    The intervals of the first table of differences are Welch's, and those of the second use the deviation pooled over all arms.
    A learning rate can be the best rate of an arm only if it has at least three seeds.
    """
    arms, rates = (sorted({line[key] for line in lines}) for key in ("arm", "lr"))

    def find(metric: str, arm: str, lr: float, num_samples: int = 1000, guidance: str = "none") -> list[float]:
        wanted = {"arm": arm, "lr": lr, "num_samples": num_samples, "guidance": guidance}
        return [*find_values(lines, metric, **wanted).values()]

    first = {(arm, lr): find(DISTANCE, arm, lr)[:NUM_CHOOSING_SEEDS] for arm in arms for lr in rates}
    complete = [key for key, values in first.items() if len(values) == NUM_CHOOSING_SEEDS]
    best = dict(sorted(complete, key=lambda key: (key[0], -fmean(first[key]))))  # the dict keeps the last, best rate of each arm
    show(["learning rate", *best], [[f"{lr:g}", *(mean_text(DISTANCE, first[arm, lr]) for arm in best)] for lr in rates])

    rows, differences, pooled_differences = [], [], []
    for guidance, suffix in GUIDANCES.items():
        found = {arm: [find(metric, arm, best[arm], 2000, guidance) for metric in NAMES] for arm in best}
        found = {arm: columns for arm, columns in found.items() if all(columns)}
        for arm, columns in found.items():
            rows.append([arm + suffix, f"{best[arm]:g}", str(len(columns[0])), *map(mean_text, NAMES, columns)])
        spreads = [pooled_deviation(column) for column in zip(*found.values())]
        for other, arm in combinations(found, 2):
            if arm not in DENSE:
                groups = [[(1, ours), (-1, theirs)] for ours, theirs in zip(found[arm], found[other])]
                welch, pooled = map(Contrast.welch, groups), map(Contrast.of, groups, spreads)
                for table, pairs in ((differences, welch), (pooled_differences, pooled)):
                    texts = [pair.text(lambda x, metric=metric: format_metric(metric, x)) for metric, pair in zip(NAMES, pairs)]
                    table.append([f"{arm} - {other}{suffix}", *texts])
    show(["", "learning rate", "seeds", *NAMES.values()], rows)
    for table in (differences, pooled_differences):
        show(["", *NAMES.values()], table)


def show_tokens(lines: list[dict]) -> None:
    """Print tables of the losses, the arms, the guidance scales, the outcomes, and ratios of routed to dense arms."""
    show_losses([line for line in lines if LOSS in line["metrics"]])
    for first_seed in (COMPARING, CHOOSING):
        show_arms([line for line in lines if line.get("first_seed") == first_seed])
    primary, other = compare(lines)
    columns = ["95% interval", "degrees of freedom"]
    corrected = [f"{p:.2g}" for p in holm([contrast.p_value for *_, contrast in primary])]
    rows = [[[name, contrast.text(shown), str(contrast.df)] for name, shown, contrast in part] for part in (primary, other)]
    show(["primary outcome", *columns, "p (Holm)"], [[*row, p] for row, p in zip(rows[0], corrected)])
    show(["other comparison", *columns], rows[1])
    show_ratios(lines)


def show_ratios(lines: list[dict]) -> None:
    """Print routed / dense ratios: of validation losses after 3,000 steps by noise level, and of median step times by seed."""
    at_end = [line for line in lines if LOSS in line["metrics"] and line["step"] == 3000]
    by_level = [[line["validation_loss_by_level"] for line in at_end if line["arm"] == arm] for arm in ARMS]
    ratios = np.divide(*(np.mean(levels, axis=0) for levels in by_level)) if all(by_level) else []
    show(["noise level", *map(str, range(1, len(ratios) + 1))], [["validation loss", *(f"{ratio:.3f}" for ratio in ratios)]])
    speeds = {(line["arm"], line["seed"]): median(line["steps_per_sec"]) for line in lines if "steps_per_sec" in line}
    rows = []
    for tokens in ("256", "64"):
        seeds = sorted(seed for arm, seed in speeds if arm == f"routed-{tokens}" and seed != SEARCH_SEED)
        times = [f"{speeds[f'dense-{tokens}', seed] / speeds[f'routed-{tokens}', seed]:.2f} (seed {seed})" for seed in seeds]
        rows.append([f"routed-{tokens}", ", ".join(times)])
    show(["", "time of a step"], rows)


def show_losses(lines: list[dict]) -> None:
    rows = []
    runs = {(line["seed"] == SEARCH_SEED, line["arm"], line["lr"], line["step"]) for line in lines}
    for is_search, arm, lr, step in sorted(runs):
        found = find_values(lines, LOSS, arm=arm, lr=lr, step=step)
        values = [value for seed, value in found.items() if (seed == SEARCH_SEED) == is_search]
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        seeds = "search" if is_search else str(len(values))
        rows.append([arm, seeds, f"{lr:g}", f"{step:,}", f"{fmean(values):.4f}{spread}"])
    show(["", "seeds", "learning rate", "step", "validation loss"], rows)


def show_arms(lines: list[dict]) -> None:
    rows = []
    for arm, step, scale in sorted({(line["arm"], line["step"], line["cfg_scale"]) for line in lines}):
        found = [[*find_values(lines, metric, arm=arm, step=step, cfg_scale=scale).values()] for metric in NAMES]
        rows.append([arm, f"{step:,}", f"{scale:g}", str(len(found[0])), *map(mean_text, NAMES, found)])
    show(["", "step", "cfg_scale", "seeds", *NAMES.values()], rows)


def compare(lines: list[dict]) -> tuple[list[Comparison], list[Comparison]]:
    """Return the primary outcomes and other comparisons. Each has a name, a function that formats an estimate, and a contrast.

    Outcome 1 uses all training seeds of each arm, because the rule plans fewer seeds with 256 tokens. The others use the seeds
    that all of their arms share. Comparisons with fewer than two seeds are omitted.
    """

    def find(*conditions: dict, metric: str = DISTANCE, transform: Callable[[float], float] = log) -> list[list[float]]:
        """For each condition, return the transformed metric of the training seeds that all conditions share."""
        found = [find_values(lines, metric, **condition) for condition in conditions]
        seeds = sorted(set.intersection(*map(set, found)))
        return [[transform(values[seed]) for seed in seeds] for values in found]

    def at(step: int, *arms: str) -> list[dict]:
        return [{"arm": arm, "step": step, "first_seed": COMPARING, "cfg_scale": 1.0} for arm in arms]

    four, ends = at(2000, "routed-256", "dense-256", *ARMS), at(3000, "routed-64-end", "routed-64")
    scales = sorted({line["cfg_scale"] for line in lines if line.get("first_seed") == CHOOSING})
    columns = find(*({"arm": arm, "first_seed": CHOOSING, "cfg_scale": scale} for arm in ARMS for scale in scales))
    curves = columns[: len(scales)], columns[len(scales) :]  # for each arm, one list per scale
    chosen = [scales[int(np.argmin(np.exp(curve).mean(axis=1)))] for curve in curves]
    best = [[best_scale(scales, one_seed) for one_seed in zip(*curve)] for curve in curves]
    compared = [{"step": 3000, "arm": arm, "cfg_scale": scale} for arm, scale in zip(ARMS, chosen)]
    guided, choosing = (find(*({**about, "first_seed": first} for about in compared)) for first in (COMPARING, CHOOSING))
    recall = find(*ends, metric="recall_fashion", transform=float)
    validation = find(*({"arm": arm, "step": 3000} for arm in ARMS), metric=LOSS)
    ratio, words = (lambda x: f"{exp(x):.2f}"), "ratio of distances, routed / dense"
    tokens, signs = [find(condition)[0] for condition in four], (1, -1, -1, 1)
    primary = (
        (f"1. {words}, with 256 tokens / with 64", ratio, [*zip(signs, tokens)]),
        (f"2a. {words}, at the scales {chosen[0]:g} / {chosen[1]:g}", ratio, [*zip(signs, guided)]),
        ("2b. best scale, routed - dense", "{:.2f}".format, [*zip(signs, best)]),
        ("3. ratio of distances, dense end / routed to the end", ratio, [paired(*find(*ends))]),
    )
    other = (
        ("1, with the seeds that all four arms share", ratio, [*zip(signs, find(*four))]),
        ("2a, with the samples that chose the scales", ratio, [*zip(signs, choosing)]),
        ("2a, unguided", ratio, [*zip(signs, find(*at(3000, *ARMS)))]),
        ("3, with the deviation pooled over both arms", ratio, [*zip(signs, find(*ends))]),
        ("recall, dense end - routed to the end", "{:.3f}".format, [paired(*recall)]),
        ("ratio of validation losses after 3,000 steps, routed / dense, 64 tokens", ratio, [*zip(signs, validation)]),
    )
    return tuple(
        [(name, shown, Contrast.of(groups)) for name, shown, groups in part if len(groups[0][1]) > 1] for part in (primary, other)
    )


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, list[float]]:
    """Return the differences of two arms by training seed as one group with a weight of 1."""
    return 1, [a - b for a, b in zip(ours, theirs)]


def draw_scales(lines: list[dict], folder: Path) -> None:
    """Plot distance against guidance scale, and precision against recall at the same scales, as means over training seeds."""
    chosen = [line for line in lines if line.get("first_seed") == CHOOSING]
    points = [{"arm": arm, "cfg_scale": scale} for arm, scale in sorted({(line["arm"], line["cfg_scale"]) for line in chosen})]
    found = {metric: [[*find_values(chosen, metric, **point).values()] for point in points] for metric in NAMES}
    means = {NAMES[metric]: [fmean(values) for values in columns] for metric, columns in found.items()}
    deviations = {NAMES[metric]: [pooled_deviation([values])[0] for values in columns] for metric, columns in found.items()}
    write_atomically(folder / "fashion_scales.png", plot(points, means["distance"], deviations["distance"], "distance"))
    recalls = [{"arm": point["arm"], "recall": recall} for point, recall in zip(points, means["recall"])]
    curve = plot(recalls, means["precision"], deviations["precision"], "precision")
    write_atomically(folder / "fashion_precision_recall.png", curve)


def collect(runs: Text = "runs", output: Text = str(TOKENS)) -> None:
    """Write all evaluations of the runs named search_<arm>_<rate> or <arm>_seed<seed> to a JSON Lines file."""
    lines = []
    for run in sorted(folder for folder in Path(runs).iterdir() if re.search("^search_|_seed", folder.name)):
        cfg, start = load_run_config(run), next(read_lines(run / "starts.jsonl"))
        arm = run.name.removeprefix("search_").rpartition("_")[0]
        about = {"arm": arm, "seed": cfg.seed, "lr": cfg.train.lr, "commit": start["commit"]}
        manifests = {step: folder / store.MANIFEST for step, folder in store.list_steps(run / "checkpoints").items()}
        weights = {step: {"ema": read_json(file)["ema.safetensors"]["blake2b"]} for step, file in manifests.items()}
        speeds = []
        for line in read_lines(run / "metrics.jsonl"):
            if "steps_per_sec" in line:
                speeds.append(line["steps_per_sec"])
            if "metrics" in line:
                kept = {key: line[key] for key in ("step", "metrics", "validation_loss_by_level")}
                lines.append(about | kept | weights[line["step"]])
        for line in read_lines(run / "evaluations" / "results.jsonl"):
            kept = {"step": line["shown"]["step"], "cfg_scale": line["shown"]["cfg_scale"], "metrics": line["metrics"]}
            errors = {name: standard_error(values) for name, values in line["jackknife"].items()}
            lines.append(about | line["about"] | kept | {"standard_errors": errors} | weights[kept["step"]])
        lines.append(about | {"steps_per_sec": speeds, "metrics": {}})
    write_atomically(Path(output), "".join(json.dumps(line) + "\n" for line in lines))


def find_values(lines: list[dict], metric: str, **wanted: object) -> dict[int, float]:
    """Return the metric by training seed, for all lines that contain the `wanted` entries."""
    found = [line for line in lines if metric in line["metrics"] and wanted.items() <= line.items()]
    return {line["seed"]: line["metrics"][metric] for line in found}


def best_scale(scales: Sequence[float], curve: Sequence[float]) -> float:
    """Return the minimum of a parabola through the lowest point and its neighbours. At either end, return the lowest point."""
    lowest = int(np.argmin(curve))
    if lowest in (0, len(scales) - 1):
        return scales[lowest]
    near = slice(lowest - 1, lowest + 2)
    square, linear, _ = np.polyfit(scales[near], curve[near], 2)
    return float(-linear / (2 * square))


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    sys.stdout.write(markdown_table(columns, rows) + "\n")


def mean_text(metric: str, values: Sequence[float]) -> str:
    return format_mean(metric, values) if values else ""


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Compute the pooled standard deviation within groups, which assumes equal variances, and its degrees of freedom."""
    df = sum(len(values) - 1 for values in groups)
    squares = sum((x - fmean(values)) ** 2 for values in groups for x in values)
    return sqrt(squares / df) if df else float("nan"), df


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of group means, where each group is a set of runs."""

    estimate: float
    error: float  # standard error of the estimate
    df: float  # degrees of freedom of the standard error

    @staticmethod
    def of(groups: Sequence[tuple[float, Sequence[float]]], spread: tuple[float, int] | None = None) -> Contrast:
        """Compute a contrast from groups of (weight, values of runs). `spread` defaults to the `pooled_deviation` of `groups`."""
        deviation, df = spread or pooled_deviation([values for _, values in groups])
        estimate = sum(weight * fmean(values) for weight, values in groups)
        return Contrast(estimate, deviation * sqrt(sum(weight**2 / len(values) for weight, values in groups)), df)

    @staticmethod
    def welch(groups: Sequence[tuple[float, Sequence[float]]]) -> Contrast:
        """Compute a contrast of groups with different variances. The degrees of freedom follow Welch and Satterthwaite."""
        variances = [weight**2 * stdev(values) ** 2 / len(values) for weight, values in groups]
        df = sum(variances) ** 2 / sum(x**2 / (len(values) - 1) for x, (_, values) in zip(variances, groups))
        return Contrast(sum(weight * fmean(values) for weight, values in groups), sqrt(sum(variances)), df)

    @property
    def p_value(self) -> float:
        return 2 * t.sf(abs(self.estimate) / self.error, self.df)

    def text(self, shown: Callable[[float], str]) -> str:
        """Format the estimate with its 95% interval.

        If the interval contains zero, also print the effect that a repetition would detect with a probability of 80%.
        """
        margin = t.ppf(0.975, self.df) * self.error
        low, high = self.estimate - margin, self.estimate + margin
        power = f"; 80%: {shown(margin + t.ppf(0.8, self.df) * self.error)}" if low < 0 < high else ""
        return f"{shown(self.estimate)} ({shown(low)} to {shown(high)}{power})"


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons with Holm's method (1979)."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
