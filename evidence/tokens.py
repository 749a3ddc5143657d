"""Print the tables and draw the plots of results/fashion/fashion_tokens.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from common.files import write_atomically
from evaluations.tables import plot
from evidence.contrasts import (
    DISTANCE,
    FOLDER,
    LOSS,
    NAMES,
    Contrast,
    as_ratio,
    find_values,
    holm,
    mean_text,
    paired,
    pooled_deviation,
    print_table,
    show_loss_ratios,
)

TOKENS = FOLDER / "fashion_tokens.jsonl"
ARMS = ("routed-64", "dense-64")
SEARCH_SEED = 100
CHOOSING, COMPARING = 0, 2000  # first sampling seed for choosing a guidance scale, and for all other figures
SAME_STEPS, EARLIER_STEPS = 3000, 2000  # steps of the arms with 64 tokens, and of their first evaluation

Comparison = tuple[str, Callable[[float], str], Contrast]


def show_tokens(lines: list[dict]) -> None:
    """Print tables of the losses, the arms, the guidance scales, the outcomes, and ratios of routed to dense arms."""
    show_losses([line for line in lines if LOSS in line["metrics"]])
    for first_seed in (COMPARING, CHOOSING):
        show_arms([line for line in lines if line.get("first_seed") == first_seed])
    primary, other = compare(lines)
    columns = ["95% interval", "degrees of freedom"]
    corrected = [f"{p:.2g}" for p in holm([contrast.p_value for *_, contrast in primary])]
    rows = [[name, contrast.text(text_of), f"{contrast.df:.3g}"] for name, text_of, contrast in (*primary, *other)]
    print_table(["primary outcome", *columns, "p (Holm)"], [[*row, p] for row, p in zip(rows, corrected)])
    print_table(["other comparison", *columns], rows[len(primary) :])
    show_ratios(lines)


def show_ratios(lines: list[dict]) -> None:
    """Print routed / dense ratios: of validation losses after 3,000 steps by noise level, and of median step times by seed."""
    show_loss_ratios(lines, *({"arm": arm, "step": SAME_STEPS} for arm in ARMS))
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
    guided, choosing = (find(*({**condition, "first_seed": first} for condition in compared)) for first in (COMPARING, CHOOSING))
    recall = find(*ends, metric="recall_fashion", transform=float)
    validation = find(*({"arm": arm, "step": 3000} for arm in ARMS), metric=LOSS)
    ratio_name = "ratio of distances, routed / dense"
    tokens, signs = [find(condition)[0] for condition in four], (1, -1, -1, 1)
    earlier, later = (find(*at(step, *ARMS)) for step in (EARLIER_STEPS, SAME_STEPS))
    shared = find(*at(EARLIER_STEPS, *ARMS), *at(SAME_STEPS, *ARMS))
    growth = paired(paired(*shared[2:])[1], paired(*shared[:2])[1])
    primary = [
        (f"1. {ratio_name}, with 256 tokens / with 64", as_ratio, Contrast.of, [*zip(signs, tokens)]),
        (f"2a. {ratio_name}, at the scales {chosen[0]:g} / {chosen[1]:g}", as_ratio, Contrast.of, [*zip(signs, guided)]),
        ("2b. best scale, routed - dense", "{:.2f}".format, Contrast.of, [*zip(signs, best)]),
        ("3. ratio of distances, dense end / routed to the end", as_ratio, Contrast.of, [paired(*find(*ends))]),
    ]
    other = [
        ("1, with the seeds that all four arms share", as_ratio, Contrast.of, [*zip(signs, find(*four))]),
        ("1, by Welch", as_ratio, Contrast.welch, [*zip(signs, tokens)]),
        ("2a, with the samples that chose the scales", as_ratio, Contrast.of, [*zip(signs, choosing)]),
        ("2a, paired by seed", as_ratio, Contrast.of, [paired(*guided)]),
        ("2a, unguided", as_ratio, Contrast.of, [*zip(signs, later)]),
        ("2a, unguided, paired by seed", as_ratio, Contrast.of, [paired(*later)]),
        (f"2a, unguided, after {EARLIER_STEPS:,} steps", as_ratio, Contrast.of, [*zip(signs, earlier)]),
        (f"2a, unguided, after {EARLIER_STEPS:,} steps, paired by seed", as_ratio, Contrast.of, [paired(*earlier)]),
        (f"2a, unguided, after {SAME_STEPS:,} steps / after {EARLIER_STEPS:,}, paired by seed", as_ratio, Contrast.of, [growth]),
        ("3, with the deviation pooled over both arms", as_ratio, Contrast.of, [*zip(signs, find(*ends))]),
        ("recall, dense end - routed to the end", "{:.3f}".format, Contrast.of, [paired(*recall)]),
        ("ratio of validation losses after 3,000 steps, 64 tokens", as_ratio, Contrast.of, [*zip(signs, validation)]),
    ]
    if times := [*time_ratios(lines, "64").values()]:
        _, dense_early, routed, dense_late = shared
        for time, is_linear in ((median(times), True), (median(times), False), (max(times), False)):
            dense = [dense_after(time, early, late, is_linear) for early, late in zip(dense_early, dense_late)]
            name = f"same time, if a routed step takes {time:.2f}: ratio of distances, {'linear' if is_linear else 'power law'}"
            other += [
                (name, as_ratio, Contrast.of, [*zip(signs, (routed, dense))]),
                (f"{name}, paired by seed", as_ratio, Contrast.of, [paired(routed, dense)]),
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


def best_scale(scales: Sequence[float], curve: Sequence[float]) -> float:
    """Return the minimum of a parabola through the lowest point and its neighbours. At either end, return the lowest point."""
    lowest = int(np.argmin(curve))
    if lowest in (0, len(scales) - 1):
        return scales[lowest]
    near = slice(lowest - 1, lowest + 2)
    square, linear, _ = np.polyfit(scales[near], curve[near], 2)
    return float(-linear / (2 * square))


def draw_scales(lines: list[dict], folder: Path) -> None:
    """Plot distance against guidance scale, and precision against recall at the same scales, as means over training seeds."""
    chosen = [line for line in lines if line.get("first_seed") == CHOOSING]
    settings = [{"arm": arm, "cfg_scale": scale} for arm, scale in sorted({(line["arm"], line["cfg_scale"]) for line in chosen})]
    found = {metric: [[*find_values(chosen, metric, **own).values()] for own in settings] for metric in NAMES}
    means = {NAMES[metric]: [fmean(values) for values in columns] for metric, columns in found.items()}
    deviations = {NAMES[metric]: [pooled_deviation([values])[0] for values in columns] for metric, columns in found.items()}
    write_atomically(folder / "fashion_scales.png", plot(settings, means["distance"], deviations["distance"], "distance"))
    recalls = [{"arm": own["arm"], "recall": recall} for own, recall in zip(settings, means["recall"])]
    curve = plot(recalls, means["precision"], deviations["precision"], "precision")
    write_atomically(folder / "fashion_precision_recall.png", curve)
