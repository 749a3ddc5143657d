"""Train, evaluate and compare networks with 256 tokens in equal time (results/fashion/fashion_256_time.md).

`time_256` runs everything that the rule plans. What comes next follows from the results of the runs so far, so the command can be
stopped and repeated at any time. `show_256` prints the tables of the page from the lines that `collect` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import exp, inf, log
from pathlib import Path
from statistics import fmean

from checkpoints import store
from common.errors import UserError
from common.files import read_lines
from common.types import PositiveInt, Text
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
    print_table,
    show_loss_ratios,
)
from evidence.runs import FID, TRAIN, Planned, command_line, compared_run, group_scales, lines_of_runs, log_file, run_all

TIME_256 = FOLDER / "fashion_256_time.jsonl"
SEEDS, SEARCH_SEED = range(20, 26), 100
NUM_CHOOSING_SEEDS = 3
PARTS = {"early": 10, "search": 4, "half": 2, "full": 1}  # evaluated checkpoints: the steps are divided by these numbers
TIMES = ("half", "full")
RATES = tuple(1e-3 * 2.0**k for k in range(-6, 9))
FIRST_RATES = (1e-3, 2e-3, 4e-3)
# For each guidance: the key of its scale, the first scales, all scales, and further fid.py arguments. {early} is the run's early
# checkpoint.
GUIDANCES = {
    "cfg": ("guidance.cfg_scale", (1.5, 2.0, 2.5), (1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0), ""),
    "autoguidance": (
        "guidance.w", (1.5, 2.0, 3.0), (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), "guidance.checkpoint={early}"
    ),
}  # fmt: skip
Samples = tuple[int, int]  # first sampling seed, and number of samples
SEARCHING = (0, 1000)


# For each arm: experiment= of train.py, and the number of steps.
ARMS = {"routed": ("fashion_dit_xs2_tread", 18_640), "dense": ("fashion_dit_xs2", 12_500)}


def step_of(arm: str, part: str) -> int:
    return ARMS[arm][1] // PARTS[part]


def choosing(seed: int) -> Samples:
    return 10_000 * (seed - SEEDS[0]), 500


def comparing(seed: int) -> Samples:
    return 10_000 * (seed - SEEDS[0]) + 1000, 5000


def time_256(
    jobs: PositiveInt = 1, num_pairs: PositiveInt = 6, overrides: list[str] = (), fid_overrides: list[str] = (),
    runs: Text = "runs/time_256", diverged: list[str] = (), searches: Text | None = None,
) -> None:  # fmt: skip
    """Train and evaluate all runs of the rule in the folder `runs`.

    Args:
        jobs: Number of runs at a time. Each uses one CPU thread, and the GPU if there is one.
        num_pairs: Number of pairs to train, for few hours. Runs of later seeds that are complete count, too.
        overrides: More train.py arguments, for settings that only change the speed.
        fid_overrides: More fid.py arguments, for settings that only change the speed, such as machine.compile=none.
        diverged: Names of runs that train.py ended because their loss diverged, by their log files.
        searches: A file that `collect` wrote. Its searches of the learning rates are not repeated.

    Raises:
        UserError: `searches` holds no searches, or a run failed or was stopped. The same command resumes it.
    """
    folder, earlier = Path(runs), {}
    searched = [line for line in read_lines(Path(searches)) if line.get("seed") == SEARCH_SEED] if searches else []
    if searches and not searched:
        raise UserError(f"searches={searches} holds no searches of the learning rates")
    while planned := plan_next([*searched, *lines_of_runs(folder)], num_pairs, diverged):
        commands = {name: arguments_of(name, *task, folder, overrides, fid_overrides) for name, task in planned.items()}
        if failed := [name for name, arguments in commands.items() if earlier.get(name) == arguments]:
            logs = ", ".join(str(log_file(folder, name)) for name in failed)
            remedy = "the same command resumes them; name a run whose loss diverged in diverged="
            raise UserError(f"{len(failed)} runs are not complete (see {logs}); {remedy}")
        run_all(commands, jobs, folder, lambda name: None)
        earlier = commands


def plan_next(lines: list[dict], num_pairs: int, diverged: Sequence[str]) -> dict[str, tuple[str, int, float, list[Planned]]]:
    """Return what the rule asks for next, by run: arm, training seed, learning rate, and the evaluations that are missing.

    The searches come first, then all training, then the choice of the guidances, then the comparison. {} means that all is done,
    or that fewer pairs are complete than a choice needs.
    """
    found = {arm: search(lines, arm, diverged) for arm in ARMS}
    searches = {
        search_name(arm, rate): (arm, SEARCH_SEED, rate, [("search", "none", 1.0, SEARCHING)])
        for arm in ARMS
        for rate in next_values(found[arm], FIRST_RATES, RATES)
    }
    if searches:
        return searches
    seeds = [seed for seed in SEEDS[:num_pairs] if not any(compared_run(arm, seed) in diverged for arm in ARMS)]
    runs = {
        compared_run(arm, seed): (arm, seed, best(found[arm]))
        for seed in sorted({*seeds, *complete_seeds(lines)})
        for arm in ARMS
    }
    trained = trained_runs(lines)
    if waiting := {name: (*run, []) for name, run in runs.items() if name not in trained}:
        return waiting
    missing = missing_evaluations(lines, [(arm, seed) for arm, seed, _ in runs.values()])
    return {name: (*runs[name], evaluations) for name, evaluations in missing.items()}


def search_name(arm: str, rate: float) -> str:
    return f"search_{arm}_{rate:g}"


def best(found: Mapping[float, float]) -> float:
    """Return the value with the lowest result. Of equals, it is the lowest value."""
    return min(found, key=lambda value: (found[value], value))


def next_values(found: Mapping[float, float], first: Sequence[float], every: Sequence[float]) -> list[float]:
    """Return what is tried next: the `first` values, then the neighbour of the best value until this is neither end of `found`.

    Args:
        found: The results so far by value.
        every: All values that may be tried, in ascending order.
    """
    if missing := [value for value in first if value not in found]:
        return missing
    i = every.index(best(found))
    neighbours = every[max(i - 1, 0) : i + 2]
    return [value for value in neighbours if not min(found) <= value <= max(found)]


def search(lines: list[dict], arm: str, diverged: Sequence[str]) -> dict[float, float]:
    """Return the distance of an arm by learning rate, which is infinite for rates whose loss diverged."""
    found = {rate: inf for rate in RATES if search_name(arm, rate) in diverged}
    for line in lines:
        if line["arm"] == arm and line["seed"] == SEARCH_SEED and DISTANCE in line["metrics"]:
            distance = line["metrics"][DISTANCE]
            found[line["lr"]] = distance if distance < inf else inf  # also NaN
    return found


def value_at(lines: list[dict], arm: str, seed: int, planned: Planned, metric: str = DISTANCE) -> float | None:
    part, guidance, scale, (first_seed, num_samples) = planned
    wanted = {"arm": arm, "step": step_of(arm, part), "guidance": guidance, "scale": scale}
    return find_values(lines, metric, **wanted, seed=seed, first_seed=first_seed, num_samples=num_samples).get(seed)


def trained_runs(lines: list[dict]) -> set[str]:
    """Return the names of the compared runs that reached full time."""
    return {compared_run(line["arm"], line["seed"]) for line in lines if "starts" in line}


def complete_seeds(lines: list[dict]) -> list[int]:
    """Return the seeds of the pairs whose runs both reached full time."""
    trained = trained_runs(lines)
    return [seed for seed in SEEDS if all(compared_run(arm, seed) in trained for arm in ARMS)]


def mean_logs(lines: list[dict], arm: str, time: str, guidance: str) -> dict[float, float]:
    """Return the mean log distance of the seeds that choose a guidance, by scale, for the scales that all of them have."""
    scales = GUIDANCES[guidance][2] if guidance in GUIDANCES else (1.0,)
    seeds = complete_seeds(lines)[:NUM_CHOOSING_SEEDS]
    found = {scale: [value_at(lines, arm, seed, (time, guidance, scale, choosing(seed))) for seed in seeds] for scale in scales}
    return {scale: fmean(map(log, values)) for scale, values in found.items() if values and None not in values}


def missing_evaluations(lines: list[dict], runs: Sequence[tuple[str, int]]) -> dict[str, list[Planned]]:
    """Return what is missing next of runs (arm, seed), by name: evaluations of the choice, or else of the comparison.

    Without enough pairs for a choice, nothing is evaluated.
    """
    plans = (missing_choices, missing_comparisons) if len(complete_seeds(lines)) >= NUM_CHOOSING_SEEDS else ()
    for plan in plans:
        if missing := {compared_run(*run): evaluations for run in runs if (evaluations := plan(lines, *run))}:
            return missing
    return {}


def missing_choices(lines: list[dict], arm: str, seed: int) -> list[Planned]:
    """Return the missing evaluations of a run that choose the guidance of its arm."""
    if seed not in complete_seeds(lines)[:NUM_CHOOSING_SEEDS]:
        return []
    planned = [(time, "none", 1.0, choosing(seed)) for time in TIMES]
    for time, (guidance, (_, first, every, _)) in product(TIMES, GUIDANCES.items()):
        scales = next_values(mean_logs(lines, arm, time, guidance), first, every)
        planned += [(time, guidance, scale, choosing(seed)) for scale in scales]
    return [evaluation for evaluation in planned if value_at(lines, arm, seed, evaluation) is None]


def choose(lines: list[dict], arm: str, time: str) -> tuple[str, float]:
    """Return the guidance of an arm at a time, and its scale."""
    means = {(name, scale): x for name in ("none", *GUIDANCES) for scale, x in mean_logs(lines, arm, time, name).items()}
    return min(means, key=means.__getitem__)  # the first of equals, and scales ascend


def compared_guidances(lines: list[dict], arm: str, time: str) -> list[tuple[str, float]]:
    """Return the guidances of the comparison, with their scales: none, and the chosen one if it is another."""
    return [*dict.fromkeys([("none", 1.0), choose(lines, arm, time)])]


def missing_comparisons(lines: list[dict], arm: str, seed: int) -> list[Planned]:
    """Return the missing evaluations of a run for the comparison."""
    planned = [(time, *guidance, comparing(seed)) for time in TIMES for guidance in compared_guidances(lines, arm, time)]
    if arm == "routed":
        planned.append(("early", "none", 1.0, comparing(seed)))
    return [evaluation for evaluation in planned if value_at(lines, arm, seed, evaluation) is None]


def arguments_of(
    name: str, arm: str, seed: int, rate: float, planned: list[Planned], runs: Path, overrides: Sequence[str],
    fid_overrides: Sequence[str],
) -> list[str]:  # fmt: skip
    """Return the arguments of `python -m evidence` that train a run, if this is not done yet, and evaluate it as planned."""
    is_search = seed == SEARCH_SEED
    last, saved, evaluated = ("search",) * 3 if is_search else ("full", "early", "half")
    train = [
        f"experiment={ARMS[arm][0]}", "train.batch_size=16", *TRAIN, f"seed={seed}",
        f"train.num_steps={step_of(arm, last)}", f"train.lr={rate}", f"checkpoint.every={step_of(arm, saved)}",
        f"evaluation.every={step_of(arm, evaluated)}", f"name={name}", f"output_dir={runs}",
        *([] if is_search else [f"checkpoint.keep_every={step_of(arm, saved)}"]), *overrides,
    ]  # fmt: skip
    folders = {part: runs / name / "checkpoints" / store.folder_name(step_of(arm, part)) for part in PARTS}
    evaluations = []
    for (part, guidance, (first_seed, num_samples)), scales in group_scales(planned).items():
        key, _, _, further = GUIDANCES.get(guidance, ("guidance.cfg_scale", (), (), ""))
        evaluations.append([
            f"checkpoint={folders[part]}", *FID, "sampler.num_steps=12", "sampling.precision=bf16", "sampling.batch_size=50",
            f"guidance={guidance}", *further.format(early=folders["early"]).split(),
            *([f"{key}={json.dumps(scales)}"] if guidance in GUIDANCES else []), f"evaluation.num_samples={num_samples}",
            f"evaluation.first_seed={first_seed}", *fid_overrides,
        ])  # fmt: skip
    return command_line(train, evaluations)


def show_256(lines: list[dict]) -> None:
    """Print the search, the choice of the guidances, all arms, the outcomes, and ratios of validation losses.

    All pairs count whose runs are complete. There are no outcomes with fewer than three, or while results of a pair are missing.
    """
    rows = []
    for arm in ARMS:
        found = search(lines, arm, ())
        rows.append([arm, ", ".join(_marked(f"{x:g}", x == best(found), mean_text(DISTANCE, [found[x]])) for x in sorted(found))])
    print_table(["arm", f"distance by learning rate, {SEARCHING[1]:,} samples, one seed"], rows)

    rows, seeds = [], complete_seeds(lines)[:NUM_CHOOSING_SEEDS]
    for arm, time, guidance in product(ARMS, TIMES, ("none", *GUIDANCES)):
        if found := mean_logs(lines, arm, time, guidance):
            cells = []
            for scale in found:
                distances = [value_at(lines, arm, seed, (time, guidance, scale, choosing(seed))) for seed in seeds]
                cells.append(_marked(f"{scale:g}", scale == best(found), mean_text(DISTANCE, distances)))
            notes = ["chosen"] * (choose(lines, arm, time) == (guidance, best(found)))
            all_scales = GUIDANCES[guidance][2] if guidance in GUIDANCES else ()
            notes += ["an end of all scales"] * (best(found) in (*all_scales[:1], *all_scales[-1:]))
            rows.append(
                [arm, time, guidance + f" ({', '.join(notes)})" * bool(notes), as_ratio(found[best(found)]), ", ".join(cells)]
            )
    columns = ["arm", "time", "guidance", "lowest geometric mean", f"distance by scale, {len(seeds)} seeds of 500 samples"]
    if rows:
        print_table(columns, rows)

    counted = complete_seeds(lines)
    if len(counted) < NUM_CHOOSING_SEEDS:
        sys.stdout.write(f"{len(counted)} pairs are complete, and outcomes need {NUM_CHOOSING_SEEDS}.\n\n")
        return
    if missing := runs_without_results(lines, [(arm, seed) for seed in counted for arm in ARMS]):
        sys.stdout.write(f"There are no outcomes yet, because results of complete pairs are missing: {', '.join(missing)}.\n\n")
        return
    rows = []
    for arm, time in product(ARMS, TIMES):
        for guidance, scale in compared_guidances(lines, arm, time):
            found = [
                [value_at(lines, arm, seed, (time, guidance, scale, comparing(seed)), metric) for seed in counted]
                for metric in NAMES
            ]
            rows.append([arm, time, guidance, f"{scale:g}", str(len(counted)), *map(mean_text, NAMES, found)])
    print_table(["arm", "time", "guidance", "scale", "seeds", *NAMES.values()], rows)

    primary, secondary = ([*outcomes] for outcomes in (primary_outcomes(lines, counted), secondary_outcomes(lines, counted)))
    corrected = [
        f"{p:.2g}, {'decided' if p < 0.05 else 'undecided'}" for p in holm([contrast.p_value for *_, contrast in primary])
    ]
    rows = [[name, contrast.text(text_of)] for name, text_of, contrast in (*primary, *secondary)]
    print_table(["primary outcome, paired by seed", "95% interval", "p (Holm)"], [[*row, p] for row, p in zip(rows, corrected)])
    print_table(["secondary outcome, paired by seed", "95% interval"], rows[len(primary) :])
    lines = [line for line in lines if line["seed"] in counted]
    for time in TIMES:
        show_loss_ratios(lines, *({"arm": arm, "step": step_of(arm, time)} for arm in ARMS), name=f"validation loss, {time} time")


def runs_without_results(lines: list[dict], runs: Sequence[tuple[str, int]]) -> list[str]:
    """Return the names of the runs (arm, seed) that lack evaluations or validation losses."""
    losses = {(arm, time): find_values(lines, LOSS, arm=arm, step=step_of(arm, time)) for arm in ARMS for time in TIMES}
    without_losses = {compared_run(arm, seed) for arm, seed in runs for time in TIMES if seed not in losses[arm, time]}
    return sorted({*missing_evaluations(lines, runs)} | without_losses)


def _marked(name: str, is_best: bool, result: str) -> str:
    return f"**{name}: {result}**" if is_best else f"{name}: {result}"


def compared(lines: list[dict], arm: str, part: str, seeds: Sequence[int], guided: bool, metric: str = DISTANCE) -> list[float]:
    """Return a metric of the comparison for each seed: with the guidance of the arm, or unguided."""
    guidance = choose(lines, arm, part) if guided else ("none", 1.0)
    return [value_at(lines, arm, seed, (part, *guidance, comparing(seed)), metric) for seed in seeds]


def log_ratios(lines: list[dict], time: str, seeds: Sequence[int], guided: bool) -> list[float]:
    """Return the log ratio of the distances, routed / dense, for each seed."""
    return [log(ours / theirs) for ours, theirs in zip(*(compared(lines, arm, time, seeds, guided) for arm in ARMS))]


Outcome = tuple[str, object, Contrast]  # name, function that formats an estimate, and contrast


def primary_outcomes(lines: list[dict], seeds: Sequence[int]) -> Iterator[Outcome]:
    for number, time in enumerate(reversed(TIMES), start=1):
        name = f"{number}. ratio of distances, routed / dense, each with its guidance, {time} time"
        yield name, as_ratio, Contrast.of([(1, log_ratios(lines, time, seeds, guided=True))])


def secondary_outcomes(lines: list[dict], seeds: Sequence[int]) -> Iterator[Outcome]:
    half, full = (log_ratios(lines, time, seeds, guided=True) for time in TIMES)
    ratio = "ratio of distances, routed / dense"
    yield f"{ratio}, each with its guidance, full time / half time", as_ratio, Contrast.of([paired(full, half)])
    for time in reversed(TIMES):
        yield f"{ratio}, unguided, {time} time", as_ratio, Contrast.of([(1, log_ratios(lines, time, seeds, guided=False))])
    for metric, time in product([metric for metric in NAMES if metric != DISTANCE], reversed(TIMES)):
        sides = [compared(lines, arm, time, seeds, True, metric) for arm in ARMS]
        yield (
            f"{NAMES[metric]}, routed - dense, each with its guidance, {time} time",
            "{:.3f}".format,
            Contrast.of([paired(*sides)]),
        )
    for time in reversed(TIMES):
        losses = [find_values(lines, LOSS, arm=arm, step=step_of(arm, time)) for arm in ARMS]
        logs = [(1, [log(losses[0][seed] / losses[1][seed]) for seed in seeds])]
        yield f"ratio of validation losses, routed / dense, {time} time", lambda x: f"{exp(x):.3f}", Contrast.of(logs)
    for time in reversed(TIMES):
        step, dense = step_of("dense", time), compared(lines, "dense", time, seeds, guided=False)
        routed = unguided_at(lines, step, seeds)
        name = f"{ratio}, unguided, after {step:,} steps (interpolated)"
        yield name, as_ratio, Contrast.of([paired(routed, [*map(log, dense)])])


def unguided_at(lines: list[dict], step: int, seeds: Sequence[int]) -> list[float]:
    """Return the unguided log distance of the routed runs at a step, along a line of log distance over log steps."""
    parts = ("early", *TIMES)
    before, after = next(pair for pair in zip(parts, parts[1:]) if step_of("routed", pair[1]) >= step)
    first, last = (step_of("routed", part) for part in (before, after))
    share = log(step / first) / log(last / first)
    ends = zip(*(compared(lines, "routed", part, seeds, guided=False) for part in (before, after)))
    return [(1 - share) * log(start) + share * log(end) for start, end in ends]
