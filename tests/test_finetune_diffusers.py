"""The fine-tuning example on tiny random networks."""

import statistics

import pytest
import torch
from networks import flux, normal, pixart
from safetensors.torch import save_file

from common.errors import UserError
from configs.command_line import parse_arguments
from extras.attach.finetune_diffusers import FinetuneSettings, finetune, main, pack, read_items, unpack
from routing_module import Route

peft = pytest.importorskip("peft")


def items_for(name, num_items=4, size=8, with_mask=False):
    channels = 1 if name == "Flux" else 4
    items = {"latents": normal(num_items, channels, size, size), "prompt_embeds": normal(num_items, 5, 12, seed=2)}
    if name == "Flux":
        items["pooled_prompt_embeds"] = normal(num_items, 8, seed=3)
    else:
        items["prompt_mask"] = torch.ones(num_items, 5)
    if with_mask:
        items["loss_mask"] = torch.zeros(num_items, size, size)
        items["loss_mask"][:, :4, :4] = 1
    return items


def test_packing_puts_channel_row_and_column_where_flux_wants_them():
    x = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(2, 3, 4, 6)
    tokens = pack(x)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(tokens[1, 4], x[1, :, 2:4, 2:4].flatten())  # second row, second column of patches
    assert torch.equal(unpack(tokens, 4, 6), x)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize(("name", "build"), [("Flux", flux), ("PixArt", pixart)])
def test_the_loss_goes_down_and_only_lora_is_trained(name, build, with_mask):
    torch.manual_seed(0)
    network = build()
    before = {key: p.clone() for key, p in network.named_parameters()}
    tuned, steps = finetune(
        network,
        items_for(name, with_mask=with_mask),
        routes=[Route(0.5, 1, 4)],
        num_steps=80,
        batch_size=4,
        learning_rate=1e-2,
        rank=4,
    )
    losses = [record.loss for record in steps]
    assert statistics.mean(losses[-20:]) < 0.9 * statistics.mean(losses[:10])
    after = {key.replace("base_model.model.", "").replace("base_layer.", ""): p for key, p in tuned.named_parameters()}
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(("name", "build"), [("Flux", flux), ("PixArt", pixart)])
def test_long_sequences_train_faster_with_routes_than_without_in_the_same_run(name, build):
    settings = dict(num_steps=8, batch_size=1, rank=2)
    items = items_for(name, num_items=1, size=64)  # 1,024 tokens
    runs = {}
    for routes in (None, "fastest"):
        torch.manual_seed(0)
        _, runs[routes] = finetune(build(), items, routes=routes, **settings)
    seconds = {None: [], "fastest": []}
    for _ in range(settings["num_steps"]):  # turn by turn, so that a busy machine is busy for both
        for routes, steps in runs.items():
            seconds[routes].append(next(steps).step_sec)
    assert statistics.median(seconds["fastest"][2:]) < 0.85 * statistics.median(seconds[None][2:])


def test_the_command_reads_a_folder_and_writes_lora_weights_that_load(tmp_path, caplog):
    torch.manual_seed(0)
    network = flux()
    network.save_pretrained(tmp_path / "model" / "transformer")
    (tmp_path / "data").mkdir()
    for i in range(2):
        save_file(items_for("Flux"), tmp_path / "data" / f"{i}.safetensors")
    assert len(read_items(tmp_path / "data")["latents"]) == 8
    arguments = ["--model", tmp_path / "model", "--data", tmp_path / "data", "--output", tmp_path / "lora"]
    with caplog.at_level("INFO"):
        main([*map(str, arguments), "--routes", "balanced", "--steps", "2", "--learning-rate", "0.1", "--device", "cpu"])
    assert "step 2  loss" in caplog.text and "saving=0.25" in caplog.text  # 3 of 6 blocks with half of the tokens
    loaded = peft.PeftModel.from_pretrained(network, tmp_path / "lora")
    trained = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert trained and all(p.abs().max() > 0 for p in trained)


def test_flags_may_be_written_in_both_ways_and_mistakes_are_named():
    needed = ["--model", "m", "--data=d", "output=o"]
    settings = parse_arguments([*needed, "--batch-size", "4", "--learning-rate=0.5"], FinetuneSettings)
    assert (settings.model, settings.data, settings.output) == ("m", "d", "o")
    assert (settings.batch_size, settings.learning_rate, settings.routes) == (4, 0.5, "lora")
    for arguments, message in (
        (needed[1:], "m is not a key or has no value"),
        (needed[2:], "model= is missing"),
        ([*needed, "--routes"], "routes is not a key or has no value"),
        ([*needed, "--routes", "quickest"], "routes='quickest' is not accepted; use none | paper | balanced"),
        ([*needed, "--batch-size", "none"], "batch_size='none' is not accepted"),
        ([*needed, "--data", "e"], "data is given twice"),
    ):
        with pytest.raises(UserError, match=message.replace("|", r"\|")):
            parse_arguments(arguments, FinetuneSettings)


def test_data_and_networks_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no .*safetensors files"):
        read_items(tmp_path)
    save_file({"latents": torch.zeros(1, 1, 4, 4)}, tmp_path / "0.safetensors")
    with pytest.raises(ValueError, match="has no 'prompt_embeds'; it has latents"):
        read_items(tmp_path)
    save_file({"latents": torch.zeros(1, 1, 4, 4), "prompt_embeds": torch.zeros(1, 5, 12)}, tmp_path / "0.safetensors")
    save_file({"latents": torch.zeros(1, 1, 4, 4)}, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match="1.safetensors has latents, but .*0.safetensors has latents, prompt_embeds"):
        read_items(tmp_path)
    with pytest.raises(ValueError, match="Flux needs 'pooled_prompt_embeds' in the data; it has latents, prompt_embeds"):
        finetune(flux(), {"latents": torch.zeros(1), "prompt_embeds": torch.zeros(1)}, routes=None, num_steps=1)
    with pytest.raises(ValueError, match="Linear cannot be fine-tuned here; use one of FluxTransformer2DModel"):
        finetune(torch.nn.Linear(2, 2), {}, routes=None, num_steps=1)
