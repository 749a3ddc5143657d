"""sample.py: image i is a function of seed i, and nothing is made twice or overwritten."""

import re
import shutil

import numpy as np
import pytest
from conftest import LAUNCH_2, composed, finish, forget_accelerate, start
from PIL import Image

from training import checkpoint as checkpoints

FEW = ["num_steps=3", "cpu_threads=1"]


@pytest.fixture
def trained(train):
    """A run of two steps whose weights matter: the output layers of a fresh network are zero."""
    return train("run", "train.num_steps=2", "train.lr=1e-2")


@pytest.fixture
def sample(trained, tmp_path):
    import sample as script

    def run(output, *overrides, checkpoint=trained):
        forget_accelerate()
        script.main(composed([f"checkpoint={checkpoint}", f"output={tmp_path / output}", *FEW, *overrides], "sample"))
        return {path.name: np.asarray(Image.open(path)) for path in sorted((tmp_path / output).glob("seed_*.png"))}

    return run


def assert_same_images(first, second):
    assert first.keys() == second.keys() and len(first) > 0
    for name in first:
        # Matrix products of another batch size may round differently; a pixel may then move by one of 255.
        difference = np.abs(first[name].astype(int) - second[name].astype(int))
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02, name


def test_an_image_depends_on_its_seed_and_not_on_its_batch(sample):
    together = sample("together", "seeds=0-6")
    assert len({image.tobytes() for image in together.values()}) == 7
    assert_same_images(together, sample("apart", "seeds=0-6", "batch_size=2"))
    some = sample("some", "seeds=[5,2]", "batch_size=1")
    assert_same_images(some, {name: together[name] for name in some})


def test_churn_and_guidance_depend_on_the_seed_too(sample):
    settings = ["S_churn=2", "guidance=cfg", "cfg_scale=2"]
    together = sample("together", "seeds=0-3", *settings)
    assert_same_images(together, sample("apart", "seeds=0-3", "batch_size=1", *settings))
    plain = sample("plain", "seeds=0-3")
    assert all((together[name] != plain[name]).any() for name in plain)


def test_two_processes_make_the_images_of_one(sample, trained, tmp_path):
    one = sample("one", "seeds=0-4", "classes=0-9")
    output = tmp_path / "two"
    arguments = ["sample.py", f"checkpoint={trained}", f"output={output}", "seeds=0-4", "classes=0-9", *FEW]
    code, text = finish(start(*arguments, launcher=LAUNCH_2))
    assert code == 0, text
    two = {path.name: np.asarray(Image.open(path)) for path in sorted(output.glob("seed_*.png"))}
    assert_same_images(one, two)
    assert (output / "samples_0-4.npz").exists() and (output / "grid_0-4.png").exists()


def test_the_npz_is_what_adm_reads(sample, tmp_path):
    images = sample("out", "seeds=0-4", "classes=[3,7]")
    with np.load(tmp_path / "out" / "samples_0-4.npz") as file:
        assert file["arr_0"].shape == (5, 8, 8, 3) and file["arr_0"].dtype == np.uint8
        assert file["labels"].tolist() == [3, 7, 3, 7, 3] and file["labels"].dtype == np.int64
        assert np.array_equal(file["arr_0"], np.stack(list(images.values())))
    assert list(images) == [f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in enumerate([3, 7, 3, 7, 3])]
    assert Image.open(tmp_path / "out" / "grid_0-4.png").size[0] > 5 * 64


def test_interrupted_sampling_goes_on_with_the_missing_seeds(sample, tmp_path):
    before = sample("out", "seeds=0-4")
    names = sorted(before)
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    (tmp_path / "out" / names[3]).unlink()
    (tmp_path / "out" / f".tmp_{names[4]}").write_bytes(b"torn")
    assert_same_images(before, sample("out", "seeds=0-4"))
    assert [name for name in names if (tmp_path / "out" / name).stat().st_mtime_ns != times[name]] == [names[3]]


def test_images_of_other_settings_are_not_mixed(sample, tmp_path):
    sample("out", "seeds=0-1")
    with pytest.raises(ValueError, match=r"holds images of other settings \(sampler.S_churn: 0.0 -> 2.*choose another output="):
        sample("out", "seeds=0-1", "S_churn=2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and not made by sample.py"):
        sample("mine", "seeds=0-1")


def test_a_checkpoint_folder_alone_is_enough(sample, trained, tmp_path):
    (newest,) = checkpoints.list_steps(trained / "checkpoints").values()
    from_run = sample("from_run", "seeds=0-1")
    shutil.move(newest, tmp_path / "alone")
    shutil.rmtree(trained)
    assert_same_images(from_run, sample("from_folder", "seeds=0-1", checkpoint=tmp_path / "alone"))


def test_raw_and_ema_weights_differ(sample):
    ema, raw = sample("ema", "seeds=0-1"), sample("raw", "seeds=0-1", "weights=raw")
    assert any((ema[name] != raw[name]).any() for name in set(ema) & set(raw))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cfg_scale=2"], "cfg_scale=2 needs guidance=cfg, not guidance=none"),
        (["classes=[3,10]"], "class 10 does not exist; the model knows 0 to 9"),
        (["seeds=5-"], "seeds='5-' is not accepted; use numbers and ranges"),
        (["weights=best"], r"weights='best' is not accepted; use ema \| raw"),
        (["batch_size=0"], "batch_size=0 is not accepted"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(sample, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        sample("out", *overrides)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_missing_or_altered_is_refused(sample, trained, tmp_path):
    with pytest.raises(ValueError, match="checkpoint=None is not accepted; use the folder of a checkpoint"):
        sample("out", "checkpoint=null")
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        sample("out", checkpoint=tmp_path / "nowhere")
    (newest,) = checkpoints.list_steps(trained / "checkpoints").values()
    (newest / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is missing"):
        sample("out", checkpoint=newest)
    assert not (tmp_path / "out").exists()


def test_labels_are_random_but_fixed_by_the_seed(sample):
    first, second = sample("a", "seeds=0-9"), sample("b", "seeds=9-9")
    labels = [re.search(r"class_(\d+)", name)[1] for name in first]
    assert len(set(labels)) > 3 and list(second)[0] == list(first)[9]


def test_large_npz_files_are_streamed_and_checked(tmp_path):
    from evaluations.npz import write_npz

    images = [np.full((2, 2, 3), i, dtype=np.uint8) for i in range(3)]
    write_npz(tmp_path / "a.npz", iter(images), (3, 2, 2, 3), np.arange(3))
    with np.load(tmp_path / "a.npz") as file:
        assert np.array_equal(file["arr_0"], np.stack(images))
    with pytest.raises(ValueError, match="2 images instead of 3"):
        write_npz(tmp_path / "b.npz", iter(images[:2]), (3, 2, 2, 3), np.arange(3))
    with pytest.raises(ValueError, match="image 0 is float32"):
        write_npz(tmp_path / "c.npz", iter([images[0].astype(np.float32)]), (1, 2, 2, 3), np.arange(1))
    assert not (tmp_path / "b.npz").exists()


def test_grids_show_every_image_with_its_label():
    from training.sampling import labelled_grid

    grid = labelled_grid([np.full((8, 8, 3), 200, dtype=np.uint8)] * 3, [1, 2, 3], num_columns=2)
    pixels = np.asarray(grid)
    assert grid.size == (2 * 68 + 4, 2 * 82 + 4)
    tiles = [(0, 0), (0, 1), (1, 0), (1, 1)]
    centres = [pixels[4 + r * 82 + 14 + 32, 4 + c * 68 + 32].tolist() for r, c in tiles]
    assert centres == [[200] * 3] * 3 + [[255] * 3]
    captions = [pixels[4 + r * 82 : 4 + r * 82 + 14, 4 + c * 68 : 40 + c * 68] for r, c in tiles]
    assert [caption.min() < 100 for caption in captions] == [True, True, True, False]
