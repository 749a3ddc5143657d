"""The lines of metrics.jsonl: norms of the gradient and of the weights, and a new metric."""

import itertools

import pytest
import torch
from conftest import losses, metrics, run_train, weights

from checkpoints.run import read_metrics
from edm import EDM
from evaluations.record import read_records
from training.hooks import SampleGridHook
from training.loop import Clock
from training.step_metrics import STEP_METRICS, grad_norm
from training.trainer import Trainer


def test_the_norms_are_those_of_the_last_step_before_the_update_and_before_clipping(tmp_path, monkeypatch):
    gradients = []

    def record(trainer):
        gradients.append(torch.cat([p.grad.flatten().double() for p in trainer.parameters.values()]))
        return grad_norm(trainer)

    monkeypatch.setitem(STEP_METRICS, "grad_norm", record)
    keys = ["train.grad_accum_steps=2", "checkpoint.every=1", "checkpoint.keep_last=9", "train.log_every=3", "train.num_steps=7"]
    run = run_train(tmp_path, "run", *keys, "train.grad_clip_norm=1e-3", "train.lr=1e-2")
    lines = metrics(run)
    assert [line["step"] for line in lines] == [3, 6, 7] and len(gradients) == 3
    for line, gradient in zip(lines, gradients):
        before = weights(run, line["step"] - 1)
        norm = torch.cat([x.flatten().double() for name, x in before.items() if name != "pos_embed"]).norm().item()
        assert line["weight_norm"] == pytest.approx(norm, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5) and line["grad_norm"] > 1e-3


def test_measuring_changes_no_bit_of_a_run(tmp_path, monkeypatch):
    run = run_train(tmp_path, "run")
    monkeypatch.setattr("training.loop.STEP_METRICS", {})
    plain = run_train(tmp_path, "plain")
    assert losses(run) == losses(plain) and "grad_norm" in metrics(run)[0] and "grad_norm" not in metrics(plain)[0]
    assert all(torch.equal(x, weights(run, 6)[name]) for name, x in weights(plain, 6).items())


def test_a_new_metric_needs_one_function_and_one_line(tmp_path, monkeypatch):
    steps = []

    def largest_weight(trainer):
        steps.append(trainer.step)
        return torch.stack([p.detach().abs().max() for p in trainer.parameters.values()]).max()

    monkeypatch.setitem(STEP_METRICS, "largest_weight", largest_weight)
    run = run_train(tmp_path, "run", "train.log_every=3")
    assert [line["largest_weight"] > 0 for line in metrics(run)] == [True, True] and steps == [2, 5]


def test_the_peak_memory_is_that_of_all_steps_since_the_last_line_without_grids(tmp_path, monkeypatch):
    peak = [0.0]  # in GiB; the weights take 1

    def use_memory(function, sizes):
        return lambda *args: peak.append(max(peak.pop(), next(sizes))) or function(*args)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 1.0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(peak[0] * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int((peak[0] + 0.5) * 2**30))
    monkeypatch.setattr("training.loop.Clock", lambda device: Clock(torch.device("cuda")))
    monkeypatch.setattr(Trainer, "train_step", use_memory(Trainer.train_step, iter([5.0, 4.0, 3.0, 2.0, 2.0, 4.0])))
    monkeypatch.setattr(SampleGridHook, "__call__", use_memory(SampleGridHook.__call__, itertools.repeat(9.0)))
    grids = ["sample_grid.every=2", "sample_grid.num_samples=2", "sampler.num_steps=1"]
    lines = metrics(run_train(tmp_path, "run", "train.log_every=3", *grids))
    assert [(line["peak_memory_gib"], line["reserved_memory_gib"]) for line in lines] == [(5.0, 5.5), (4.0, 4.5)]


def test_metrics_hold_training_lines_and_evaluations_are_records_of_their_own(tmp_path):
    run = run_train(tmp_path, "run", "evaluation.every=3", "evaluation.num_samples=10", "sampler.num_steps=1", "guidance=none")
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(run / "metrics.jsonl") == metrics(run) and read_metrics(tmp_path / "missing.jsonl") == []
    records = read_records(run / "evaluations" / "results.jsonl")
    assert [(record.run, record.step, record.checkpoint) for record in records] == [("run", 3, None), ("run", 6, None)]
    assert all(record.of_samples and record.metrics and record.evaluation_sec > 0 for record in records)


def test_losses_are_sorted_by_the_noise_levels_at_which_they_were_computed(tmp_path, monkeypatch):
    """The loss of each sample is replaced by the bin of the level that the loss got."""
    as_given = EDM.loss

    def bin_of_level(diffusion, net, x, y, random, levels=None, **net_kwargs):
        quantiles = torch.special.ndtr((levels.log() - diffusion.P_mean) / diffusion.P_std)
        return 0 * as_given(diffusion, net, x, y, random, levels, **net_kwargs) + (10 * quantiles).floor()

    monkeypatch.setattr(EDM, "loss", bin_of_level)
    (line,) = metrics(run_train(tmp_path, "run", "train.log_every=6"))
    found = {number: loss for number, loss in enumerate(line["loss_by_level"]) if loss is not None}
    assert len(found) > 3 and all(loss == number for number, loss in found.items())
