"""The code of tests/gpu works on the CPU: one test of each file runs with small sizes, and all settings compose."""

import contextlib
from dataclasses import replace

import pytest
import torch
from gpu import test_evaluation, test_numerics, test_runs, test_steps
from gpu.runs import FULL, SMALL, config_for
from recorded_graph import RecordedGraph

from guidance import none
from routing_module import TokenRouter
from runtime.compilation import compile_network
from sampling.sampler import ImageSampler
from training import parallel, step_graph

CPU = torch.device("cpu")
CFG, SPARSE = test_numerics.GUIDANCES


def test_the_numerics_run_on_a_cpu():
    test_numerics.test_outputs_and_gradients_are_as_wrong_as_the_precision_allows(CPU, SMALL, "bf16", test_numerics.dit, "none")
    test_numerics.test_gradients_of_attention_are_finite_where_all_logits_are_far_below_zero(CPU, 64)


def stand_in_for_graphs(monkeypatch):
    monkeypatch.setattr(step_graph, "CUDAGraph", RecordedGraph)


@pytest.mark.parametrize("graphs", ["none", "step"])
def test_a_save_during_training_runs_on_a_cpu(tmp_path, monkeypatch, graphs):
    stand_in_for_graphs(monkeypatch)
    test_runs.test_a_save_that_takes_longer_than_a_step_holds_the_state_at_its_start(CPU, SMALL, tmp_path, monkeypatch, graphs)


@pytest.mark.parametrize("kind", ["tread", "accumulation", "sprint, sit"])  # tests/test_step_graph.py has the others
def test_the_comparison_of_graphs_runs_on_a_cpu(tmp_path, monkeypatch, kind):
    stand_in_for_graphs(monkeypatch)
    test_steps.test_a_graph_gives_the_bits_of_plain_steps(CPU, SMALL, tmp_path, kind)
    if kind == "tread":
        test_steps.test_a_graph_gives_what_plain_steps_learn_with_the_attention_of_training(CPU, SMALL, tmp_path)
        monkeypatch.setattr(step_graph.StaticRandom, "refill", lambda *_: None)
        with pytest.raises(AssertionError):
            test_steps.test_a_graph_gives_the_bits_of_plain_steps(CPU, SMALL, tmp_path, kind)


def test_a_group_of_one_process_runs_on_a_cpu(tmp_path):
    test_runs.test_a_group_of_one_process_learns_the_same_as_a_process_without_a_group(CPU, SMALL, tmp_path)


def test_the_guard_against_waits_runs_on_a_cpu(tmp_path):
    test_steps.test_the_guard_sees_functions_that_wait(CPU)
    test_steps.test_nothing_waits_in_the_loop_between_two_log_lines(CPU, SMALL, tmp_path, test_steps.ACCUMULATION)


def test_the_metrics_run_on_a_cpu():
    test_evaluation.test_metrics_are_those_of_the_cpu(CPU, 40)


@pytest.mark.parametrize("kind", test_steps.KINDS)
def test_the_settings_for_a_gpu_compose(tmp_path, kind):
    config_for(FULL, tmp_path, *(key.format(backbone=FULL.backbone) for key in test_steps.KINDS[kind]))


def do_nothing(net):
    for block in net.blocks:
        block.forward = lambda h, *_: h


def return_tokens_in_reverse(net):
    for end in net.route_end_modules.values():
        end.forward = lambda x, x_before, ids_keep, inputs=None: TokenRouter.end_route(x.flip(1), x_before, ids_keep)


@pytest.mark.parametrize("damage", [None, do_nothing, return_tokens_in_reverse])
def test_the_comparison_of_compiled_steps_detects_other_results(tmp_path, monkeypatch, damage):
    def compile_and_damage(net, mode):
        compile_network(net, mode)
        if mode == "blocks" and damage is not None:
            damage(net)

    monkeypatch.setattr(parallel, "compile_network", compile_and_damage)
    found = contextlib.nullcontext() if damage is None else pytest.raises(AssertionError, match="learns something else: [0-9.]+")
    with found as error:
        test_steps.test_compiled_steps_learn_what_plain_ones_do_and_are_compiled_once(CPU, SMALL, tmp_path, "tread")
    assert damage is None or float(str(error.value).split("else: ")[1].split()[0]) > 0.5


def without_guidance(sampler):
    return replace(sampler, guidance=none)


def with_other_labels(sampler):
    return lambda seeds, labels: sampler(seeds, [label + 1 for label in labels])


@pytest.mark.parametrize(("damage", "guidance"), [(None, CFG), (without_guidance, SPARSE), (with_other_labels, CFG)])
def test_the_comparison_of_images_detects_wrong_images(monkeypatch, damage, guidance):
    def sampler(*parts):
        made = ImageSampler(*parts)
        return damage(made) if damage and made.config.sampling.precision == "bf16" else made

    monkeypatch.setattr(test_numerics, "ImageSampler", sampler)
    with contextlib.nullcontext() if damage is None else pytest.raises(AssertionError, match="levels"):
        test_numerics.test_the_same_seeds_give_the_images_of_the_cpu(CPU, SMALL, "bf16", "none", guidance)
