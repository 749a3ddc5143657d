"""Print the tables of all Fashion-MNIST runs, and collect evaluations in one file.

This file holds the tables of the earlier runs (fashion_learning_rates.md, fashion_sprint.md) and of all (fashion_all_runs.md).
"""

from __future__ import annotations

import json
from functools import partial
from itertools import combinations, product
from math import log
from pathlib import Path
from statistics import fmean

import numpy as np

from common.errors import UserError
from common.files import read_lines, write_atomically
from common.types import Text
from evaluations.suite import format_metric
from evidence.contrasts import (
    DISTANCE,
    FOLDER,
    NAMES,
    Contrast,
    as_ratio,
    find_values,
    holm,
    mean_text,
    paired,
    pooled_deviation,
    print_table,
)
from evidence.guided import (
    ARMS,
    CHOOSING,
    COMPARING,
    GUIDED_TIME,
    TIMES,
    choose_scales,
    compared_values,
    complete_lines,
    draw_guided,
    show_guided,
    values_at,
)
from evidence.runs import lines_of_runs
from evidence.time_256 import TIME_256, show_256
from evidence.tokens import TOKENS, draw_scales, show_tokens

LEARNING_RATES, SPRINT = (FOLDER / f"fashion_{name}.jsonl" for name in ("learning_rates", "sprint"))
LOWER_RATES = FOLDER / "fashion_xs4_2core-xeon_2026-11-22.jsonl"  # runs at lower learning rates, in an earlier layout
SECOND_DISTANCE, NUM_CHOOSING_SEEDS = "fd_fashion_noisy", 3
CURVES = (DISTANCE, "class_agreement_fashion")
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "sparse": ", sparse guidance", "path_drop": ", path-drop 1.5"}
DENSE = ("A", "B")


def show_all(
    learning_rates: str = str(LEARNING_RATES), sprint: str = str(SPRINT), tokens: str = str(TOKENS),
    guided: str = str(GUIDED_TIME), time_256: str = str(TIME_256), pictures: str | None = None,
) -> None:  # fmt: skip
    """Print the tables for all sets of runs. If `pictures` names a folder, also save plots there."""
    by_rate, with_sprint, equal_steps, in_equal_time = (
        sorted(read_lines(Path(file)), key=lambda line: line["seed"]) for file in (learning_rates, sprint, tokens, guided)
    )
    show_comparisons(show_equal_time(by_rate), "planned comparison, learning rates")
    show_comparisons(show_equal_time(with_sprint), "unplanned comparison")
    show_tokens(equal_steps)
    if in_equal_time:
        show_guided(in_equal_time)
    if with_256_tokens := [*read_lines(Path(time_256))]:
        show_256(with_256_tokens)
    if complete := complete_lines(in_equal_time):
        show_together(by_rate, in_equal_time)
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


def show_together(by_rate: list[dict], in_equal_time: list[dict]) -> None:
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
        return [log(found) for seed, found in find_values(by_rate, DISTANCE, **wanted).items() if seed < NUM_CHOOSING_SEEDS]

    def in_longer_run(arm: str, step: int) -> list[float]:
        half, full = (ARMS[arm].step(time) for time in TIMES)
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
        by_step = ", ".join(f"{step:,}: {as_ratio(fmean(ratio))}" for step, (_, ratio) in ratios.items())
        first, last, growth = (
            Contrast.of([group]).text(as_ratio)
            for group in (ratios[early], ratios[late], paired(ratios[late][1], ratios[early][1]))
        )
        rows.append([name, str(len(ratios[late][1])), by_step, f"{early:,}: {first}", f"{late:,}: {last}", growth])
    columns = ["learning rate", "seeds", "routed / dense by step", "before", "after", "after / before"]
    print_table(columns, rows)

    def at_chosen_scale(arm: str, time: str, guidance: str, samples: tuple[int, int]) -> dict[int, float]:
        scale = choose_scales(in_equal_time, arm, time)[guidance][0]
        return values_at(in_equal_time, arm, time, guidance, scale, samples)

    rows, full = [], {}
    compared = ("autoguidance", "half"), ("autoguidance", "full"), ("cfg", "full")
    for (guidance, time), samples in product(compared, (CHOOSING, COMPARING)):
        routed, dense = (at_chosen_scale(arm, time, guidance, samples) for arm in ("routed", "dense"))
        ratio = {seed: log(routed[seed] / dense[seed]) for seed in routed}
        full[guidance, time, samples] = list(ratio.values())
        texts = [
            Contrast.of([(1, [*kept])]).text(as_ratio) for kept in (ratio.values(), [x for s, x in ratio.items() if s != 10])
        ]
        rows.append([f"{guidance}, {time} time", f"{samples[1]:,}", *texts])
    shift = Contrast.of([paired(*(full["autoguidance", "full", samples] for samples in (COMPARING, CHOOSING)))])
    rows.append(["autoguidance, full time", "2,000 / 500", shift.text(as_ratio), ""])
    print_table(["equal time, chosen scales", "samples", "routed / dense", "without seed 10"], rows)


def collect(output: Text, runs: Text = "runs") -> None:
    """Write all evaluations of the runs named search_<arm>_<rate> or <arm>_seed<seed> to a new JSON Lines file.

    The versions in each line are those with which the run was started.
    """
    if Path(output).exists():
        raise UserError(f"output={output} exists; give a new file")
    lines = lines_of_runs(Path(runs))
    if not lines:
        raise UserError(f"runs={runs} holds no runs named search_<arm>_<rate> or <arm>_seed<seed>")
    write_atomically(Path(output), "".join(json.dumps(line) + "\n" for line in lines))
