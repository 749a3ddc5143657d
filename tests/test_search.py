"""fid.py search=: optima of known functions, and a search that was stopped."""

import json

import pytest
from conftest import run_fid, run_train

from common.errors import UserError
from extras.search import NAMES, Axis, minimise, parse
from sampling.evaluator import Evaluator


def counted(function):
    calls = []

    def called(values):
        calls.append(values)
        return function(*values)

    return called, calls


@pytest.mark.parametrize("optimum", [1.02, 1.3, 1.55, 2.0, 2.9])
def test_one_setting_is_found_to_a_twentieth_of_its_range_with_less_than_half_of_a_grids_evaluations(optimum):
    function, calls = counted(lambda x: abs(x - optimum) ** 1.5)
    (best,) = minimise([Axis("cfg_scale", 1.0, 3.0)], function)
    assert abs(best - optimum) <= 0.1 and len(calls) <= 8 and len(set(calls)) == len(calls)
    assert best == min(calls, key=lambda x: abs(x[0] - optimum))[0]


def test_two_settings_that_depend_on_each_other_are_found_in_turns():
    function, calls = counted(lambda x, y: (x - 1.6) ** 2 + 4 * (y - 0.1 - 0.04 * (x - 1)) ** 2 + 0.5 * (x - 1.6) * (y - 0.12))
    best = minimise([Axis("cfg_scale", 1.0, 3.0), Axis("ema_length", 0.05, 0.25)], function)
    assert abs(best[0] - 1.6) < 0.1 and abs(best[1] - 0.124) < 0.02
    assert len(calls) <= 30  # of a grid with steps of a twentieth: 441


@pytest.mark.parametrize(
    "texts",
    [["cfg_scale"], ["cfg_scale:3:1"], ["cfg_scale:1:x"], ["num_steps:1:9"], ["cfg_scale:1:inf"], ["cfg_scale:1:2"] * 2],
)
def test_what_is_no_axis_is_refused_with_what_is_accepted(texts):
    with pytest.raises(UserError, match=r"search=.*(<setting>:<lowest>:<highest>.*cfg_scale, ema_length|one setting or two)"):
        parse(texts, NAMES)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("run"), "run", "train.num_steps=4", "train.lr=1e-2")


SEARCH = ["guidance=cfg", "search=[cfg_scale:1:3]", "search_num_samples=40", "num_samples=60"]
SEARCH += ["num_steps=2", "batch_size=20", "cpu_threads=1"]


def search(run, output, *overrides):
    run_fid(f"checkpoint={run}", f"output={output}", *SEARCH, *overrides)
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def test_a_search_that_was_stopped_ends_where_it_would_have_with_the_same_evaluations(run, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    whole = search(run, tmp_path / "whole")
    scales = [line["point"]["cfg_scale"] for line in whole]
    assert [line["point"]["num_samples"] for line in whole] == [40] * (len(whole) - 1) + [60]
    best = min(whole[:-1], key=lambda line: line["metrics"]["fd_digits"])
    assert whole[-1]["point"]["cfg_scale"] == best["point"]["cfg_scale"] and f"cfg_scale {scales[-1]:g}" in caplog.text
    assert (tmp_path / "whole" / "results.png").exists()

    evaluate, count = Evaluator.evaluate, 0

    def stopped(self, *arguments):
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    monkeypatch.setattr(Evaluator, "evaluate", stopped)
    while True:
        try:
            cut = search(run, tmp_path / "cut")
            break
        except KeyboardInterrupt:
            pass
    assert [line["point"]["cfg_scale"] for line in cut] == scales
    assert [line["metrics"] for line in cut] == [line["metrics"] for line in whole]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["guidance=none"], "cfg_scale=1 needs guidance=cfg"),
        (["num_steps=[1,2]"], "search= needs exactly one point"),
        (["search=[guidance.w:1:2]"], "w is not a key"),
        (["cfg_scale=2"], "cfg_scale= and search=cfg_scale cannot be combined"),
        (["search=[S_churn:-1:2]"], "S_churn=-1"),
    ],
)
def test_a_search_that_cannot_be_done_is_refused_before_slow_work(run, tmp_path, overrides, words):
    with pytest.raises(UserError, match=words):
        search(run, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()
