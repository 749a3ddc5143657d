"""The evidence: tables and outcomes by hand, pages that show what the command prints, and rules that keep their words."""

import contextlib
import hashlib
import io
import json
import math
import re

import numpy as np
import pytest
from conftest import REPOSITORY
from omegaconf import OmegaConf
from scipy.stats import ttest_ind

from cli.compose import compose_overrides
from common.errors import UserError
from evidence.contrasts import FOLDER, NAMES
from evidence.tables import collect, show_all, show_comparisons, show_equal_time
from evidence.tokens import draw_scales, show_tokens


def test_equal_time_compares_each_arm_at_its_best_rate_by_the_pooled_deviation(capsys):
    values = {("A", 1): (10, 12, 11), ("A", 2): (20, 21, 22), ("A", 3): (1,), ("C", 1): (9, 10, 8), ("C", 2): (5, 6, 7, 8)}
    about = [(arm, lr, seed, n, v) for (arm, lr), vs in values.items() for seed, v in enumerate(vs) for n in (1000, 2000)]
    metrics = [dict.fromkeys(NAMES, value) for *_, value in about]
    names = ("arm", "lr", "seed", "num_samples")
    lines = [dict(zip(names, one), step=9, guidance="none", metrics=values) for one, values in zip(about, metrics)]
    lines.append({**lines[0], "guidance": "cfg"})  # lines with another guidance form another row
    show_equal_time(lines)
    text = capsys.readouterr().out
    assert "| 2 | 21.00 ± 1.00 | 6.00 ± 1.00 |" in text  # the first three seeds choose the rate; A at 3 has only one
    assert "| A | 1 | 3 | 11.00 ± 1.00 |" in text and "| C | 2 | 4 | 6.50 ± 1.29 |" in text
    assert "| C - A | -4.50 (-6.73 to -2.27) |" in text  # Welch: error (1/3 + 5/12)^0.5, 4.96 degrees of freedom; t = 2.577
    # Pooled: squares 2 and 5, 2 + 3 degrees of freedom: s = 1.183; error s (1/3 + 1/4)^0.5 = 0.904; t = 2.571.
    assert "| C - A | -4.50 (-6.82 to -2.18) |" in text
    # At 5 degrees of freedom, P(t > 2.571) is 80% if the noncentrality of t is 3.514.
    near = [line | {"metrics": dict.fromkeys(NAMES, line["metrics"]["fd_fashion"] + 4 * (line["arm"] == "C"))} for line in lines]
    show_equal_time(near)
    assert "| C - A | -0.50 (-2.82 to 1.82; 80%: 3.18) |" in capsys.readouterr().out


def test_unplanned_comparisons_have_welchs_p_values_and_holms_correction(capsys):
    rng = np.random.default_rng(0)
    found = {arm: (rng.standard_normal((4, 3)) + 3 * (arm == "C")).tolist() for arm in "ABC"}
    show_comparisons(found, "unplanned comparison")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:] if line]
    tests = [ttest_ind(found["C"][i], found[arm][i], equal_var=False).pvalue for arm in "AB" for i in range(4)]
    assert [float(row[2]) for row in rows] == [float(f"{p:.2g}") for p in tests]
    ranked = sorted(range(8), key=tests.__getitem__)
    holm = {i: min(1, max((8 - rank) * tests[j] for rank, j in enumerate(ranked[: ranked.index(i) + 1]))) for i in ranked}
    assert [float(row[3].rstrip(" |")) for row in rows] == [float(f"{holm[i]:.2g}") for i in range(8)]


def test_the_primary_outcomes_follow_the_rule(capsys, tmp_path):
    """Log distances have a standard deviation of 0.1 between seeds, and parabolas over the scale have known minima."""
    lines = []

    def add(arm, step, logs, cfg_scale=1.0, first_seed=2000):
        for seed, value in enumerate(logs):
            about = {"arm": arm, "step": step, "seed": seed, "cfg_scale": cfg_scale, "first_seed": first_seed}
            lines.append(about | {"metrics": dict.fromkeys(NAMES, math.exp(value))})

    for arm, first in (("routed-256", 1.0), ("dense-256", 1.5), ("routed-64", 1.0), ("dense-64", 1.2)):
        add(arm, 2000, [first, first + 0.1, first + 0.2])
    lines.append(lines[-1] | {"seed": 3, "metrics": dict.fromkeys(NAMES, math.exp(1.3))})  # outcome 1 uses all seeds of an arm
    for arm, minima in (("dense-64", (2.0, 2.1, 2.2)), ("routed-64", (1.5, 1.6, 1.7))):
        for scale in (1.0, 1.25, 1.5, 1.75, 2.0, 2.5):
            add(arm, 3000, [(scale - minimum) ** 2 for minimum in minima], scale, first_seed=0)
            add(arm, 3000, [0, 0.1, 0.2] if scale == (2.0 if arm == "dense-64" else 1.5) else [1, 1.1, 1.2], scale)
    add("routed-64-end", 3000, [0.9, 1.1, 1.0, 9.0])  # outcome 3 does not use a seed that routed-64 lacks
    for arm, speed in (("dense-64", 3.0), ("routed-64", 4.0)):  # a routed step takes 0.75 of the time
        lines.append({"arm": arm, "seed": 0, "steps_per_sec": [speed, speed, 1.0], "metrics": {}})
    show_tokens(lines)
    text = capsys.readouterr().out
    # Standard errors (0.08/9 (1 + 1/4))^0.5, 0.1 (2/3)^0.5 (twice) and 0.1 / 3^0.5, with 9, 4, 4 and 2 degrees of freedom.
    # p: 0.0192, 1, 0.0036, 0.225; by Holm's method the lowest times 4, the second times 3, and so on.
    assert "with 256 tokens / with 64 | 0.74 (0.58 to 0.94) | 9 | 0.058 |" in text
    assert "seeds that all four arms share | 0.74 (0.57 to 0.97) | 8 |" in text
    assert "at the scales 1.5 / 2 | 1.00 (0.80 to 1.25; 80%: 1.36) | 4 | 1 |" in text
    assert "best scale, routed - dense | -0.50 (-0.73 to -0.27) | 4 | 0.014 |" in text
    assert "dense end / routed to the end | 0.90 (0.71 to 1.16; 80%: 1.39) | 2 | 0.45 |" in text
    # Dense log distances are 1.2 after 2,000 steps and 1 after 3,000, routed ones 1 after both; the seeds add 0, 0.1 and 0.2.
    assert "after 3,000 steps / after 2,000, paired by seed | 1.22 (1.22 to 1.22) | 2 |" in text
    # 3,000 routed steps take as long as 2,250 dense ones: 1.2 - 0.2 log(1.125) / log(1.5) = 1.142; along a line, 1.154.
    assert "takes 0.75: ratio of distances, linear, paired by seed | 0.86 (0.86 to 0.86) | 2 |" in text
    assert "takes 0.75: ratio of distances, power law | 0.87 (0.69 to 1.09; 80%: 1.36) | 4 |" in text
    draw_scales(lines, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"fashion_scales.png", "fashion_precision_recall.png"}


def test_collected_lines_hold_every_evaluation_with_its_weights_and_versions(tmp_path):
    run = tmp_path / "runs/dense-64_seed5"
    (run / "evaluations").mkdir(parents=True)
    (run / "checkpoints/step_0000020").mkdir(parents=True)
    composed = compose_overrides(["seed=5", "train.lr=0.004", "train.num_steps=20"])
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(composed, resolve=True)), run / "config.yaml")
    how = {"num_samples": 9, "first_seed": 7, "detector": "small-fashion", "reference": "a.npz", "labels": "random"}
    how |= {"reference_hash": "456"}
    unguided, weaker = {"cfg_scale": 1.0}, {"guidance": "autoguidance", "guidance.w": 1.5, "guidance.checkpoint": "b"}
    evaluation = {"step": 20, "checkpoint": "789", "metrics": {"fd": 3.0}, "jackknife": {"fd": [1, 3]}}
    evaluations = [evaluation | {"settings": how | given} for given in (unguided, weaker)]
    losses = [
        {"step": step, "settings": {"num_samples": 9}, "metrics": {"validation_loss": 0.5}, "by_level": [0.5]}
        for step in (10, 20)
    ]
    versions = {"commit": "abc", "modified": False, "device": "cpu", "torch": "2.15"}
    starts = [versions | {"python": "3.11", "step": step, "time": "noon", "resumed": step > 0, "key": 1} for step in (0, 10)]
    starts[1]["commit"] = "def"  # the code of a resumed start
    files = {"starts.jsonl": starts, "evaluations/results.jsonl": losses + evaluations}
    files["metrics.jsonl"] = [{"step": 10, "loss": 1.0, "steps_per_sec": 2.0}]
    for name, lines in files.items():
        (run / name).write_text("\n".join(map(json.dumps, lines)))
    (run / "checkpoints/step_0000020/manifest.json").write_text(json.dumps({"ema.safetensors": {"blake2b": "123"}}))
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/dense-64_seed5.log").touch()
    for empty in (run / "checkpoints", tmp_path / "absent"):
        with pytest.raises(UserError, match=f"runs=.*{empty.name} holds no runs named search_"):
            collect(str(tmp_path / "lines.jsonl"), str(empty))
    collect(str(tmp_path / "lines.jsonl"), str(tmp_path / "runs"))
    with pytest.raises(UserError, match="output=.*lines.jsonl exists; give a new file"):
        collect(str(tmp_path / "lines.jsonl"), str(tmp_path / "runs"))
    about, weights = {"arm": "dense-64", "seed": 5, "lr": 0.004}, {"ema": "123"}
    loss = about | {"metrics": {"validation_loss": 0.5}, "validation_loss_by_level": [0.5]}
    sampled = (
        about | how | versions | weights | {"step": 20, "metrics": {"fd": 3.0}, "standard_errors": {"fd": 1.0}, "content": "789"}
    )
    kept = [{key: x for key, x in start.items() if key not in ("resumed", "key")} for start in starts]
    assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == [
        loss | {"step": 10},  # its checkpoint is not kept
        loss | weights | {"step": 20},
        sampled | {"guidance": "none", "scale": 1.0, "settings": unguided},
        sampled | {"guidance": "autoguidance", "scale": 1.5, "settings": {"guidance": "autoguidance", "guidance.w": 1.5}},
        about | weights | {"step": 20, "starts": kept, "steps_per_sec": [2.0], "metrics": {}},
    ]


@pytest.fixture(scope="module")
def printed():
    """Fixture: what `python -m evidence tables` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_all()
    return out.getvalue()


def test_the_pages_show_what_the_command_prints(printed):
    tables = printed.strip().split("\n\n")
    pages = [page.read_text(encoding="utf-8") for page in FOLDER.glob("fashion_*.md")]
    assert len(tables) >= 17 and all(any(table in page for page in pages) for table in tables)


def test_every_interval_of_the_page_is_printed_by_the_command(printed):
    page = (REPOSITORY / "evidence" / "README.md").read_text(encoding="utf-8")
    intervals = re.findall(r"[(,;]\s*(-?[\d.]+\s+to\s+-?[\d.]+(?:;\s+80%:\s+[\d.]+)?)[;)]", page)
    assert len(intervals) >= 30
    assert not [found for found in intervals if "(" + re.sub(r"\s+", " ", found) not in printed]


# The first lines of a page that hold its rule, and their hash. A rule is never reworded: corrections with a date follow it.
RULES = {
    "fashion_256_time": (104, "deb5b1a177b25d1fd29c55218dc63c43c049e61e59196121a3a2c1f558977791"),
    "fashion_guided_time": (95, "9b52f1e06427af239e04ec48d63f00dca045c9b3f81d81f3896805e71f6a935f"),
    "fashion_learning_rates": (71, "bc33d14435bd59130b1dc00a13ab69f8be2bf7ed69f0afe997a2aff1ae19731b"),
    "fashion_sprint": (60, "438d3788beb77732505f70b342bba4e465f2070aca2baacf59c4e7d546c19687"),
    "fashion_tokens": (71, "f86a6e32cba3deabf48b5b0398c8e6180dbe92c3c2737ebe14f752024a94c0d9"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_the_words_of_its_commit(name):
    num_lines, digest = RULES[name]
    lines = (FOLDER / f"{name}.md").read_bytes().splitlines(keepends=True)
    assert hashlib.sha256(b"".join(lines[:num_lines])).hexdigest() == digest
