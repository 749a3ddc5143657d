"""The fine-tuning script on tiny random networks."""

from types import SimpleNamespace

import peft
import pytest
import torch
from networks import build, normal
from safetensors.torch import save_file

from extras.attach import finetune_diffusers as script


def test_flux_gets_packed_patches_and_their_prediction_is_unpacked():
    x = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(2, 3, 4, 6)
    assert torch.equal(script.pack(x)[1, 4], x[1, :, 2:4, 2:4].flatten())  # second row, second column of patches

    class Echo(torch.nn.Module):
        config = SimpleNamespace(guidance_embeds=True)

        def get_base_model(self):
            return self

        def forward(self, hidden_states, img_ids, **inputs):
            assert img_ids[4].tolist() == [0, 1, 1]
            return SimpleNamespace(sample=hidden_states)

    batch = dict(latents=x, prompt_embeds=torch.zeros(2, 5, 12), pooled_prompt_embeds=torch.zeros(2, 8))
    prediction, target = script.predict_flux(Echo(), batch, noise=x)
    assert torch.equal(prediction, x) and not target.any()


@pytest.mark.parametrize("name", ["Flux", "PixArt"])
def test_the_command_trains_lora_weights_that_load_and_the_loss_goes_down(tmp_path, caplog, name):
    network = build(name)
    network.save_pretrained(tmp_path / "transformer")
    items = dict(latents=normal(4, 1 if name == "Flux" else 4, 8, 8), prompt_embeds=normal(4, 5, 12, seed=2))
    items |= dict(pooled_prompt_embeds=normal(4, 8, seed=3)) if name == "Flux" else dict(prompt_mask=torch.ones(4, 5))
    items["loss_mask"] = torch.zeros(4, 8, 8)
    items["loss_mask"][:, :4, :4] = 1
    for i in range(2):
        save_file(items, tmp_path / f"{i}.safetensors")
    assert torch.equal(script.read_items(tmp_path)["latents"], torch.cat([items["latents"]] * 2))
    files = ["--model", tmp_path, "--data", tmp_path, "--output", tmp_path / "lora"]
    numbers = ["--steps", 50, "--batch-size", 16, "--learning-rate", 0.03]
    with caplog.at_level("INFO"):
        script.main([*map(str, files + numbers), "--routes", "balanced", "--device", "cpu"])
    losses = [float(line.split()[3]) for line in caplog.messages]
    assert losses[-1] < 0.9 * losses[0] and "saving 0.12" in caplog.text  # half of the tokens skip 1 of 4 blocks
    loaded = peft.PeftModel.from_pretrained(network, tmp_path / "lora")
    assert all(p.abs().max() > 0 for key, p in loaded.named_parameters() if "lora_B" in key)
