"""Every list of choices, in the schema, tables of functions, YAML comments and README, names the same choices."""

import re
from dataclasses import fields
from pkgutil import resolve_name
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from conftest import REPOSITORY, checked
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

import dit
from cli.compose import compose_overrides
from configs import sampling_schema, schema
from configs.run_name import GROUPS
from configs.settings import Settings
from evaluations.suite import METRICS
from extras import lightningdit
from guidance import GUIDANCES
from routing_module import SELECTIONS
from training.optimizers import OPTIMIZERS

CONFIGS = REPOSITORY / "configs"


def literals(annotation):
    """Return the choices of the Literal types in an annotation."""
    if get_origin(annotation) is Literal:
        return {*get_args(annotation)}
    return {choice for part in get_args(annotation) for choice in literals(part)}


def names_of(union):
    """Return the names in a union of settings, whose classes differ in the Literal of `name`."""
    return {name for kind in get_args(get_args(union)[0]) for name in literals(kind.model_fields["name"].annotation)}


def listed(text):
    """Return the choices that a text lists between bars, such as `what it is: a (first) | b | c (last), or a list`."""
    while text != (shorter := re.sub(r"\([^()]*\)", "", text)):
        text = shorter
    return {name.strip() for names in re.findall(r"[\w<>-]+ *(?:\| *[\w<>-]+ *)+", text) for name in names.split("|")}


def readme(key):
    """Return the choices of a key in the README's list, which are in backquotes before any explanation."""
    (line,) = re.findall(rf"^- `{re.escape(key)}`[^:\n]*: (.*(?:\n  .*)*)", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    while line != (shorter := re.sub(r"\([^()]*\)", "", line)):
        line = shorter
    return set(re.findall(r"`([^`]+)`", line))


# The choices that the code accepts, for each key that several lists name.
CODE = {
    "model": names_of(schema.AnyModel),
    "diffusion": set(schema.DIFFUSIONS),
    "guidance": names_of(schema.GuidanceSettings),
    "alignment": names_of(schema.Alignment),
    "data": {file.stem for file in (CONFIGS / "data").glob("*.yaml")},
    "model.selection": literals(schema.Model.model_fields["selection"].annotation),
    "train.optimizer": literals(schema.Train.model_fields["optimizer"].annotation),
}


def test_the_schema_accepts_the_names_in_the_tables_of_functions():
    assert CODE["guidance"] == set(GUIDANCES)
    assert CODE["model.selection"] == set(SELECTIONS)
    assert CODE["train.optimizer"] == set(OPTIMIZERS)


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_a_file_for_every_choice_and_the_configuration_lists_them(group):
    files = {file.stem: file.read_text() for file in (CONFIGS / group).glob("*.yaml")}
    variants = {name for name, text in files.items() if group == "guidance" and "defaults:" in text}  # of another file
    assert files.keys() - variants == CODE[group]
    (line,) = re.findall(rf"^  - {group}: \w+ *# (.*)", (CONFIGS / "config.yaml").read_text(), re.MULTILINE)
    assert listed(line) == CODE[group]


@pytest.mark.parametrize("key", CODE)
def test_the_readme_lists_every_choice(key):
    only_for_sampling = {"ddpm"} if key == "diffusion" else set()
    assert readme(key) == CODE[key] - only_for_sampling


@pytest.mark.parametrize("file", ["README.md", "configs/model/dit.yaml", "configs/model/lightningdit.yaml"])
def test_pages_and_comments_list_every_backbone(file):
    texts = re.findall(r"\b((?:Lightning)?DiT)-\{([\w,]+)\}/\{([\d,]+)\}", (REPOSITORY / file).read_text())
    found = {f"{name}-{size}/{p}" for name, sizes, patches in texts for size in sizes.split(",") for p in patches.split(",")}
    ours, lightning = set(dit.BACKBONES), set(lightningdit.BACKBONES)
    assert found == {"README.md": ours | lightning, "configs/model/dit.yaml": ours}.get(file, lightning)


def test_pages_list_every_choice_of_a_training_setting():
    found = re.findall(r"`train\.(\w+)=(\w+(?:\|\w+)+)`", (REPOSITORY / "docs" / "train.md").read_text())
    assert {key: set(names.split("|")) for key, names in found} == {
        "schedule": literals(schema.Train.model_fields["schedule"].annotation)
    }


def test_comments_list_the_choices_that_the_schema_accepts():
    """A key has the same choices in every group, except a solver, which is a sampler's own."""
    diffusions = [resolve_name(name) for name in schema.DIFFUSIONS.values()]
    samplers = [diffusion.Sampler for diffusion in diffusions]
    kinds = [*vars(schema).values(), *vars(sampling_schema).values()]
    groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]
    annotations = [(key, field.annotation) for group in groups for key, field in group.model_fields.items()]
    annotations += [(key, hint) for kind in (*diffusions, *samplers) for key, hint in get_type_hints(kind).items()]
    choices = {}
    for key, annotation in annotations:
        if key != "name" and (found := literals(annotation)):
            choices.setdefault(key, []).append(found)
    found = set()
    for file in [*CONFIGS.glob("*.yaml"), *(CONFIGS / "model").glob("*.yaml"), *(CONFIGS / "diffusion").glob("*.yaml")]:
        for key, comment in re.findall(r"^ *(\w+): [^#\n{]*# (.*)", file.read_text(), re.MULTILINE):
            if (names := listed(comment)) and key in choices:
                expected = choices[key]
                assert names in expected, f"{file.name}: {key} lists {names}, but the schema accepts {expected}"
                found.add(key)
    assert found == choices.keys()


def test_detectors_have_metrics_and_comments():
    names = {name for metric in METRICS for name in metric.detectors}
    for name in names:
        TypeAdapter(schema.DetectorName).validate_python("small-emoji" if name == "small" else name)
    for file in ("config", "fid"):
        (comment,) = re.findall(r"^  detector: \w+ *# (.*)", (CONFIGS / f"{file}.yaml").read_text(), re.MULTILINE)
        assert listed(comment) == names - {"small"} | {"small-<set>"}


def test_the_settings_of_every_sampler_are_keys_of_its_group():
    for name, kind in schema.DIFFUSIONS.items():
        settings = {field.name for field in fields(resolve_name(kind).Sampler)}
        stored = yaml.safe_load((CONFIGS / "diffusion" / f"{name}.yaml").read_text())["sampler"]
        assert stored.keys() == settings and stored == vars(resolve_name(kind).Sampler())


def test_overrides_have_the_keys_of_their_groups_and_accept_what_the_groups_accept_or_none():
    run, evaluation = checked([]), checked(["evaluation.detector=[digits,inception]"]).evaluation
    sampling = {**dict(run.sampling), "weights": "raw", "ema_length": 0.1}
    of_evaluation = {key: value for key, value in evaluation if key in schema.SharedEvaluationSettings.model_fields}
    for overrides, values in (
        (sampling_schema.MachineOverrides, dict(run.machine)),
        (sampling_schema.EvaluationOverrides, of_evaluation),
        (sampling_schema.SamplingOverrides, sampling),
        (sampling_schema.SamplingSweep, sampling | {"weights": ["ema", "raw"], "ema_length": [0.1, 0.2]}),
    ):
        nothing = dict.fromkeys(values)
        assert dict(overrides.model_validate(values)) == values and dict(overrides.model_validate(nothing)) == nothing
        for key in values:
            for wrong in ({"no": "value"}, -1):
                with pytest.raises(ValidationError, match=key):
                    overrides.model_validate(nothing | {key: wrong})
    with pytest.raises(ValidationError, match="weights"):  # only fid.py accepts lists
        sampling_schema.SamplingOverrides.model_validate(sampling | {"weights": ["ema"]})


def test_the_groups_that_the_commands_share_with_training_have_its_keys():
    composed = {name: OmegaConf.to_container(compose_overrides([], name)) for name in ("config", "sample", "fid")}
    for name, own in (("sample", {"weights", "ema_length"}), ("fid", {"weights", "ema_length"})):
        for group in {"sampling", "machine", "evaluation"} & composed[name].keys():
            keys = composed[name][group].keys()
            assert keys - own <= composed["config"][group].keys()
            assert group == "evaluation" or keys - own == composed["config"][group].keys()
