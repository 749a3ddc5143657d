"""Post-hoc EMA: profiles and their sums against NumPy in float64, and runs that track averages."""

import shutil

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, checked, evaluated, run_fid, run_sample, run_train
from conftest import weights as tensors
from safetensors.torch import load_file

from checkpoints.checkpoint import find_all, resolve_checkpoint
from checkpoints.run import list_snapshots
from common.errors import UserError
from extras import posthoc_ema
from extras.posthoc_ema import fit_profile, gamma_from_length
from extras.tracked_ema import TrackedEMA
from sampling.fid_plan import choose_recipes

TRACK = ["train.ema_lengths=[0.1,0.25]", "train.ema_snapshot_every=2", "train.lr=1e-2", "checkpoint.every=3"]


def profile(t, length):
    """Return the weight of each step in the average, by the recursion of the update."""
    shares, gamma = np.zeros(t), gamma_from_length(length)
    for step in range(t):
        beta = (1 - 1 / (step + 1)) ** (gamma + 1)
        shares[: step + 1] *= beta
        shares[step] += 1 - beta
    return shares


@torch.no_grad()
def test_tracked_averages_follow_a_network_that_was_moved_after_they_were_built():
    """A move to another dtype changes parameters in place, as a move to another device does."""
    net = torch.nn.Linear(3, 1)
    ema = TrackedEMA(net, 0.9, [0.05])
    for module in (net, ema.net):
        module.double()
    ema.update(0)
    assert {x.dtype for x in ema.tensors()["tracked_ema"].values()} == {torch.float64}


@pytest.mark.parametrize("length", [0.03, 0.05, 0.1, 0.25, 0.28])
def test_a_length_is_the_relative_standard_deviation_of_the_profile(length):
    shares, t = profile(4000, length), np.arange(1, 4001) / 4000
    assert shares.sum() == pytest.approx(1)
    assert np.sqrt((shares * t**2).sum() - (shares * t).sum() ** 2) == pytest.approx(length, rel=2e-3)


def test_tracked_averages_are_sums_of_the_weights_by_their_profiles():
    net = torch.nn.Linear(3, 1, bias=False)
    ema, steps = TrackedEMA(net, 0.9, [0.05, 0.2]), 300
    trajectory = np.stack([np.arange(steps), np.sqrt(np.arange(steps)), np.sin(np.arange(steps) / 30)], axis=1)
    for step, weights in enumerate(trajectory):
        with torch.no_grad():
            net.weight.copy_(torch.from_numpy(weights)[None])
        ema.update(step)
    for length, averages in ema.tracked.items():
        assert averages["weight"][0].numpy() == pytest.approx(profile(steps, length) @ trajectory, rel=1e-4, abs=1e-4)


def test_an_average_of_any_length_is_found_within_the_error_that_fit_profile_returns():
    """By the Cauchy-Schwarz inequality, |sum (p' - p) theta| is at most |p' - p| |theta|."""
    t, tracked = 1200, [(step, length) for step in range(50, 1201, 50) for length in (0.05, 0.25)]
    profiles = np.stack([np.pad(profile(step, length), (0, t - step)) for step, length in tracked])
    k = np.arange(t)
    for length in (0.06, 0.1, 0.17, 0.24):
        factors, error = fit_profile(tracked, (t, length))
        wanted, found = profile(t, length), factors @ profiles
        assert error < 0.006 and np.linalg.norm(found - wanted) <= 1.02 * error * np.linalg.norm(wanted)
        for theta in (k / t, np.sqrt(k / t), np.sin(k / 30), np.random.default_rng(0).standard_normal(t)):
            bound = 1.02 * error * np.linalg.norm(wanted) * np.linalg.norm(theta)
            assert abs(found @ theta - wanted @ theta) <= bound


@pytest.mark.parametrize("num_snapshots", [2, 10, 20])
def test_factors_are_the_normalised_solution_of_the_closed_form(num_snapshots):
    """`product` is the integral of k^a (a + 1) / s^(a + 1), up to s, times the same profile of b and t (EDM2, appendix C)."""

    def product(one, other):
        (s, a), (t, b) = one, other
        a, b = gamma_from_length(a), gamma_from_length(b)
        return (a + 1) * (b + 1) / (a + b + 1) * min(s, t) ** (a + b + 1) / (s ** (a + 1) * t ** (b + 1))

    tracked = [((i + 1) / num_snapshots, length) for i in range(num_snapshots) for length in (0.05, 0.1)]
    A, b = [[product(p, q) for q in tracked] for p in tracked], [product(p, (1, 0.07)) for p in tracked]
    expected = np.linalg.solve(A, b)
    factors, _ = fit_profile([(round(10_000 * t), length) for t, length in tracked], (10_000, 0.07))
    assert sum(factors) == pytest.approx(1, abs=1e-12) and abs(expected.sum() - 1) > 1e-5
    assert factors == pytest.approx(expected / expected.sum(), abs=1e-6)


def test_tracking_changes_nothing_else_and_a_resumed_run_continues_it(train, tmp_path):
    plain, tracked = train("plain", *TRACK[2:]), train("tracked", *TRACK)
    for file in ("model", "ema"):
        assert all(torch.equal(a, tensors(plain, 6, file)[name]) for name, a in tensors(tracked, 6, file).items())
    assert not (plain / "checkpoints" / "step_0000006" / "tracked_ema.safetensors").exists()
    cut = tmp_path / "cut"
    shutil.copytree(tracked, cut)
    shutil.rmtree(cut / "checkpoints" / "step_0000006")
    for step, file in list_snapshots(cut):
        if step > 3:  # snapshots of steps that are trained again
            file.rename(file.with_name(f"step_{step + 1:07d}_{'0' * 32}.safetensors"))
    train("cut", *TRACK)
    assert all(torch.equal(a, tensors(cut, 6, "tracked_ema")[name]) for name, a in tensors(tracked, 6, "tracked_ema").items())
    files = sorted(file.name for file in (tracked / "ema_snapshots").iterdir())
    assert [name[:12] for name in files] == ["step_0000002", "step_0000004", "step_0000006"]
    assert files == sorted(file.name for file in (cut / "ema_snapshots").iterdir())
    assert all((cut / "ema_snapshots" / name).read_bytes() == (tracked / "ema_snapshots" / name).read_bytes() for name in files)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("tracked"), "run", *TRACK)


def test_a_checkpoint_gives_a_tracked_average_itself_and_others_from_the_snapshots(tracked):
    checkpoint = resolve_checkpoint(tracked, "checkpoint")
    own = tensors(tracked, 6, "tracked_ema")
    weights = {length: posthoc_ema.find_average(checkpoint, "ema", length).load() for length in (0.1, 0.18, 0.25)}
    for length in (0.1, 0.25):
        trained = {name.partition("/")[2] for name in own}
        assert all(torch.allclose(weights[length][name], own[f"{length:g}/{name}"], atol=1e-6) for name in trained)
    assert weights[0.18].keys() == tensors(tracked, 6, "ema").keys()
    name = "final_layer.linear.weight"
    expected, steps = torch.zeros_like(weights[0.18][name]), [(2, 0.1), (2, 0.25), (4, 0.1), (4, 0.25), (6, 0.1), (6, 0.25)]
    for (step, length), factor in zip(steps, fit_profile(steps, (6, 0.18))[0]):
        file = checkpoint.path / "tracked_ema.safetensors" if step == 6 else dict(list_snapshots(tracked))[step]
        expected += factor * load_file(file)[f"{length:g}/{name}"].float()
    assert torch.allclose(weights[0.18][name], expected, atol=1e-6) and not torch.equal(weights[0.18][name], weights[0.1][name])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.ema_length=0.05"], r"sampling.ema_length=0.05 is outside the range .*train.ema_lengths=\[0.1, 0.25\]"),
        (["sampling.ema_length=0.1", "sampling.weights=raw"], "sampling.ema_length=0.1 needs sampling.weights=ema"),
        (["sampling.ema_length=0.3"], "sampling.ema_length=0.3: Input should be less than or equal to 0.28"),
    ],
)
def test_a_length_outside_the_tracked_range_is_refused(tracked, tmp_path, overrides, words):
    with pytest.raises(UserError, match=words):
        run_sample(f"checkpoint={tracked}", f"output={tmp_path / 'out'}", *overrides)
    assert not (tmp_path / "out").exists()


def test_a_run_without_tracked_averages_gives_none_and_cannot_start_tracking_later(train, tmp_path):
    run = train("run", "train.num_steps=2")
    with pytest.raises(UserError, match="sampling.ema_length=0.1: .* belongs to a run without train.ema_lengths"):
        run_sample(f"checkpoint={run}", "sampling.ema_length=0.1")
    with pytest.raises(UserError, match=r"train.ema_lengths: \[\] -> \[0.1, 0.25\]"):
        train("run", *TRACK[:2])
    with pytest.raises(UserError, match=r"init_from.*train.ema_lengths: \[\] -> \[0.1, 0.25\]"):
        train("other", *TRACK[:2], f"init_from={run}", "init_state=all")
    other = train("other", *TRACK, f"init_from={run}")  # averages start with step 1, as the optimizer does
    assert (other / "checkpoints" / "step_0000006" / "tracked_ema.safetensors").exists()


def test_missing_and_altered_snapshots_are_refused_and_other_files_are_ignored(tracked, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tracked, run)
    checkpoint, snapshots = resolve_checkpoint(run, "checkpoint"), dict(list_snapshots(run))
    average = posthoc_ema.find_average(checkpoint, "ema", 0.18)
    shutil.copy(snapshots[2], snapshots[2].with_name("step_0000003 (copy).safetensors"))
    assert posthoc_ema.find_average(checkpoint, "ema", 0.18) == average
    content = bytearray(snapshots[4].read_bytes())
    content[-1] ^= 1
    snapshots[4].write_bytes(content)
    with pytest.raises(UserError, match=f"{snapshots[4].name} .*its hash differs.*remove the file"):
        average.load()
    for file in snapshots.values():
        file.unlink()
    with pytest.raises(UserError, match="sampling.ema_length=0.18: .*0 earlier snapshots.*train.ema_snapshot_every"):
        posthoc_ema.find_average(checkpoint, "ema", 0.18)
    assert posthoc_ema.find_average(checkpoint, "ema", 0.25).hash != average.hash  # it is in the checkpoint


def test_a_sweep_leaves_out_the_checkpoints_with_too_few_snapshots_and_refuses_lengths_that_none_has(
    tracked, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(posthoc_ema, "MAX_ERROR", 0.05)  # 0.084 after 3 steps and 0.038 after 6, without the first snapshot
    run = tmp_path / "run"
    shutil.copytree(tracked, run)
    dict(list_snapshots(run))[2].unlink()
    reference = f"evaluation.reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}"
    fid = [reference, "evaluation.detector=digits", "evaluation.num_samples=4", "sampler.num_steps=2", "guidance=none"]
    run_fid(f"checkpoints={run}", "sampling.ema_length=[0.1,0.18]", *fid)
    assert sorted((line["step"], line["settings"]["ema_length"]) for line in evaluated(run)) == [(3, 0.1), (6, 0.1), (6, 0.18)]
    (warning,) = [text for text in caplog.messages if "left out" in text]
    assert warning.startswith("sampling.ema_length=0.18: ") and "step_0000003 has 0 earlier snapshots" in warning
    with pytest.raises(UserError, match="sampling.ema_length=0.05 is outside the range"):
        run_fid(f"checkpoints={run}", "sampling.ema_length=[0.1,0.05]", *fid)
    with pytest.raises(UserError, match="0 earlier snapshots"):
        run_fid(f"checkpoint={run / 'checkpoints' / 'step_0000003'}", "sampling.ema_length=0.18", *fid)


def test_a_sweep_leaves_out_a_checkpoint_that_training_removes_while_its_recipe_is_built(tracked, tmp_path, caplog, monkeypatch):
    run, find_average = shutil.copytree(tracked, tmp_path / "run"), posthoc_ema.find_average
    checkpoints = find_all(run / "checkpoints")

    def removed_meanwhile(checkpoint, *settings):
        if checkpoint.step == 3:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        return find_average(checkpoint, *settings)

    monkeypatch.setattr(posthoc_ema, "find_average", removed_meanwhile)
    cfg = checked([f"checkpoints={run}", "sampling.ema_length=0.1", "guidance=none"], "fid")
    assert [recipe.checkpoint.step for recipe in choose_recipes(cfg, checkpoints)] == [6]
    assert "step_0000003 is not a complete checkpoint: it has no manifest.json; this point is left out" in caplog.text


def test_a_length_that_is_given_twice_is_refused():
    with pytest.raises(UserError, match="repeats a length"):
        TrackedEMA(torch.nn.Linear(1, 1), 0.9, [0.05, 0.05])
