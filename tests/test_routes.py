"""The planner: FLOPs and times of candidate routes, and what is advised."""

import json

import pytest

from benchmarks.routes import (
    Parts,
    RouteSettings,
    candidates,
    default_route,
    guidelines,
    main,
    predict,
)
from routing_module import Route, TokenRouter
from setup import cli


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
        ([Route(0.5, 2, 8)], "follows all [DiT-B/2: FID -21.87 against 49.89 dense; DiT-B/2 at 400K: 21.34 against 43.47 dense]"),
        ([Route(0.5, 0, 10)], "against: starts at block 0, ends 1 before the last [DiT-B/2: FID +7.47 against 49.89 dense]"),
        ([Route(0.75, 2, 8)], "against: skips more than half [DiT-B/2 at 400K: 49.29 against 43.47 dense]"),
        ([Route(0.5, 7, 8)], "against: short: 2 of 12 blocks [DiT-B/2: FID +0.61 against 49.89 dense]"),
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


def test_times_are_measured_part_by_part(plan):
    text, rows = plan(
        "model.backbone=DiT-XS/2", "data.input_size=8", "data.in_channels=1", "repeats=1", "batch_size=2", "verify=true"
    )
    assert all(row["step_ms"] > 0 for name, row in rows.items() if "step_ms" in row)
    assert "predicted_ms" in text and "batch 2, fp32" in text


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
