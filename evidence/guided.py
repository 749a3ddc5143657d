"""Train, evaluate and compare networks in equal time at the best guidance of each (results/fashion/fashion_guided_time.md).

`guided` runs everything that the rule plans and appends one line per evaluation and run to a results file. It can be stopped and
repeated at any time. `show_guided` prints the tables of the page from this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated

from pydantic import BeforeValidator

from checkpoints import store
from common.errors import UserError
from common.files import write_atomically
from common.types import PositiveInt, Text
from configs.sampling_schema import parse_numbers
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
    print_table,
    show_loss_ratios,
)
from evidence.runs import FID, TRAIN, Planned, Recorder, command_line, compared_run, group_scales, log_file, run_all

GUIDED_TIME = FOLDER / "fashion_guided_time.jsonl"
SEEDS = range(10, 18)
PARTS = {"early": 1, "half": 5, "full": 10}  # evaluated checkpoints, in tenths of the steps
TIMES = ("half", "full")
DENSE_STEP_SEC = 0.6572  # on one CPU thread, by the measurement of the rule
CHOOSING, COMPARING = (0, 500), (2000, 2000)  # the samples of an evaluation: first sampling seed, and their number
NUM_LEVELS = 12  # noise levels of the sampler
WEIGHTS = (1.25, 1.5, 2.0, 3.0)
# For each guidance: the key and the values of its scale, and further fid.py arguments. {early} is the run's early checkpoint.
GUIDANCES = {
    "cfg": ("guidance.cfg_scale", (1.5, 2.0, 2.5), "guidance=cfg"),
    "autoguidance": ("guidance.w", WEIGHTS, "guidance=autoguidance guidance.checkpoint={early}"),
    "sparse": ("guidance.w", WEIGHTS, "guidance=sparse guidance.r_strong=0.5 guidance.r_weak=0.9"),
    "sparse, early": (
        "guidance.w", WEIGHTS, "guidance=sparse guidance.checkpoint={early} guidance.r_strong=0.0 guidance.r_strong_last=0.6"
        " guidance.r_weak=0.6 guidance.r_weak_last=0.0",
    ),
}  # fmt: skip
UNGUIDED = ("guidance.cfg_scale", (1.0,), "guidance=cfg")


@dataclass(frozen=True)
class Arm:
    experiment: str  # for train.py
    num_steps: int  # a multiple of 10
    guidances: tuple[str, ...]
    batch_size: int = 64
    seeds: Sequence[int] = SEEDS

    def step(self, part: str) -> int:
        return self.num_steps * PARTS[part] // 10


ARMS = {
    "dense": Arm("fashion_dit_xs4", 8600, ("cfg", "autoguidance")),
    "routed": Arm("fashion_dit_xs4_tread", 12150, tuple(GUIDANCES)),
    "dense-46": Arm("fashion_dit_xs4", 12150, ("cfg", "autoguidance"), batch_size=46, seeds=SEEDS[:4]),
}
PRIMARY = ("dense", "routed")  # arms that the primary outcomes compare
Seeds = Annotated[list[int], BeforeValidator(parse_numbers)]


def guided(
    seeds: Seeds = tuple(SEEDS), jobs: PositiveInt = 1, overrides: list[str] = (), fid_overrides: list[str] = (),
    runs: Text = "runs/guided_time", output: Text = str(GUIDED_TIME), elsewhere: Seeds = (), commit: Text | None = None,
) -> None:  # fmt: skip
    """Train and evaluate the arms of the rule with these training seeds, and append new results to `output`.

    Args:
        jobs: Number of runs at a time. Each uses one CPU thread, and the GPU if there is one.
        overrides: More train.py arguments, for settings that only change the speed, such as machine.compile=none.
        fid_overrides: More fid.py arguments, for settings that only change the speed, such as sampling.batch_size=500.
        runs: Folder of the runs and their logs.
        elsewhere: Seeds that run on another machine. Their results in `output` help to choose the scales.
        commit: Commit of the code to record on a machine without the git history.

    Raises:
        UserError: The rule has no such seed, or a run failed or was stopped. The same command resumes it.
    """
    if unknown := [seed for seed in (*seeds, *elsewhere) if seed not in SEEDS]:
        raise UserError(f"seeds={unknown} are not in the rule, which has {SEEDS[0]} to {SEEDS[-1]}")
    recorder = Recorder(Path(runs), Path(output), commit)
    # The arms of the primary outcomes come first, so that few hours give as many complete pairs as possible. All runs of an arm
    # are sampled at all scales before their first comparison, because the mean over seeds chooses the scale.
    secondary = [arm for arm in ARMS if arm not in PRIMARY]
    for arms, plan in product((PRIMARY, secondary), (plan_choosing, plan_comparing)):
        lines = recorder.lines([*seeds, *elsewhere])
        tasks = [(arm, seed) for seed in seeds for arm in arms if seed in ARMS[arm].seeds]
        missing = {task: planned for task in tasks if (planned := unrecorded(lines, *task, plan(lines, task[0])))}
        commands = {
            compared_run(*task): command(*task, planned, Path(runs), overrides, fid_overrides)
            for task, planned in missing.items()
        }
        run_all(commands, jobs, Path(runs), recorder.record)
        lines = recorder.lines([*seeds, *elsewhere])
        if failed := [task for task in missing if unrecorded(lines, *task, missing[task])]:
            logs = ", ".join(str(log_file(Path(runs), compared_run(*task))) for task in failed)
            remedy = "the same command resumes them. If a loss diverged, leave its seed out of seeds="
            raise UserError(f"{len(failed)} runs are not complete (see {logs}); {remedy}")


def plan_choosing(lines: list[dict], arm: str) -> list[Planned]:
    """Return the evaluations that choose the scales: at half and full time, at every scale of every guidance."""
    return [(t, name, scale, CHOOSING) for t, name in product(TIMES, ARMS[arm].guidances) for scale in GUIDANCES[name][1]]


def plan_comparing(lines: list[dict], arm: str) -> list[Planned]:
    """Return the evaluations of the comparison: at half and full time, unguided and at the chosen scale of every guidance."""
    chosen = [(time, name, scale, COMPARING) for time in TIMES for name, (scale, _) in choose_scales(lines, arm, time).items()]
    return [*((time, "none", 1.0, COMPARING) for time in TIMES), *chosen]


def choose_scales(lines: list[dict], arm: str, time: str) -> dict[str, tuple[float, float]]:
    """For each guidance with results, return the scale with the lowest mean log distance over training seeds, and this mean."""
    means: dict[str, dict[float, float]] = {}
    for name in ARMS[arm].guidances:
        for scale in GUIDANCES[name][1]:
            if found := values_at(lines, arm, time, name, scale, CHOOSING):
                means.setdefault(name, {})[scale] = fmean(map(log, found.values()))
    return {name: min(scales.items(), key=lambda item: item[1]) for name, scales in means.items()}


def values_at(
    lines: list[dict], arm: str, time: str, guidance: str, scale: float, samples: tuple[int, int], metric: str = DISTANCE
) -> dict[int, float]:
    """Return a metric of samples by training seed."""
    evaluation = {"arm": arm, "step": ARMS[arm].step(time), "guidance": guidance, "scale": scale}
    return find_values(lines, metric, **evaluation, first_seed=samples[0], num_samples=samples[1])


def unrecorded(lines: list[dict], arm: str, seed: int, planned: list[Planned]) -> list[Planned]:
    return [evaluation for evaluation in planned if seed not in values_at(lines, arm, *evaluation)]


def command(
    arm: str, seed: int, planned: list[Planned], runs: Path, overrides: Sequence[str], fid_overrides: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of `python -m evidence` that train a run and evaluate it as planned."""
    own, name = ARMS[arm], compared_run(arm, seed)
    train = [
        f"experiment={own.experiment}", f"seed={seed}", f"name={name}", f"output_dir={runs}", f"train.num_steps={own.num_steps}",
        f"train.batch_size={own.batch_size}", *TRAIN,
        f"checkpoint.every={own.step('early')}", f"checkpoint.keep_every={own.step('early')}",
        f"evaluation.every={own.step('half')}", *overrides,
    ]  # fmt: skip
    folders = {part: runs / name / "checkpoints" / store.folder_name(own.step(part)) for part in PARTS}
    evaluations = []
    for (time, guidance, samples), scales in group_scales(planned).items():
        key, _, settings = GUIDANCES.get(guidance, UNGUIDED)
        evaluations.append([
            f"checkpoint={folders[time]}", *settings.format(early=folders["early"]).split(), f"{key}={json.dumps(scales)}",
            f"evaluation.num_samples={samples[1]}", f"evaluation.first_seed={samples[0]}",
            f"sampler.num_steps={NUM_LEVELS}", "sampling.batch_size=100", "machine.compile=none", *FID, *fid_overrides,
        ])  # fmt: skip
    return command_line(train, evaluations)


def complete_lines(lines: list[dict]) -> list[dict]:
    """Return the lines of the first seeds, in the order of the rule, that have all evaluations of the comparison.

    These are as many seeds as possible. Their lines alone choose the scales, so the evaluations depend on the number of seeds. A
    secondary arm counts with those of these seeds for which it is complete, too. A seed without lines of the comparison, such as
    one whose loss diverged, is skipped.
    """
    complete = _complete_lines(lines, PRIMARY)
    seeds = {line["seed"] for line in complete}
    of_seeds = [line for line in lines if line["seed"] in seeds]
    return complete + [line for arm in ARMS if arm not in PRIMARY for line in _complete_lines(of_seeds, [arm])]


def _complete_lines(lines: list[dict], arms: Sequence[str]) -> list[dict]:
    """Return the lines of the arms for as many of the first seeds as have all evaluations of the comparison in every arm."""
    compared = {(line["arm"], line["seed"]) for line in lines if line.get("first_seed") == COMPARING[0]}
    seeds = [seed for seed in SEEDS if all((arm, seed) in compared for arm in arms)]
    for number in range(len(seeds), 0, -1):
        counted = seeds[:number]
        found = [line for line in lines if line["arm"] in arms and line["seed"] in counted]
        if not any(unrecorded(found, arm, seed, plan_comparing(found, arm)) for arm, seed in product(arms, counted)):
            return found
    return []


def show_guided(lines: list[dict]) -> None:
    """Print the choice of the scales, all arms, the outcomes, and ratios of validation losses and step times.

    Only complete seeds count (see `complete_lines`).
    """
    started = sorted({line["seed"] for line in lines})
    lines = complete_lines(lines)
    if others := [seed for seed in started if not any(line["seed"] == seed for line in lines)]:
        typed = ",".join(map(str, started))
        sys.stdout.write(f"Seeds {others} have no complete comparison yet: `guided seeds=[{typed}]` completes it.\n\n")
    arms = [arm for arm in ARMS if any(line["arm"] == arm for line in lines)]
    rows = []
    for arm, time in product(arms, TIMES):
        best = choose_scales(lines, arm, time)
        lowest = min((mean for _, mean in best.values()), default=None)
        for name, (chosen, mean) in best.items():
            found = {scale: [*values_at(lines, arm, time, name, scale, CHOOSING).values()] for scale in GUIDANCES[name][1]}
            marks = {scale: "**" * (scale == chosen) for scale in found}
            cells = [f"{marks[x]}{x:g}: {mean_text(DISTANCE, values)}{marks[x]}" for x, values in found.items() if values]
            rows.append([arm, time, name + " (best)" * (mean == lowest), str(max(map(len, found.values()))), ", ".join(cells)])
    print_table(["arm", "time", "guidance", "seeds", f"distance by scale, {CHOOSING[1]} samples"], rows)

    rows = []
    for arm, time in product(arms, TIMES):
        for _, name, scale, samples in [planned for planned in plan_comparing(lines, arm) if planned[0] == time]:
            found = [[*values_at(lines, arm, time, name, scale, samples, metric).values()] for metric in NAMES]
            if found[0]:
                rows.append([arm, time, name, f"{scale:g}", str(len(found[0])), *map(mean_text, NAMES, found)])
    print_table(["arm", "time", "guidance", "scale", "seeds", *NAMES.values()], rows)

    primary, secondary = compare_at_best_guidance(lines)
    corrected = [f"{p:.2g}" for p in holm([contrast.p_value for *_, contrast in primary])]
    rows = [[name, str(contrast.df + 1), contrast.text(text_of)] for name, text_of, contrast in (*primary, *secondary)]
    print_table(["primary outcome", "seeds", "95% interval", "p (Holm)"], [[*row, p] for row, p in zip(rows, corrected)])
    print_table(["secondary outcome", "seeds", "95% interval"], rows[len(primary) :])
    print_table(["left out (unplanned)", *(f"outcome {i + 1}" for i in range(len(primary)))], leave_one_out(lines))

    show_loss_ratios(lines, *({"arm": arm, "step": ARMS[arm].step("full")} for arm in ("routed", "dense")))
    timed = [line for line in lines if line.get("steps_per_sec")]
    times = {(line["arm"], line["seed"], line["starts"][-1]["device"]): median(line["steps_per_sec"]) for line in timed}
    rows = []
    for arm, device in product(arms[1:], dict.fromkeys(device for *_, device in times)):
        pairs = [(times.get(("dense", seed, device)), times.get((arm, seed, device))) for seed in SEEDS]
        if ratio := [dense / other for dense, other in pairs if dense and other]:
            spread = f"{min(ratio):.3f} to {max(ratio):.3f}"
            rows.append([f"{arm} / dense, {device}", str(len(ratio)), f"{median(ratio):.3f}", spread])
    print_table(["time of a step", "seeds", "median", "lowest and highest"], rows)


def leave_one_out(lines: list[dict]) -> list[list[str]]:
    """Return a row for each seed with the primary outcomes of the others, at the scales that all seeds choose."""
    rows = []
    for seed in sorted({line["seed"] for line in lines}):
        kept = [line for line in lines if line["seed"] != seed or line.get("first_seed") != COMPARING[0]]
        rows.append([f"seed {seed}", *(contrast.text(text_of) for _, text_of, contrast in compare_at_best_guidance(kept)[0])])
    return rows


def compared_values(lines: list[dict], arm: str, time: str, guidance: str = "best", metric: str = DISTANCE) -> dict[int, float]:
    """Return a metric of the comparison by training seed, at a guidance's chosen scale.

    `best` is the guidance that is best on the choosing samples, and `none` is unguided.
    """
    scales = choose_scales(lines, arm, time)
    if guidance == "best":
        guidance = min(scales, key=lambda name: scales[name][1], default="none")
    scale = 1.0 if guidance == "none" else scales.get(guidance, (1.0, 0.0))[0]
    return values_at(lines, arm, time, guidance, scale, COMPARING, metric)


def draw_guided(lines: list[dict], folder: Path) -> None:
    """Plot the distance against time, unguided and at the best guidance, as means over the seeds of `complete_lines`."""
    settings, found = [], []
    for arm, (guidance, name), time in product(PRIMARY, {"none": "unguided", "best": "best guidance"}.items(), TIMES):
        hours = ARMS["dense"].step(time) * DENSE_STEP_SEC / 3600  # the arms take equal times
        settings.append({"": f"{arm}, {name}", "hours of one CPU thread": hours})
        found.append([*compared_values(lines, arm, time, guidance).values()])
    picture = plot(settings, [*map(fmean, found)], [*map(stdev, found)], "distance")
    write_atomically(folder / "fashion_guided_time.png", picture)


def compare_at_best_guidance(lines: list[dict]) -> tuple[list[tuple], list[tuple]]:
    """Return the primary and secondary outcomes: (name, function that formats an estimate, contrast). All are paired by seed.

    Outcomes with fewer than two common seeds are omitted.
    """
    find = partial(compared_values, lines)
    times = [*reversed(TIMES)]
    ratio, difference = (as_ratio, log), ("{:.3f}".format, float)  # how an estimate is written, and what is compared

    def sides(time: str, guidance: str = "best", metric: str = DISTANCE) -> list[dict[int, float]]:
        return [find(arm, time, guidance, metric) for arm in ("routed", "dense")]

    def quotients(ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
        return {seed: ours[seed] / theirs[seed] for seed in ours.keys() & theirs.keys()}

    def contrasts(outcomes: list[tuple]) -> Iterator[tuple]:
        for name, text_of, transform, (ours, theirs) in outcomes:
            seeds = sorted(ours.keys() & theirs.keys())
            values = ([transform(side[seed]) for seed in seeds] for side in (ours, theirs))
            if len(seeds) > 1:
                yield name, text_of, Contrast.of([paired(*values)])

    full, half = map(sides, times)
    routed = "ratio of distances, routed / dense"
    primary = [
        (f"1. {routed}, each at its best guidance, full time", *ratio, full),
        (f"2. {routed}, each at its best guidance, full time / half time", *ratio, (quotients(*full), quotients(*half))),
    ]
    secondary = [(f"{routed}, each at its best guidance, half time", *ratio, half)]
    for guidance, time in product(("none", *ARMS["dense"].guidances), times):
        name = "unguided" if guidance == "none" else guidance
        secondary.append((f"{routed}, {name}, {time} time", *ratio, sides(time, guidance)))
    only_routed = [name for name in ARMS["routed"].guidances if name not in ARMS["dense"].guidances]
    for guidance, time in product(only_routed, times):
        name = f"ratio of distances, routed with {guidance} guidance / dense at its best, {time} time"
        secondary.append((name, *ratio, (find("routed", time, guidance), find("dense", time))))
    for metric, time in product([metric for metric in NAMES if metric != DISTANCE], times):
        name = f"{NAMES[metric]}, routed - dense, each at its best guidance, {time} time"
        secondary.append((name, *difference, sides(time, metric=metric)))
    for (ours, theirs), time in product((("dense-46", "dense"), ("routed", "dense-46")), times):
        name = f"ratio of distances, {ours} / {theirs}, each at its best guidance, {time} time"
        secondary.append((name, *ratio, (find(ours, time), find(theirs, time))))
    for time in times:
        losses = [find_values(lines, LOSS, arm=arm, step=ARMS[arm].step(time)) for arm in ("routed", "dense")]
        name = f"ratio of validation losses, routed / dense, {time} time"
        secondary.append((name, lambda x: f"{exp(x):.3f}", log, losses))
    return [*contrasts(primary)], [*contrasts(secondary)]
