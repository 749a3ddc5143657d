"""The code of tests/gpu runs: one test of each of its files on the CPU, with small sizes, and all its settings."""

import pytest
import torch
from gpu import test_evaluation, test_numerics, test_runs, test_steps
from gpu.runs import FULL, SMALL, config_for

CPU = torch.device("cpu")


def test_the_numerics_run_on_a_cpu():
    test_numerics.test_outputs_and_gradients_are_as_wrong_as_the_precision_allows(CPU, SMALL, "bf16", test_numerics.dit, "none")
    test_numerics.test_gradients_of_attention_are_finite_where_all_logits_are_far_below_zero(CPU, 64)


def test_a_save_during_training_runs_on_a_cpu(tmp_path, monkeypatch):
    test_runs.test_a_save_that_lasts_longer_than_a_step_holds_what_was_there_when_it_began(CPU, SMALL, tmp_path, monkeypatch)


def test_the_guard_against_waits_runs_on_a_cpu(tmp_path):
    test_steps.test_the_guard_sees_what_waits(CPU)
    test_steps.test_nothing_waits_in_the_loop_between_two_log_lines(CPU, SMALL, tmp_path, test_steps.ACCUMULATION)


def test_the_metrics_run_on_a_cpu():
    test_evaluation.test_metrics_are_those_of_the_cpu(CPU)


@pytest.mark.parametrize("kind", test_steps.KINDS)
def test_the_settings_for_a_gpu_compose(tmp_path, kind):
    config_for(FULL, tmp_path, *(key.format(backbone=FULL.backbone) for key in test_steps.KINDS[kind]))
