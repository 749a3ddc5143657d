"""Every shipped configuration composes and builds. The error for a wrong key or value names it."""

import pickle
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, checked, make_shard
from pydantic import create_model

from checkpoints.checkpoint import Checkpoint
from cli.hydra_setup import CONFIGS
from common.errors import UserError
from common.roles import ChangesNothing, Role, SameRun, roles_of
from configs import schema
from configs.differences import differences_by_role
from configs.sampling_schema import parse_numbers, sampler_of_run
from configs.settings import NumberForText, Settings, flatten, read_stored, validate
from extras.ddpm import AncestralSampler
from guidance import GUIDANCES, GuidanceInputs
from routing_module import Route
from sampling import recipe
from sampling.score import plan_evaluation
from training.data import complete_config, open_training_latents

SD = dict(channels=4, kind="moments", num_classes=1000, scale_factor=0.18215, autoencoder="sd-vae:some/vae")

MODELS = sorted(file.stem for file in (CONFIGS / "model").glob("*.yaml"))


@pytest.mark.parametrize(("number", "model"), [*enumerate(MODELS)])
@pytest.mark.parametrize("data", ["digits", "imagenet256", "imagenet512", "custom"])
def test_every_shipped_configuration_composes_and_builds(tmp_path, number, model, data):
    diffusion = ("edm", "sit", "ddpm")[number % 3]
    overrides = [f"model={model}", f"diffusion={diffusion}", f"data={data}"]
    if data != "digits":
        make_shard(tmp_path / "x.safetensors", size=64 if data == "imagenet512" else 32, num_items=2, **SD)
        overrides.append(f"data.path={tmp_path}")
    given = checked(overrides)
    dataset = open_training_latents(given.data)
    cfg = complete_config(given, dataset)
    with torch.device("meta"):
        net = cfg.model.build(cfg.data)
    assert len(net.router.routes) == len(cfg.model.routes) and (model in ("dit", "lightningdit")) == (not cfg.model.routes)
    assert net.num_tokens == (cfg.data.input_size // (1 if "lightning" in model and data != "digits" else 2)) ** 2
    assert cfg.diffusion.name == diffusion and type(cfg.diffusion).__name__.lower() == diffusion
    assert cfg.sampler.num_steps == (20 if data == "digits" else 250 if diffusion == "ddpm" else 40)
    assert cfg.name == f"{tmp_path.name if data == 'custom' else data}_{model}"
    assert cfg.sampling.autoencoder == dataset.info.autoencoder and cfg.data.scale_factor == dataset.info.scale_factor
    assert given.data.scale_factor is None  # the given configuration is not changed
    assert schema.TrainConfig.model_validate(cfg.model_dump()) == cfg


@pytest.mark.parametrize("diffusion", ["edm", "sit", "ddpm"])
@pytest.mark.parametrize("name", GUIDANCES)
def test_every_shipped_guidance_composes_and_builds_for_every_diffusion(name, diffusion):
    bounds = {"ddpm": (200, 900)}.get(diffusion, (0.2, 0.9))
    to_be_set = {
        "interval": [f"guidance.level_lo={bounds[0]}", f"guidance.level_hi={bounds[1]}"],
        "autoguidance": ["guidance.checkpoint=runs/other"],
        "path_drop": ["model=sprint"],
    }
    cfg = checked([f"guidance={name}", f"diffusion={diffusion}", *to_be_set.get(name, [])])
    weak = Checkpoint(Path("runs/other"), "", 1, cfg, {}) if name == "autoguidance" else None
    recipe.check_guidance(cfg, cfg.guidance[0], weak)

    def estimate(x, level, y, **routing):
        return x

    inputs = GuidanceInputs(estimate, 10, (1, 16), lambda: torch.rand(1, 1, 16), estimate, (1, 16))
    x, level, y = torch.ones(1, 1, 1, 1), torch.full((1,), 0.5), torch.ones(1, dtype=torch.int64)
    assert recipe.build_guidance(cfg.guidance[0])(inputs)(x, level, y).item() == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["guidance.level_lo=0.2", "guidance.level_hi=100"], "level_hi=100.*from 80 to 0.002"),
        (["diffusion=sit", "guidance.level_lo=0.28", "guidance.level_hi=2.9"], "level_hi=2.9 .*from 1 to"),
        (["diffusion=sit", "guidance.level_lo=0.41", "guidance.level_hi=0.44"], "level_lo=0.41.*20 noise levels"),
        (
            ["diffusion=sit", "sampler.num_steps=3", "guidance.level_lo=0.2", "guidance.level_hi=0.3333333"],
            "level_lo=0.2 .*3 noise",
        ),
        (["guidance.level_lo=3", "guidance.level_hi=2"], "level_lo=3"),
        (["guidance.level_lo=0", "guidance.level_hi=9", "guidance.channels=2"], "guidance.channels=2.*1 channels"),
        (["guidance=sparse", "guidance.r_strong=0.6"], "r_strong=0.6"),
        (["model=dit", "guidance=sparse"], "guidance=sparse needs a network with routes"),
        (["guidance=sparse", "guidance.r_weak_last=0.0"], "r_weak=0.0.* must keep fewer of the 16 tokens than r_strong=0"),
    ],
)
def test_guidance_that_does_not_fit_the_run_is_refused(overrides, words):
    cfg = checked(["guidance=interval", *overrides] if "guidance=sparse" not in overrides else overrides)
    with pytest.raises(UserError, match=words):
        recipe.check_guidance(cfg, cfg.guidance[0])


def test_an_interval_may_end_at_the_first_noise_level():
    for diffusion, top in (("edm", 80), ("sit", 1)):
        cfg = checked([f"diffusion={diffusion}", "guidance=interval", "guidance.level_lo=0", f"guidance.level_hi={top}"])
        recipe.check_guidance(cfg, cfg.guidance[0])


def test_without_bounds_guidance_may_have_the_noise_level_0_alone():
    run = checked()
    one_step = run.model_copy(update={"sampler": AncestralSampler(num_steps=1)})
    for name in ("none", "cfg"):
        for cfg in (one_step, run):
            recipe.check_interval(cfg, checked([f"guidance={name}"]).guidance[0])
    bounded = checked(["guidance=interval", "guidance.level_lo=0", "guidance.level_hi=1"]).guidance[0]
    with pytest.raises(UserError, match="level_lo=0.0 to guidance.level_hi=1.0 does not fit the 1 noise levels .* 0 to 0"):
        recipe.check_interval(one_step, bounded)


def test_the_sampler_takes_its_own_settings_and_no_others():
    edm, sit = checked(), checked(["diffusion=sit"])

    def sampler(run, *overrides):
        return sampler_of_run(
            run, checked(["checkpoint=a", *(f"sampler.{override}" for override in overrides)], "sample").sampler
        )

    assert sampler(sit, "num_steps=7", "solver=euler") == sit.diffusion.Sampler(num_steps=7, solver="euler")
    assert sit.sampler.num_steps == 20 and sampler(sit, "num_steps=null") == sit.sampler
    for run, override, words in (
        (sit, "S_churn=2.0", "sampler.S_churn is not a key .* diffusion=sit, which has num_steps, solver"),
        (edm, "solver=euler", "sampler.solver is not a key"),
        (edm, "num_steps=0", "sampler.num_steps=0"),
        (sit, "solver=heum", "sampler.solver='heum'.*'euler', 'heun'"),
    ):
        with pytest.raises(UserError, match=words):
            sampler(run, override)


def recipes_for(command, run, step):
    """Build the recipe of every combination of a fid.py command for a checkpoint of the run."""
    checkpoint = Checkpoint(Path("a"), "hash", step, run, {})
    return [recipe.Recipe.for_checkpoint(checkpoint, chosen, command.evaluation) for chosen in command.choices(run)]


def test_a_key_that_a_command_leaves_open_has_the_value_of_the_run():
    run = checked(
        [
            "guidance=unguided_and_cfg",
            "evaluation.final_num_samples=500",
            "sampling.labels=balanced",
            "sampling.autoencoder=identity",
            "evaluation.background=black",
            "machine.tf32=false",
        ]
    )
    last = run.train.num_steps
    given = checked(["checkpoint=a"], "fid")
    (unguided, guided) = recipes_for(given, run, last)
    assert [one.guidance for one in (unguided, guided)] == run.guidance
    assert unguided.config.sampler == run.sampler and unguided.config.machine == run.machine
    assert unguided.config.sampling == run.sampling and (unguided.weights, unguided.average) == ("ema", None)
    in_training = recipe.Recipe.build(run, run.guidance[0])
    scored, trained = (plan_evaluation(one, {"detector": "digits"}).settings for one in (unguided, in_training))
    assert scored == trained | {"num_samples": 500}
    assert unguided.config == in_training.config.model_copy(update={"evaluation": unguided.config.evaluation})
    assert unguided.config.evaluation.model_dump() == run.evaluation.model_dump() | {"num_samples": 500}
    assert recipes_for(given, run, last - 1)[0].config.evaluation == run.evaluation
    image = recipe.Recipe.for_checkpoint(unguided.checkpoint, checked(["checkpoint=a"], "sample"))
    assert image.guidance == guided.guidance
    assert image.config.machine == run.machine.model_copy(update={"compile": "none"})
    assert (image.config.sampler, image.config.sampling) == (unguided.config.sampler, unguided.config.sampling)

    keys = [
        "guidance=cfg",
        "evaluation.num_samples=7",
        "evaluation.detector=inception",
        "sampling.labels=random",
        "machine.tf32=true",
    ]
    other = checked(["checkpoint=a", *keys, "sampling.weights=[ema,raw]"], "fid")
    own_detector = ["evaluation.detector=small-x", "evaluation.detector_weights=x.safetensors"]
    run = checked([*own_detector, "sampling.labels=balanced", "sampling.autoencoder=identity"])
    ema, raw = recipes_for(other, run, 1)
    assert (ema.weights, raw.weights) == ("ema", "raw") and ema.config.sampling.labels == "random"
    assert ema.config.evaluation.num_samples == 7 and ema.config.evaluation.detector_weights is None
    assert ema.config.machine.tf32
    same, *_ = recipes_for(checked(["checkpoint=a"], "fid"), run, 1)
    assert same.config.evaluation.detector_weights == "x.safetensors"
    own, *_ = recipes_for(checked(["checkpoint=a", "evaluation.detector=[small-x,dinov2]"], "fid"), run, 1)
    assert (own.config.evaluation.detector_weights, own.config.evaluation.background) == ("x.safetensors", "white")


@pytest.mark.parametrize(
    ("of_run", "of_command", "is_kept"),
    [
        ("inception", None, True),
        ("inception", "[inception,dinov2]", True),
        ("[inception,dinov2]", "inception", True),
        ("inception", "dinov2", False),
        ("inception", "[inception,small-x]", False),
        ("small-x", "[inception,small-x]", True),
        ("[inception,small-x]", "inception", False),
        ("[inception,small-x]", "small-x", True),
        ("small-x", "small-y", False),
        ("small-x", "[small-x,small-y]", False),
        ("digits", "small-x", False),
    ],
)
def test_the_weights_of_the_runs_detector_are_loaded_by_no_other_detector(of_run, of_command, is_kept):
    run = checked([f"evaluation.detector={of_run}", "evaluation.detector_weights=a", "sampling.autoencoder=identity"])
    detector = [f"evaluation.detector={of_command}"] if of_command else []
    kept, *_ = recipes_for(checked(["checkpoint=a", *detector], "fid"), run, 1)
    assert kept.config.evaluation.detector_weights == ("a" if is_kept else None)
    given, *_ = recipes_for(checked(["checkpoint=a", *detector, "evaluation.detector_weights=b"], "fid"), run, 1)
    assert given.config.evaluation.detector_weights == "b"


def test_the_defaults_are_the_papers_except_for_the_digits():
    cfg = checked(["data=imagenet256"])
    assert [vars(route) for route in cfg.model.routes] == [vars(Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-4))]
    assert (cfg.train.lr, cfg.train.batch_size, cfg.train.num_steps) == (1e-4, 256, 400_000)
    assert (cfg.train.ema_decay, cfg.model.class_dropout, cfg.train.precision) == (0.9999, 0.1, "bf16")
    assert (cfg.diffusion.P_mean, cfg.diffusion.P_std, cfg.diffusion.sigma_data) == (-1.2, 1.2, 0.5)
    assert cfg.sampler.num_steps == 40
    dit, tread = (checked([f"model={model}"]) for model in ("dit", "tread"))
    assert [change.key for change in differences_by_role("resume", "refuses", dit, tread)] == ["model.name", "model.routes"]


def test_every_key_has_a_comment():
    own_words = {"name:", "dir:", "subdir:", "output_subdir:", "P_std:"}
    for file in (REPOSITORY / "configs").rglob("*.yaml"):
        is_choice_of_values = file.parent.name in ("data", "experiment", "bases") and file.stem != "row"
        for line in file.read_text().splitlines() if not is_choice_of_values else ():
            key = line.split("#")[0].strip()
            is_value = ":" in key and not key.endswith(":") and not key.startswith(("-", "defaults"))
            assert not is_value or key.split()[0] in own_words or "#" in line, f"{file.relative_to(REPOSITORY)}: {line}"


def test_every_key_has_a_role():
    for choices in ([], ["model=sprint", "diffusion=sit", "alignment=repa"], ["diffusion=ddpm", "model=lightningdit"]):
        cfg = checked(choices)
        found = roles_of(cfg)  # raises TypeError for a key without a role
        assert found.keys() >= flatten(cfg.model_dump()).keys()
        assert found["data.resolution"] == Role(*["accepts"] * 4, "separates")
        assert found["sampler.num_steps"] == Role(*["accepts"] * 4, "ignores")
        assert found["diffusion.name"].init_weights == "refuses"
        assert found["model.routes"] == Role("refuses", "accepts", "accepts", "accepts", "separates")


def test_a_key_without_a_role_is_an_error():
    class Group(Settings):
        stated: ChangesNothing[int] = 1
        forgotten: int = 2

    values = {"group": Group()}
    with_role, without = (create_model("C", __base__=Settings, group=(kind, ...)) for kind in (SameRun[Group], Group))
    assert roles_of(with_role.model_validate(values)).keys() == {"group", "group.stated", "group.forgotten"}
    with pytest.raises(TypeError, match="group.forgotten has no role"):
        roles_of(without.model_validate(values))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+train.lrr=1", "train.lrr is not a key; nearest: train.lr"),
        ("+zzz=1", "zzz is not a key"),
        ("+guidance.w=1", "guidance.w is not a key"),
        ("+sampler.solver=heun", "sampler.solver is not a key"),
        ("+sampling.weights=raw", "sampling.weights is not a key"),
        ("train.lr=fast", "train.lr='fast': .*number"),
        ("train.betas=[0.9]", "train.betas=.*2 items"),
        ("train.betas=[0.9,2.0]", r"train.betas\[1\]=2.0"),
        ("model.backbone=dit-xl2", "dit-xl2.*DiT-XL/2"),
        ("model.routes=[{selection_ratio:0.5,end_layer_idx:3,start:1}]", r"model.routes\[0\].start_layer_idx= is missing"),
        ("sampling.autoencoder='sd-vae:'", "sampling.autoencoder: 'sd-vae:' is not identity, none, sd-vae:<hub id or folder> or"),
        ("evaluation.detector=small-Fashion", "^evaluation.detector: 'small-Fashion' is not .*digits or small-<set>$"),
        ("experiment=dit_b2", "experiment=dit_b2 is not in .*; nearest: imagenet512_dit_b2, table2_dit_b2$"),
        ("evaluation.detector=[inception,vgg]", r"evaluation.detector\[1\]: 'vgg' is not inception, dinov2,"),
        ("name=a/b", "^name: 'a/b' is not a folder name without slashes and without a dot at its start$"),
        ("name=..", "^name: '..' is not a folder name without slashes and without a dot at its start$"),
        ("name=.sweeps", "^name: '.sweeps' is not a folder name without slashes and without a dot at its start$"),
        ("name=", "^name: '' is not a folder name without slashes and without a dot at its start$"),
        ("model.routes=null", "model.routes is not set: .*list"),
        ("train.lr=true", "train.lr: True is not a number"),
        ("sampler.num_steps=true", "num_steps: True is not a number"),
        ("sampler.S_max=true", "S_max: True is not a number"),
        ("train.lr='1e-4'", "train.lr='1e-4': Input should be a valid number"),
        ("diffusion.sigma_data='0.5'", "sigma_data='0.5': Input should be a valid number"),
        ("sampler.num_steps='20'", "num_steps='20': Input should be a valid integer"),
        ("train.precision=fp16", "^train.precision='fp16': .*'bf16'\nsampling.precision='fp16': .*'bf16'"),
        ("sampler.S_churn=-1", "sampler.S_churn=-1: .*0"),
        ("sampler.sigma_min=90.0", "sampler: .*sigma_min=90"),
        ("alignment.name=repo", "alignment=.*'none', 'repa'"),
        ("diffusion.name=eddm", "diffusion.name=eddm is none of edm, sit, ddpm"),
    ],
)
def test_the_error_for_a_wrong_key_or_value_says_what_is_accepted(override, words):
    with pytest.raises(UserError, match=words):
        checked([override])


def test_a_count_may_be_written_as_a_float():
    cfg = checked(["evaluation.num_samples=1e3", "sampler.num_steps=3e1", "sample_grid.num_samples=1e1"])
    assert (cfg.evaluation.num_samples, cfg.sampler.num_steps, cfg.sample_grid.num_samples) == (1000, 30, 10)


def test_one_error_names_all_wrong_keys():
    with pytest.raises(UserError) as error:
        checked(["train.lr=0", "seed=x"])
    assert len(str(error.value).splitlines()) == 2


def test_the_error_for_numbers_that_must_be_text_reaches_other_processes():
    with pytest.raises(NumberForText) as raised:
        validate({"mode": "disabled", "project": 3}, schema.Wandb)
    error = pickle.loads(pickle.dumps(raised.value))
    assert error.numbers == {"project": 3} and str(error).startswith("project=3: Input should be a valid string; quote text")


def test_data_are_compared_with_the_configuration(tmp_path):
    make_shard(tmp_path / "x.safetensors", channels=6, size=4, num_classes=7, num_items=2)
    anything = [f"data.path={tmp_path}", "data.in_channels=null", "data.input_size=null", "data.num_classes=null"]
    cfg = complete_config(given := checked(anything), open_training_latents(given.data))
    assert (cfg.data.in_channels, cfg.data.input_size, cfg.data.num_classes) == (6, 4, 7)
    for override, words in (
        ("data.path=null", "data.path is not set"),
        ("data.in_channels=4", "data.in_channels=4, but .* 6"),
        ("data.input_size=32", "data.input_size=32, but .* 4"),
    ):
        with pytest.raises(UserError, match=words):
            complete_config(given := checked([*anything, override]), open_training_latents(given.data))


@pytest.mark.parametrize(
    ("spec", "numbers"), [("0-3,7", [0, 1, 2, 3, 7]), ("5", [5]), (12, [12]), ([3, "5-6"], [3, 5, 6]), (" 1, 3-4 ", [1, 3, 4])]
)
def test_numbers_and_ranges_are_parsed(spec, numbers):
    assert parse_numbers(spec) == numbers


@pytest.mark.parametrize("spec", ["", "a", "3-", "-3", "1,,2", "1-3,2", "1.5", "2-1-0", "5-2", [0, "9-5"], "0-99999999999"])
def test_other_lists_are_refused(spec):
    with pytest.raises(ValueError, match="is not a list of at most|repeats a number"):
        parse_numbers(spec)


def test_a_run_is_named_after_the_settings_that_distinguish_it():
    def name(*overrides):
        return checked(overrides).named(overrides).name

    assert name("model=tread", "train.num_steps=9", "train.log_every=3", "output_dir=x", "guidance=cfg") == "digits_tread"
    assert name("train.lr=1e-4", "seed=2", "diffusion=sit") == "digits_tread_lr-0.0001_seed-2_diffusion-sit"
    assert name("train.lr=1e-3") == name("train.lr=0.001") == "digits_tread_lr-0.001"
    assert name("diffusion=sit", "diffusion.timestep=uniform", "model=dit") == "digits_dit_diffusion-sit_timestep-uniform"
    assert name("train.ema_lengths=[0.05,0.10]") == "digits_tread_ema_lengths-0.05-0.1"
    assert name("train.lr=1e-4", "name=mine") == "mine"
    assert name("diffusion.P_mean=-0.4") == "digits_tread_P_mean--0.4" != name("diffusion.P_mean=0.4")
    assert name("model.routes.0.selection_ratio=0.25") == "digits_tread_selection_ratio-0.25"
    assert name("experiment=table2_dit_b2", "seed=2") == "table2_dit_b2_seed2"
    assert name("experiment=table2_dit_b2", "data=imagenet512", "data.path=x") == "table2_dit_b2_seed0_data-imagenet512"
    assert name("experiment=table2_dit_b2", "model=tread", "train.lr=1e-3") == "table2_dit_b2_seed0_model-tread_lr-0.001"
    long = [name(f"model.routes=[{{selection_ratio:0.{i},start_layer_idx:2,end_layer_idx:-4}}]", "train.lr=1e-4") for i in (3, 4)]
    assert all(len(one) == 60 for one in long) and long[0] != long[1]


def test_stored_settings_are_read_as_this_version_means_them():
    class Route(Settings):
        ratio: float
        start: int = 3  # added later

    class Run(Settings):
        removed_keys = {"route.shuffle": False, "seeds": [0]}
        route: Route
        name: str

    new = Run(route=Route(ratio=0.5), name="a")
    assert read_stored({"route": {"ratio": 0.5}, "name": "a"}, Run, "x.yaml") == new
    older = {"route": {"ratio": 0.5, "shuffle": False}, "name": "a", "seeds": [0]}
    assert read_stored(older, Run, "x.yaml") == new and older["seeds"] == [0]
    other = {"route": {"ratio": "half", "shuffle": True, "speed": 2}, "epochs": 3}
    with pytest.raises(UserError) as error:
        read_stored(other, Run, "x.yaml")
    assert str(error.value) == (
        "x.yaml cannot be read: unknown keys: route.speed, epochs; missing keys: name; route.ratio='half': Input should be a "
        "valid number; route.shuffle=True, but this version has no such key and always uses False"
    )


def test_a_list_in_a_group_of_guidance_is_one_guidance_for_each_value():
    guided = ["guidance=interval", "guidance.level_lo=0.1", "guidance.level_hi=0.5"]
    assert checked(["checkpoint=a", *guided], "sample").guidance.cfg_scale == 1.5
    assert [one.cfg_scale for one in checked([*guided, "guidance.cfg_scale=[1.0,2.0]"]).guidance] == [1.0, 2.0]
    command = checked(["checkpoint=a", *guided, "guidance.cfg_scale=[1.0,2.0]", "sampling.weights=[ema,raw]"], "fid")
    choices = [(one.sampling.weights, one.guidance.cfg_scale) for one in command.choices(checked())]
    assert choices == [("ema", 1), ("ema", 2), ("raw", 1), ("raw", 2)]
    for name in ("config", "fid"):
        with pytest.raises(UserError, match=r"cfg_scale=\[\] lists no value"):
            checked(["guidance=cfg", "guidance.cfg_scale=[]"], name)
    with pytest.raises(UserError, match="guidance.*cfg_scale"):  # sample.py makes one set of images
        checked(["checkpoint=a", "guidance=cfg", "guidance.cfg_scale=[1.0,2.0]"], "sample")
