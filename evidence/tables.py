"""Print the tables of our Fashion-MNIST runs from their evaluations.

The rules for these runs and the printed tables are in results/fashion/fashion_*.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from math import exp, log
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from checkpoints.checkpoint import read_config
from checkpoints.run import present_starts, read_metrics
from common.errors import UserError
from common.files import read_lines, write_atomically
from common.types import Text
from evaluations.metrics import standard_error
from evaluations.record import read_records
from evaluations.suite import format_metric
from evaluations.tables import plot
from evidence.contrasts import (
    DISTANCE,
    LOSS,
    NAMES,
    Contrast,
    find_values,
    holm,
    mean_text,
    paired,
    pooled_deviation,
    print_table,
)
from evidence.guided import ARMS as GUIDED_ARMS
from evidence.guided import RESULTS as GUIDED
from evidence.guided import (
    TIMES,
    choose_scales,
    compared_values,
    complete_lines,
    draw_guided,
    ema_hashes,
    num_samples_from,
    show_guided,
    values_at,
)

FOLDER = Path(__file__).parent / "results" / "fashion"
LEARNING_RATES, SPRINT, TOKENS = (FOLDER / f"fashion_{name}.jsonl" for name in ("learning_rates", "sprint", "tokens"))
LOWER_RATES = FOLDER / "fashion_xs4_2core-xeon_2026-11-22.jsonl"  # runs at lower learning rates, in an earlier layout
SECOND_DISTANCE, NUM_CHOOSING_SEEDS = "fd_fashion_noisy", 3
CURVES = (DISTANCE, "class_agreement_fashion")
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "sparse": ", sparse guidance", "path_drop": ", path-drop 1.5"}
DENSE = ("A", "B")
ARMS = ("routed-64", "dense-64")
SEARCH_SEED = 100
CHOOSING, COMPARING = 0, 2000  # first sampling seed for choosing a guidance scale, and for all other figures
SAME_STEPS, EARLIER_STEPS = 3000, 2000  # steps of the arms with 64 tokens, and of their first evaluation

Comparison = tuple[str, Callable[[float], str], Contrast]


def show_all(
    learning_rates: str = str(LEARNING_RATES), sprint: str = str(SPRINT), tokens: str = str(TOKENS), guided: str = str(GUIDED),
    pictures: str | None = None,
) -> None:  # fmt: skip
    """Print the tables for all sets of runs. If `pictures` names a folder, also save plots there."""
    rated, fused, equal_steps, in_equal_time = (
        sorted(read_lines(Path(file)), key=lambda line: line["seed"]) for file in (learning_rates, sprint, tokens, guided)
    )
    show_comparisons(show_equal_time(rated), "planned comparison, learning rates")
    show_comparisons(show_equal_time(fused), "unplanned comparison")
    show_tokens(equal_steps)
    if in_equal_time:
        show_guided(in_equal_time)
    if complete := complete_lines(in_equal_time):
        show_together(rated, in_equal_time)
    if pictures:
        draw_scales(equal_steps, Path(pictures))
        if complete:
            draw_guided(complete, Path(pictures))


def show_equal_time(lines: list[dict]) -> dict[str, list[list[float]]]:
    """Print tables of the learning rates, of each arm at its best rate, and of differences between routed arms and earlier arms.

    The intervals of the first table of differences are Welch's, and those of the second use the deviation pooled over all arms.
    A learning rate can be the best rate of an arm only if it has at least three seeds. All tables except that of the steps show
    the last step of each arm. Return the unguided values that are compared, as {arm: [values of each metric]}.
    """
    arms, rates = (sorted({line[key] for line in lines}) for key in ("arm", "lr"))
    last = {arm: max(line["step"] for line in lines if line["arm"] == arm) for arm in arms}
    names = NAMES | ({SECOND_DISTANCE: "second distance"} if any(SECOND_DISTANCE in line["metrics"] for line in lines) else {})

    def find(
        metric: str, arm: str, lr: float, num_samples: int = 1000, guidance: str = "none", step: int | None = None
    ) -> list[float]:
        wanted = {"arm": arm, "lr": lr, "num_samples": num_samples, "guidance": guidance, "step": step or last[arm]}
        return [*find_values(lines, metric, **wanted).values()]

    first = {(arm, lr): find(DISTANCE, arm, lr)[:NUM_CHOOSING_SEEDS] for arm in arms for lr in rates}
    complete = [key for key, values in first.items() if len(values) == NUM_CHOOSING_SEEDS]
    best = dict(sorted(complete, key=lambda key: (key[0], -fmean(first[key]))))  # the dict keeps the last, best rate of each arm
    print_table(["learning rate", *best], [[f"{lr:g}", *(mean_text(DISTANCE, first[arm, lr]) for arm in best)] for lr in rates])
    if len(steps := sorted({line["step"] for line in lines})) > len({*last.values()}):
        curves = [[{metric: find(metric, arm, best[arm], step=step) for metric in CURVES} for arm in best] for step in steps]
        cells = [[", ".join(mean_text(*one) for one in found.items() if one[1]) for found in curve] for curve in curves]
        print_table(["step", *best], [[f"{step:,}", *row] for step, row in zip(steps, cells)])

    compared, rows, differences, pooled_differences = {}, [], [], []
    for guidance, suffix in GUIDANCES.items():
        found = {arm: [find(metric, arm, best[arm], 2000, guidance) for metric in names] for arm in best}
        found = {arm: columns for arm, columns in found.items() if all(columns)}
        compared[guidance] = found
        for arm, columns in found.items():
            rows.append([arm + suffix, f"{best[arm]:g}", str(len(columns[0])), *map(mean_text, names, columns)])
        spreads = [pooled_deviation(column) for column in zip(*found.values())]
        for other, arm in combinations(found, 2):
            if arm not in DENSE:
                groups = [[(1, ours), (-1, theirs)] for ours, theirs in zip(found[arm], found[other])]
                welch, pooled = map(Contrast.welch, groups), map(Contrast.of, groups, spreads)
                for table, pairs in ((differences, welch), (pooled_differences, pooled)):
                    texts = [pair.text(lambda x, metric=metric: format_metric(metric, x)) for metric, pair in zip(names, pairs)]
                    table.append([f"{arm} - {other}{suffix}", *texts])
    print_table(["", "learning rate", "seeds", *names.values()], rows)
    for table in (differences, pooled_differences):
        print_table(["", *names.values()], table)
    return compared["none"]


def show_comparisons(found: dict[str, list[list[float]]], title: str) -> None:
    """Print Welch's p-values of the comparisons of C with the dense arms, with Holm's correction."""
    names, contrasts = [], []
    for other, (i, metric) in product(DENSE, enumerate(NAMES)):
        names.append((metric, f"C - {other}, {NAMES[metric]}"))
        contrasts.append(Contrast.welch([(1, found["C"][i]), (-1, found[other][i])]))
    corrected = holm([contrast.p_value for contrast in contrasts])
    rows = [
        [name, contrast.text(lambda x, metric=metric: format_metric(metric, x)), f"{contrast.p_value:.2g}", f"{p:.2g}"]
        for (metric, name), contrast, p in zip(names, contrasts, corrected)
    ]
    print_table([title, "95% interval (Welch)", "p", "p (Holm)"], rows)


def show_tokens(lines: list[dict]) -> None:
    """Print tables of the losses, the arms, the guidance scales, the outcomes, and ratios of routed to dense arms."""
    show_losses([line for line in lines if LOSS in line["metrics"]])
    for first_seed in (COMPARING, CHOOSING):
        show_arms([line for line in lines if line.get("first_seed") == first_seed])
    primary, other = compare(lines)
    columns = ["95% interval", "degrees of freedom"]
    corrected = [f"{p:.2g}" for p in holm([contrast.p_value for *_, contrast in primary])]
    parts = primary, other
    rows = [[[name, contrast.text(text_of), f"{contrast.df:.3g}"] for name, text_of, contrast in part] for part in parts]
    print_table(["primary outcome", *columns, "p (Holm)"], [[*row, p] for row, p in zip(rows[0], corrected)])
    print_table(["other comparison", *columns], rows[1])
    show_ratios(lines)


def show_ratios(lines: list[dict]) -> None:
    """Print routed / dense ratios: of validation losses after 3,000 steps by noise level, and of median step times by seed."""
    at_end = [line for line in lines if LOSS in line["metrics"] and line["step"] == 3000]
    by_level = [[line["validation_loss_by_level"] for line in at_end if line["arm"] == arm] for arm in ARMS]
    ratios = np.divide(*(np.mean(levels, axis=0) for levels in by_level)) if all(by_level) else []
    columns = ["noise level", *map(str, range(1, len(ratios) + 1))]
    print_table(columns, [["validation loss", *(f"{ratio:.3f}" for ratio in ratios)]])
    rows = []
    for tokens in ("256", "64"):
        times = time_ratios(lines, tokens)
        texts = [f"{ratio:.2f} (seed {seed})" for seed, ratio in times.items()]
        rows.append([f"routed-{tokens}", ", ".join(texts), f"{median(times.values()):.2f}" if times else ""])
    print_table(["", "time of a step", "median"], rows)


def time_ratios(lines: list[dict], tokens: str) -> dict[int, float]:
    """Return the median time of a routed step divided by that of a dense step, by training seed."""
    speeds = {(line["arm"], line["seed"]): median(line["steps_per_sec"]) for line in lines if line.get("steps_per_sec")}
    seeds = sorted(seed for arm, seed in speeds if arm == f"routed-{tokens}" and seed != SEARCH_SEED)
    seeds = [seed for seed in seeds if (f"dense-{tokens}", seed) in speeds]
    return {seed: speeds[f"dense-{tokens}", seed] / speeds[f"routed-{tokens}", seed] for seed in seeds}


def show_together(rated: list[dict], in_equal_time: list[dict]) -> None:
    """Print routed / dense ratios of unguided distances after equal steps, and how far the ratios at equal time can be trusted.

    Nobody planned these tables. In runs of equal time, both arms have no evaluation at an equal step, so that one arm is
    interpolated between its two evaluations, by a power law of the step.
    """
    distance = f"{DISTANCE}1k/cfg1.0"  # of runs in LOWER_RATES
    lower = {(line["run"], line["step"]): line[distance] for line in read_lines(LOWER_RATES) if distance in line}

    def at_lower_rate(suffix: str, arm: str, step: int) -> list[float]:
        name = {"routed": "fashion_dit_xs4_tread", "dense": "fashion_dit_xs4"}[arm]
        return [log(lower[f"{name}_seed-{seed}{suffix}", step]) for seed in range(NUM_CHOOSING_SEEDS)]

    def at_best_rate(arm: str, step: int) -> list[float]:
        wanted = {"arm": {"routed": "C", "dense": "A"}[arm], "lr": 4e-3, "num_samples": 1000, "guidance": "none", "step": step}
        return [log(found) for seed, found in find_values(rated, DISTANCE, **wanted).items() if seed < NUM_CHOOSING_SEEDS]

    def in_longer_run(arm: str, step: int) -> list[float]:
        half, full = (GUIDED_ARMS[arm].step(time) for time in TIMES)
        early, late = (np.log([*compared_values(in_equal_time, arm, time, "none").values()]) for time in TIMES)
        return (early + (late - early) * log(step / half) / log(full / half)).tolist()

    every_1000 = range(1000, 7000, 1000)
    runs = {  # steps, log distances by training seed, and both steps of the growth
        "4e-3": (every_1000[:4], at_best_rate, (2000, 4000)),
        "4e-3, interpolated": ((6075, 8600), in_longer_run, (6075, 8600)),
        "2e-3": (every_1000, partial(at_lower_rate, "_lr-0.002"), (3000, 6000)),
        "1e-3": (every_1000, partial(at_lower_rate, ""), (3000, 6000)),
    }
    rows = []
    for name, (steps, find, (early, late)) in runs.items():
        ratios = {step: paired(find("routed", step), find("dense", step)) for step in steps}
        by_step = ", ".join(f"{step:,}: {_ratio_text(fmean(ratio))}" for step, (_, ratio) in ratios.items())
        first, last, growth = (
            Contrast.of([group]).text(_ratio_text)
            for group in (ratios[early], ratios[late], paired(ratios[late][1], ratios[early][1]))
        )
        rows.append([name, str(len(ratios[late][1])), by_step, f"{early:,}: {first}", f"{late:,}: {last}", growth])
    columns = ["learning rate", "seeds", "routed / dense by step", "before", "after", "after / before"]
    print_table(columns, rows)

    def at_chosen_scale(arm: str, time: str, guidance: str, first_seed: int) -> dict[int, float]:
        scale = choose_scales(in_equal_time, arm, time)[guidance][0]
        return values_at(in_equal_time, arm, time, guidance, scale, first_seed)

    rows, full = [], {}
    points = ("autoguidance", "half"), ("autoguidance", "full"), ("cfg", "full")
    for (guidance, time), first_seed in product(points, (CHOOSING, COMPARING)):
        routed, dense = (at_chosen_scale(arm, time, guidance, first_seed) for arm in ("routed", "dense"))
        ratio = {seed: log(routed[seed] / dense[seed]) for seed in routed}
        full[guidance, time, first_seed] = list(ratio.values())
        texts = [
            Contrast.of([(1, [*kept])]).text(_ratio_text) for kept in (ratio.values(), [x for s, x in ratio.items() if s != 10])
        ]
        rows.append([f"{guidance}, {time} time", f"{num_samples_from(first_seed):,}", *texts])
    shift = Contrast.of([paired(full["autoguidance", "full", 2000], full["autoguidance", "full", 0])])
    rows.append(["autoguidance, full time", "2,000 / 500", shift.text(_ratio_text), ""])
    print_table(["equal time, chosen scales", "samples", "routed / dense", "without seed 10"], rows)


def _ratio_text(x: float) -> str:
    return f"{exp(x):.2f}"


def show_losses(lines: list[dict]) -> None:
    rows = []
    runs = {(line["seed"] == SEARCH_SEED, line["arm"], line["lr"], line["step"]) for line in lines}
    for is_search, arm, lr, step in sorted(runs):
        found = find_values(lines, LOSS, arm=arm, lr=lr, step=step)
        values = [value for seed, value in found.items() if (seed == SEARCH_SEED) == is_search]
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        seeds = "search" if is_search else str(len(values))
        rows.append([arm, seeds, f"{lr:g}", f"{step:,}", f"{fmean(values):.4f}{spread}"])
    print_table(["", "seeds", "learning rate", "step", "validation loss"], rows)


def show_arms(lines: list[dict]) -> None:
    rows = []
    for arm, step, scale in sorted({(line["arm"], line["step"], line["cfg_scale"]) for line in lines}):
        found = [[*find_values(lines, metric, arm=arm, step=step, cfg_scale=scale).values()] for metric in NAMES]
        rows.append([arm, f"{step:,}", f"{scale:g}", str(len(found[0])), *map(mean_text, NAMES, found)])
    print_table(["", "step", "cfg_scale", "seeds", *NAMES.values()], rows)


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
    guided, choosing = (find(*({**point, "first_seed": first} for point in compared)) for first in (COMPARING, CHOOSING))
    recall = find(*ends, metric="recall_fashion", transform=float)
    validation = find(*({"arm": arm, "step": 3000} for arm in ARMS), metric=LOSS)
    ratio, ratio_name = (lambda x: f"{exp(x):.2f}"), "ratio of distances, routed / dense"
    tokens, signs = [find(condition)[0] for condition in four], (1, -1, -1, 1)
    earlier, later = (find(*at(step, *ARMS)) for step in (EARLIER_STEPS, SAME_STEPS))
    shared = find(*at(EARLIER_STEPS, *ARMS), *at(SAME_STEPS, *ARMS))
    growth = paired(paired(*shared[2:])[1], paired(*shared[:2])[1])
    primary = [
        (f"1. {ratio_name}, with 256 tokens / with 64", ratio, Contrast.of, [*zip(signs, tokens)]),
        (f"2a. {ratio_name}, at the scales {chosen[0]:g} / {chosen[1]:g}", ratio, Contrast.of, [*zip(signs, guided)]),
        ("2b. best scale, routed - dense", "{:.2f}".format, Contrast.of, [*zip(signs, best)]),
        ("3. ratio of distances, dense end / routed to the end", ratio, Contrast.of, [paired(*find(*ends))]),
    ]
    other = [
        ("1, with the seeds that all four arms share", ratio, Contrast.of, [*zip(signs, find(*four))]),
        ("1, by Welch", ratio, Contrast.welch, [*zip(signs, tokens)]),
        ("2a, with the samples that chose the scales", ratio, Contrast.of, [*zip(signs, choosing)]),
        ("2a, paired by seed", ratio, Contrast.of, [paired(*guided)]),
        ("2a, unguided", ratio, Contrast.of, [*zip(signs, later)]),
        ("2a, unguided, paired by seed", ratio, Contrast.of, [paired(*later)]),
        (f"2a, unguided, after {EARLIER_STEPS:,} steps", ratio, Contrast.of, [*zip(signs, earlier)]),
        (f"2a, unguided, after {EARLIER_STEPS:,} steps, paired by seed", ratio, Contrast.of, [paired(*earlier)]),
        (f"2a, unguided, after {SAME_STEPS:,} steps / after {EARLIER_STEPS:,}, paired by seed", ratio, Contrast.of, [growth]),
        ("3, with the deviation pooled over both arms", ratio, Contrast.of, [*zip(signs, find(*ends))]),
        ("recall, dense end - routed to the end", "{:.3f}".format, Contrast.of, [paired(*recall)]),
        ("ratio of validation losses after 3,000 steps, 64 tokens", ratio, Contrast.of, [*zip(signs, validation)]),
    ]
    if times := [*time_ratios(lines, "64").values()]:
        _, dense_early, routed, dense_late = shared
        for time, is_linear in ((median(times), True), (median(times), False), (max(times), False)):
            dense = [dense_after(time, early, late, is_linear) for early, late in zip(dense_early, dense_late)]
            name = f"same time, if a routed step takes {time:.2f}: ratio of distances, {'linear' if is_linear else 'power law'}"
            other += [
                (name, ratio, Contrast.of, [*zip(signs, (routed, dense))]),
                (f"{name}, paired by seed", ratio, Contrast.of, [paired(routed, dense)]),
            ]
    return tuple(
        [(name, text_of, build(groups)) for name, text_of, build, groups in part if min(len(values) for _, values in groups) > 1]
        for part in (primary, other)
    )


def dense_after(time_ratio: float, early: float, late: float, is_linear: bool) -> float:
    """Interpolate the dense log distance between both evaluated steps, at the step that the routed run's time allows.

    The distance falls along a line or as a power of the step. The curve is convex, so a line overstates the distance.
    """
    step, steps = time_ratio * SAME_STEPS, (EARLIER_STEPS, SAME_STEPS)
    if is_linear:
        return log(np.interp(step, steps, np.exp((early, late))))
    return float(np.interp(log(step), np.log(steps), (early, late)))


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


def collect(output: Text, runs: Text = "runs") -> None:
    """Write all evaluations of the runs named search_<arm>_<rate> or <arm>_seed<seed> to a new JSON Lines file."""
    if Path(output).exists():
        raise UserError(f"output={output} exists; give a new file")
    lines = []
    for run in sorted(folder for folder in Path(runs).iterdir() if re.search("^search_|_seed", folder.name)):
        if not (starts := present_starts([*read_lines(run / "starts.jsonl")])):
            continue
        cfg, start = read_config(run), starts[0]
        arm = run.name.removeprefix("search_").rpartition("_")[0]
        run_fields = {"arm": arm, "seed": cfg.seed, "lr": cfg.train.lr, "commit": start["commit"]}
        weights = {step: {"ema": digest} for step, digest in ema_hashes(run).items()}
        speeds = [line["steps_per_sec"] for line in read_metrics(run / "metrics.jsonl")]
        for record in read_records(run / "evaluations" / "results.jsonl"):
            kept = {"step": record.step, "metrics": record.metrics, **weights.get(record.step, {})}
            if record.of_samples:
                names = ("cfg_scale", "reference", "detector", "num_samples", "first_seed", "labels", "reference_hash")
                kept |= {name: record.settings[name] for name in names if name in record.settings}
                kept["standard_errors"] = {name: standard_error(values) for name, values in record.jackknife.items()}
            else:
                kept["validation_loss_by_level"] = record.by_level
            lines.append(run_fields | kept)
        lines.append(run_fields | {"steps_per_sec": speeds, "metrics": {}})
    if not lines:
        raise UserError(f"runs={runs} holds no runs named search_<arm>_<rate> or <arm>_seed<seed>")
    write_atomically(Path(output), "".join(json.dumps(line) + "\n" for line in lines))


def best_scale(scales: Sequence[float], curve: Sequence[float]) -> float:
    """Return the minimum of a parabola through the lowest point and its neighbours. At either end, return the lowest point."""
    lowest = int(np.argmin(curve))
    if lowest in (0, len(scales) - 1):
        return scales[lowest]
    near = slice(lowest - 1, lowest + 2)
    square, linear, _ = np.polyfit(scales[near], curve[near], 2)
    return float(-linear / (2 * square))
