"""The planner: FLOPs and times of candidate routes, and what is advised."""

import itertools
import json

import pytest

from common.errors import UserError
from configs import command_line as cli
from extras.benchmarks import routes as planner
from extras.benchmarks.routes import (
    MAX_MEASUREMENTS,
    Parts,
    RouteSettings,
    candidates,
    default_route,
    guidelines,
    main,
    predict,
)
from routing_module import Route, TokenRouter


@pytest.fixture
def plan(tmp_path, capsys):
    """plan(*arguments) -> (text, lines of the .jsonl without the machine)."""

    def run(*arguments):
        main([*arguments, f"output={tmp_path / 'routes'}", "cpu_threads=1"])
        lines = [json.loads(line) for line in (tmp_path / "routes.jsonl").read_text().splitlines()]
        return capsys.readouterr().out, {line.get("route", line.get("step")): line for line in lines[1:]}

    return run


@pytest.mark.parametrize(
    ("depth", "window"), [(12, (2, 8)), (24, (2, 20)), (28, (2, 24)), (7, (2, 3)), (6, (1, 4)), (4, (1, 2)), (3, None), (1, None)]
)
def test_the_default_is_the_papers_route_and_something_sensible_in_shallow_networks(depth, window):
    route = default_route(depth)
    assert (route and (route.start_layer_idx, route.end_layer_idx)) == window


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 12, 28, 61])
def test_every_candidate_is_a_valid_route_and_none_is_there_twice(depth):
    options = candidates(depth, default_route(depth))
    assert options["dense"] == () and len({*options.values()}) == len(options)
    for routes in options.values():
        TokenRouter(routes, depth)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (
            [Route(0.5, 2, 8)],
            "follows all [DiT-B/2: FID 28.02, 21.87 below dense (49.89); DiT-B/2 at 400K: 21.34 against 43.47 dense]",
        ),
        (
            [Route(0.5, 0, 10)],
            "against: starts at block 0, ends 1 before the last [DiT-B/2: FID 57.36, 7.47 above dense (49.89)]",
        ),
        ([Route(0.75, 2, 8)], "against: skips more than half [DiT-B/2 at 400K: 49.29 against 43.47 dense]"),
        ([Route(0.5, 7, 8)], "against: short: 2 of 12 blocks [DiT-B/2: FID 50.50, 0.61 above dense (49.89)]"),
        ([Route(0.5, 2, 5), Route(0.5, 6, 8)], "follows all"),
        ([Route(0.5, 3, 11)], "against: ends with the last block"),
    ],
)
def test_guidelines_and_the_papers_own_figures_are_told(routes, words):
    assert guidelines(routes, 12) == words


def test_a_predicted_step_is_the_sum_of_its_parts():
    parts = Parts(block_ms={16: 10.0, 8: 6.0}, route_ms={8: 1.0}, around_ms=3.0, update_ms=2.0)
    # Two of four blocks see 8 of 16 tokens.
    assert predict([], parts, 4, 16) == 45.0 and predict([Route(0.5, 1, 2)], parts, 4, 16) == 2 * 10 + 2 * 6 + 1 + 5


def test_given_times_of_blocks_are_used_and_nothing_is_measured(plan):
    text, rows = plan("model.backbone=DiT-XL/2", "block_ms=256:10,128:6")
    # 23 of 28 blocks at 6 ms instead of 10; a quarter skipping: 192 tokens, half-way, 8 ms.
    assert rows["dense"]["step_ms"] == 280 and rows["default"]["step_ms"] == 280 - 23 * 4
    assert rows["25% skip"]["step_ms"] == 280 - 23 * 2 and rows["75% skip"]["step_ms"] == 280 - 23 * 6
    assert rows["default"]["time_saved"] == "32.9%" and rows["default"]["blocks"] == "2 -> 24"
    # Published: 118.6 G multiply-adds for a forward; a step is 3 times that, and 2 FLOPs each.
    assert rows["dense"]["gflops_per_image"] == pytest.approx(6 * 118.6, rel=0.01)
    assert "Choice: model=tread 'model.routes=[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:-4}]'" in text


def test_any_depth_and_token_count_and_a_route_of_ones_own(plan):
    route = "model.routes=[{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:-2}]"
    text, rows = plan("model.backbone=DiT-S/2", "data.input_size=64", "depth=20", "block_ms=1024:8,512:3", route)
    assert "20 blocks, 1,024 tokens" in text and rows["yours"]["blocks"] == "1 -> 18"
    assert rows["yours"]["step_ms"] == 2 * 8 + 18 * 3 and rows["yours"]["guidelines"] == "against: ends 1 before the last"


DIGITS = ["model.backbone=DiT-XS/2", "data.input_size=8", "data.in_channels=1", "repeats=1", "batch_size=2"]


@pytest.fixture
def clock(monkeypatch):
    """clock(times): every part is run, and takes as long as the next of these, in milliseconds."""

    def set_to(times):
        remaining = iter(times)

        def time_ms(action, repeats, device, warmup=0):
            action()
            return [next(remaining)] * repeats

        monkeypatch.setattr(planner, "time_ms", time_ms)

    return set_to


def test_times_are_measured_part_by_part(plan, clock):
    clock(itertools.chain(range(100, 0, -1), itertools.repeat(1)))  # blocks first, on fewer and fewer tokens
    text, rows = plan(*DIGITS, "verify=true")
    assert all(row["step_ms"] > 0 for name, row in rows.items() if "step_ms" in row)
    assert "predicted_ms" in text and "batch 2, fp32" in text


# In the order of measuring: a block on 16 tokens; on 12, 8 and 4, each followed by a route; what is around; two updates.
BUSY = [1.0, 0.9, 0.1, 40.0, 0.1, 0.5, 0.1, 1.0, 0.1, 0.1]  # 40 ms on 8 tokens
ROUTE = [1.0, 0.9, 0.1, 0.7, 30.0, 0.5, 0.1, 1.0, 0.1, 0.1]  # a route that takes as long as 30 blocks
CALM = [1.0, 0.9, 0.1, 0.7, 0.1, 0.5, 0.1, 1.0, 0.1, 0.1]


@pytest.mark.parametrize("busy", [BUSY, ROUTE])
def test_times_that_cannot_be_are_measured_again(plan, clock, busy):
    clock([*busy, *CALM])
    _, rows = plan(*DIGITS)
    # 12 blocks of 1 ms, 1 ms around them and 13 updates of 0.1 ms; 7 of the blocks see 8 tokens and take 0.7 ms.
    assert rows["dense"]["step_ms"] == pytest.approx(12 + 1 + 1.3)
    assert rows["default"]["step_ms"] == pytest.approx(14.3 - 7 * 0.3 + 0.1) and rows["default"]["time_saved"] == "14.0%"


@pytest.mark.parametrize(
    ("times", "what"),
    [
        (BUSY, "a block took 40 ms on 8 tokens and 1 ms on 16"),
        (ROUTE, "starting and ending a route took 30 ms, more than a whole"),
    ],
)
def test_a_machine_that_stays_busy_is_not_believed(plan, clock, times, what):
    clock(times * MAX_MEASUREMENTS)
    with pytest.raises(
        ValueError, match=f"{what}.*, in each of 4 measurements: the machine does other work.*repeats=4, or.*block_ms="
    ):
        plan(*DIGITS)


def test_a_route_that_costs_more_than_it_saves_is_said_to(plan, clock):
    clock([1.0, 1.0, 0.9, 1.05, 0.9, 1.0, 0.9, 1.0, 0.1, 0.1])  # the same time on any number of tokens, as far as one can see
    text, rows = plan(*DIGITS)
    longer = (7 * 0.05 + 0.9) / 14.3
    assert rows["default"]["time_saved"] == f"none: {longer:.1%} longer"
    assert f"but no time: a step is predicted to take {longer:.1%} longer than a dense one, because with so few tokens" in text
    assert "-" not in "".join(row["time_saved"] for row in rows.values())


def test_too_shallow_a_network_is_advised_to_stay_dense(plan):
    text, rows = plan("depth=2", "block_ms=256:2,128:1")
    assert "Choice: no route" in text and "default" not in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.backbon=DiT-B/2"], r"model.backbon is not a key or has no value; it takes \[model.backbone=\]"),
        (["model.backbone=DiT-M/2"], "model.backbone='DiT-M/2' is not accepted"),
        (["block_ms=1:2:3"], "block_ms='1:2:3' is not accepted; use tokens:milliseconds"),
        (["block_ms=256:-1"], "block_ms='256:-1' is not accepted"),
        (["DiT-B/2"], "DiT-B/2 is not a key or has no value; it takes"),
        (["model.routes=[{selection_ratio:0.5}]"], "model.routes=.*is not accepted"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cli.parse_arguments(arguments, RouteSettings)


def test_routes_and_times_that_do_not_fit_are_refused(plan):
    with pytest.raises(ValueError, match="end_layer_idx=40 does not exist in a network of 28 blocks"):
        plan("block_ms=256:2,128:1", "model.routes=[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:40}]")
    with pytest.raises(ValueError, match="block_ms gives 1 number of tokens; give two or more, of 256, 192, 128, 64"):
        plan("block_ms=256:2")
    with pytest.raises(ValueError, match="block_ms=128:6,256:4: a block takes no longer on 128 tokens than on 256; are the two"):
        plan("block_ms=256:4,128:6")
    with pytest.raises(ValueError, match="block_ms=128:2,256:10 leaves no time for 64 tokens; add 64:<ms>"):
        plan("block_ms=256:10,128:2")


def test_a_refusal_of_given_times_leaves_earlier_results(plan, tmp_path):
    plan("block_ms=256:10,128:6")
    before = (tmp_path / "routes.md").read_text()
    with pytest.raises(ValueError, match="block_ms gives 1 number"):
        plan("block_ms=256:2")
    assert (tmp_path / "routes.md").read_text() == before != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data.input_size=33"],
            "data.input_size=33, model.backbone=DiT-XL/2: latents of size 33 cannot be cut into patches of 2",
        ),
        (["verify=true"], "verify=true times whole steps here, and block_ms gives the blocks alone; leave one of them out"),
    ],
)
def test_sizes_and_checks_that_do_not_go_together_are_refused(plan, arguments, message):
    with pytest.raises(UserError, match=message):
        plan("block_ms=256:10,128:6", *arguments)


@pytest.mark.parametrize("ending", ["", "/", "/new/"])
def test_an_output_that_is_a_folder_is_refused(tmp_path, ending):
    with pytest.raises(
        UserError, match=f"output={tmp_path}{ending} is a folder; give the name of the files in it: output=.*/results"
    ):
        main(["block_ms=256:10,128:6", f"output={tmp_path}{ending}"])
    assert list(tmp_path.iterdir()) == []
