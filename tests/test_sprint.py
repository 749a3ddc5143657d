"""SPRINT: grid groups, fused routes, path drop and path-drop guidance, in networks and in whole runs."""

from collections import Counter
from functools import partial

import pytest
import torch
from conftest import checked, losses, run_fid, run_sample, run_train, weights
from definition import N, inputs, randomized, small, worst_error
from test_benchmarks import counted_flops
from test_guidance import LABEL, NUM_CLASSES, Recorder, X, Y, make_inputs

import dit
import guidance
from common.errors import UserError
from extras import sprint
from routing_module import GridRule, Route, TokenRouter

ROUTES = {"one": [Route(0.75, 1, 2)], "two": [Route(0.25, 0, 1), Route(0.5, 2, 3)], "of ratio 0": [Route(0.0, 1, 2)]}
NETWORKS = {"dit": sprint.SPRINT, "lightningdit": sprint.LightningSPRINT}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("selection", ["uniform", "grid"])
def test_outputs_and_gradients_of_fused_routes_equal_those_of_the_definition(network, routes, selection):
    net = randomized(small(network, routes=routes, selection=selection)).train()
    assert worst_error(net, routes, selection=selection) < 1e-5


def test_the_same_number_of_tokens_stays_in_every_2x2_group_and_every_choice_is_equally_likely():
    rule, x = GridRule(4, 6), torch.zeros(3000, 24, 1)
    for ratio, num_kept in ((0.75, 1), (0.5, 2), (0.25, 3)):
        ids_keep = TokenRouter.choose_ids_keep(x, ratio, generator=torch.Generator().manual_seed(0), rule=rule)
        groups = ids_keep // 12 * 3 + ids_keep % 6 // 2  # by hand: a row of groups has 12 tokens, and a group is 2 tokens wide
        assert all((groups == group).sum(1).eq(num_kept).all() for group in range(6))
        first = Counter(tuple(ids.tolist()) for ids in [row[where] for row, where in zip(ids_keep, groups == 0)])
        assert set().union(*first) == {0, 1, 6, 7} and len(first) == (4, 6, 4)[num_kept - 1]
        expected = 3000 / len(first)  # counts may differ by 5 standard deviations
        assert all(abs(count - expected) < 5 * expected**0.5 for count in first.values())
    ids_keep = TokenRouter.choose_ids_keep(x, 0.6, generator=torch.Generator().manual_seed(0), rule=rule)
    groups = ids_keep // 12 * 3 + ids_keep % 6 // 2
    counts = torch.stack([(groups == group).sum(1) for group in range(6)])
    assert ids_keep.shape == (3000, 24 - 14) and set(counts.unique().tolist()) == {1, 2}  # 10 tokens are kept in 6 groups
    with pytest.raises(ValueError, match="selection=grid needs even numbers .* not 3 x 4"):
        GridRule(3, 4)


def test_evaluation_uses_all_tokens_and_a_ratio_of_1_runs_no_block_of_a_route():
    net = randomized(small(sprint.SPRINT, routes=[Route(0.75, 1, 2)])).eval()
    x, t, y, _ = inputs()
    state = torch.get_rng_state()
    dense = net(x, t, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(dense, net(x, t, y, route_noise=torch.rand(3, 1, N)))
    assert torch.equal(dense, net(x, t, y, selection_ratios=0.0))
    everything = torch.ones(3, dtype=torch.bool)
    calls = []
    for i, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, i=i: calls.append(i))
    weak = net(x, t, y, selection_ratios=1.0)
    assert calls == [0, 3] and (weak - dense).abs().max() > 1e-2
    assert torch.equal(weak, net(x, t, y, drop_paths=everything))
    single = x[:1], t[:1], y[:1]
    for ratio in (0.0, 0.75, 1.0):
        counted, _ = counted_flops(partial(net, *single, selection_ratios=ratio))
        assert counted == net.forward_flops(ratio)


def test_the_residual_stream_stays_float32_under_autocast():
    net, seen = small(sprint.SPRINT, routes=[Route(0.75, 1, 2)], fp32_after_route=False), []
    net.route_end_modules["1_2"].register_forward_hook(lambda module, args, out: seen.append((args[1].dtype, out.dtype)))
    x, t, y, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        net(x, t, y)
    assert seen == [(torch.float32, torch.float32)]


def test_path_drop_guidance_costs_the_published_flops():
    """For XL/2 at 256 pixels, cfg costs 0.477 TFLOPs per image and step, and path-drop guidance costs 0.274."""
    with torch.device("meta"):
        net = sprint.build("DiT-XL/2", input_size=32, in_channels=4, num_classes=1000, routes=[Route(0.75, 2, -3)])
    dense, weak = net.forward_flops(0), net.forward_flops(1)
    assert [2 * dense / 1e12, (dense + weak) / 1e12] == pytest.approx([0.477, 0.274], rel=0.005)


def test_paths_are_dropped_at_their_rate_in_training_and_never_in_evaluation():
    net, seen = small(sprint.SPRINT, routes=[Route(0.75, 1, 2)], path_drop=0.3), []
    net.route_end_modules["1_2"].register_forward_pre_hook(lambda module, args: seen.append(args[3]))
    x, t, y = torch.zeros(2000, 3, 8, 8), torch.zeros(2000), torch.zeros(2000, dtype=torch.int64)
    with torch.no_grad():
        net.train()(x, t, y, generator=torch.Generator().manual_seed(0))
        net.eval()(x, t, y)
    assert seen[0].float().mean().item() == pytest.approx(0.3, abs=0.04) and seen[1] is None


def test_only_sprint_adds_parameters_to_the_network_and_settings_that_do_not_fit_are_refused():
    plain, fused = ({*small(network, routes=[Route(0.5, 1, 2)]).state_dict()} for network in (dit.DiT, sprint.SPRINT))
    assert plain == {*small().state_dict()}
    assert fused - plain == {f"route_end_modules.1_2.{name}" for name in ("mask_token", "proj.weight", "proj.bias")}
    with pytest.raises(ValueError, match="model=sprint needs a route"):
        small(sprint.SPRINT)
    with pytest.raises(ValueError, match=r"drop_paths has shape \(1,\); 3 latents need \(3,\)"):
        small(sprint.SPRINT, routes=[Route(0.5, 1, 2)])(*inputs()[:3], drop_paths=torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="a grid of 4 x 6 tokens does not fit the image's 16"):
        TokenRouter.choose_ids_keep(torch.zeros(1, 16, 1), 0.5, rule=GridRule(4, 6))
    with pytest.raises(UserError, match="^model: selection=grid needs even numbers of rows and columns of tokens, not 1 x 1$"):
        (cfg := checked(["model=sprint", "model.backbone=DiT-XS/8"])).model.build(cfg.data)


def test_path_drop_guidance_extrapolates_from_the_null_label_without_the_blocks_of_routes():
    def guided(level=2.0, **settings):
        denoise = Recorder()
        D_x = guidance.path_drop(make_inputs(denoise), **settings)(X, level, Y)
        return D_x, [(call["y"], call["ratio"]) for call in denoise.calls]

    D, calls = guided(cfg_scale=1.5)
    assert calls == [([1, 4], None), ([NUM_CLASSES] * 2, 1.0)]
    weak = Recorder()(X, 2.0, torch.full_like(Y, NUM_CLASSES), selection_ratios=1.0)
    assert torch.allclose(D, weak + 1.5 * (LABEL - weak))
    for off in (dict(cfg_scale=1.0), dict(cfg_scale=1.5, level_lo=2.0), dict(cfg_scale=1.5, level_hi=1.0)):
        D, calls = guided(**off)
        assert torch.equal(D, LABEL) and len(calls) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs.

SPRINT = ["model=sprint", "model.backbone=DiT-XS/2", "model.path_drop=0.5", "train.lr=1e-2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("runs"), "whole", *SPRINT)


def test_micro_batches_loader_threads_and_checkpointed_activations_do_not_change_a_run(whole, train):
    assert weights(whole, 6)["route_end_modules.2_9.mask_token"].any()
    parts = train("parts", *SPRINT, "train.grad_accum_steps=2", "train.activation_checkpointing=blocks", "data.num_workers=2")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


def test_a_dense_second_stage_starts_from_a_sprint_run_and_keeps_the_fusion(whole, train):
    routes = "model.routes=[{selection_ratio:0,start_layer_idx:2,end_layer_idx:-3}]"
    dense = train("dense", *SPRINT, routes.replace("-3", "9"), f"init_from={whole}", "train.num_steps=1", "train.lr=1e-30")
    before, after = weights(whole, 6), weights(dense, 1)
    assert all(torch.allclose(before[name], after[name], atol=1e-7) for name in before)
    with pytest.raises(UserError, match=r"model.safetensors: route_end_modules.1_9.mask_token is missing in the file"):
        train("moved", *SPRINT, routes.replace("start_layer_idx:2", "start_layer_idx:1"), f"init_from={whole}")
    with pytest.raises(UserError, match="model.name: 'sprint' -> 'tread'"):
        train("tread", "model=tread", "model.backbone=DiT-XS/2", f"init_from={whole}")


def test_path_drop_guidance_costs_less_than_cfg_and_is_refused_for_a_run_without_path_drop(whole, train, tmp_path, caplog):
    def sample(name, *overrides, checkpoint=whole):
        caplog.clear()
        where = [
            f"checkpoint={checkpoint}",
            f"output={tmp_path / name}",
            "seeds=0-1",
            "sampler.num_steps=3",
            "machine.cpu_threads=1",
        ]
        run_sample(*where, *overrides)
        return float(caplog.text.partition(" GFLOPs")[0].split()[-1])

    caplog.set_level("INFO")
    plain, cfg = sample("plain", "guidance=none"), sample("cfg", "guidance=cfg")
    weak = sample("path_drop", "guidance=path_drop", "guidance.cfg_scale=2")
    assert 1.2 * plain < weak < 0.75 * cfg
    assert sample("sparse", "guidance=sparse", "guidance.r_weak=0.9") < cfg
    other = train("tread", "model=tread")
    with pytest.raises(UserError, match="guidance=path_drop needs .* run tread has model=tread and model.path_drop=0"):
        sample("refused", "guidance=path_drop", checkpoint=other)


def test_grids_and_evaluations_of_a_run_use_path_drop_guidance(whole, tmp_path):
    looks = ["guidance=path_drop", "sample_grid.every=2", "sample_grid.num_samples=2", "sampler.num_steps=2"]
    run = run_train(tmp_path, "looks", *SPRINT, *looks, "train.num_steps=2")
    assert (run / "samples" / "step_0000002.png").exists()
    where = [
        f"checkpoint={whole}",
        "evaluation.num_samples=20",
        "sampling.batch_size=10",
        "sampler.num_steps=2",
        "machine.cpu_threads=1",
    ]
    run_fid(*where, "guidance=path_drop", "guidance.cfg_scale=[1,2]", f"output={tmp_path / 'fid'}")
    assert (tmp_path / "fid" / "results.jsonl").read_text().count("\n") == 2
    off = ["guidance=path_drop", "guidance.cfg_scale=1", "guidance.level_lo=[null,1]"]  # the unguided point is already finished
    run_fid(*where, *off, f"output={tmp_path / 'fid'}")
    assert (tmp_path / "fid" / "results.jsonl").read_text().count("\n") == 2
