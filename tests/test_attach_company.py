"""Routed networks in company: gradient checkpointing, compilation, autocast, LoRA, int8, DDP, copies, files."""

import contextlib
import copy
import io
import threading

import pytest
import torch
import torch._dynamo
import torch.multiprocessing
from networks import (
    NETWORKS,
    B,
    N,
    blocks_of,
    cached_network,
    call,
    generator,
    randomized_network,
    reference,
    run,
    windows_of,
    worst_difference,
)
from torch.utils.checkpoint import checkpoint

from extras.attach import Adapter, BlockList, attach, attached
from extras.attach.hooks import Plan
from routing_module import Route

ROUTES = [Route(0.5, 1, 2), Route(0.25, 3, 4)]


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


def switch_checkpointing(network, attachment, mode):
    """diffusers' switch; timm has another. `reentrant` runs every block without gradients first."""
    if mode == "none":
        return network.disable_gradient_checkpointing()
    function = {
        "the default": None,
        "the attachment's": attachment.checkpoint,
        "reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=True),
    }[mode]
    return network.enable_gradient_checkpointing(function)


def two_passes(network, first, second, between=None):
    """Gradients of two forward passes whose backward passes follow together."""
    network.zero_grad(set_to_none=True)
    losses = []
    for inputs in (first, second):
        output = call(network, inputs)
        losses.append((output * torch.randn(output.shape, generator=generator(9))).mean())
        if between is not None:
            between(inputs)
    (losses[0] + 2 * losses[1]).backward()
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("selection", ["uniform", "importance"])
@pytest.mark.parametrize("mode", ["the default", "the attachment's", "reentrant"])
@pytest.mark.parametrize("name", ["Flux", "ZImage"])
def test_two_checkpointed_passes_before_one_backward_recompute_each_with_its_own_subset(name, mode, selection):
    case, network = NETWORKS[name], cached_network(name)
    first = case.inputs(case.padded_text)
    second = case.inputs(False)
    if mode == "reentrant":  # it needs an input with a gradient
        key = "x" if name == "ZImage" else "hidden_states"
        for inputs in (first, second):
            inputs[key] = [x.requires_grad_() for x in inputs[key]] if name == "ZImage" else inputs[key].requires_grad_()

    def validate(inputs):
        with torch.no_grad():
            call(network, inputs)

    grads = {}
    for now in ("none", mode):
        attachment = attach(network, ROUTES, selection=selection, generator=seeded())
        switch_checkpointing(network, attachment, now)
        grads[now] = two_passes(network, first, second, between=validate)
        attachment.detach()
    network.disable_gradient_checkpointing()
    assert grads[mode].keys() == grads["none"].keys()
    assert max(worst_difference(grads[mode][key], grads["none"][key]) for key in grads["none"]) < 1e-6


def test_dropout_of_a_checkpointed_pass_is_the_same_when_it_is_recomputed():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    network = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=6, sample_size=8, num_embeds_ada_norm=10,
        norm_num_groups=1, dropout=0.3,
    ).train()  # fmt: skip
    inputs = NETWORKS["diffusers DiT"].inputs(False)
    attachment = attach(network, ROUTES, selection="importance")
    results = []
    for mode in ("none", "the default", "the attachment's"):
        switch_checkpointing(network, attachment, mode)
        torch.manual_seed(7)
        results.append(run(network, inputs))
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert max(worst_difference(grads[key], results[0][1][key]) for key in grads) < 1e-6


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_checkpoints_that_know_nothing_of_routes_are_recomputed_with_their_own_subset(num_blocks, monkeypatch):
    import timm.models.vision_transformer as vision_transformer

    stock = vision_transformer.checkpoint_seq
    monkeypatch.setattr(vision_transformer, "checkpoint_seq", lambda blocks, x: stock(blocks, x, every=num_blocks))
    network, inputs = cached_network("timm"), NETWORKS["timm"].inputs(False)
    grads = []
    for enabled in (False, True):
        attachment = attach(network, ROUTES, generator=seeded())
        network.set_grad_checkpointing(enabled)
        grads.append(two_passes(network, inputs, {"x": inputs["x"] + 1}))
        attachment.detach()
    network.set_grad_checkpointing(False)
    assert max(worst_difference(grads[1][key], grads[0][key]) for key in grads[0]) < 1e-6


def test_a_pass_is_told_by_its_memory_and_not_by_its_address_which_others_get_once_it_is_free():
    memory = torch.zeros(2, 3, 4).numpy()
    ours, others = torch.from_numpy(memory), torch.from_numpy(memory)
    assert ours.data_ptr() == others.data_ptr()
    plan = Plan()
    plan.note_input(3, ours)
    assert plan.had_input(3, ours.detach()) and not plan.had_input(2, ours)
    assert not plan.had_input(3, others) and not plan.had_input(3, ours[1:])


def test_a_recomputation_whose_subset_is_not_known_is_an_error_and_not_a_wrong_gradient():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES)
    network.enable_gradient_checkpointing()

    def train():
        # Activations that are moved away, as when they are offloaded, come back at another place in memory.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            loss = call(network, inputs).mean()
        loss.backward()

    with pytest.raises(RuntimeError, match="enable_gradient_checkpointing\\(attachment.checkpoint\\)"):
        train()
    network.enable_gradient_checkpointing(attachment.checkpoint)
    train()
    network.disable_gradient_checkpointing()
    attachment.detach()
    network.zero_grad(set_to_none=True)


@pytest.mark.parametrize("selection", ["uniform", "importance"])
def test_a_network_that_is_checkpointed_as_a_whole_draws_the_same_subset_again(selection):
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES, selection=selection)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, **inputs):
            return (checkpoint(call, self.network, inputs, use_reentrant=False),)

    grads = []
    for whole in (False, True):
        torch.manual_seed(3)
        grads.append(two_passes(Whole() if whole else network, inputs, NETWORKS["PixArt"].inputs(True)))
    assert max(worst_difference(grads[1]["network." + key], grads[0][key]) for key in grads[0]) < 1e-6
    attachment.generator = seeded()
    with pytest.raises(RuntimeError, match="its generator would draw other tokens; attach"):
        run(Whole(), inputs)
    attachment.detach()
    network.zero_grad(set_to_none=True)


def test_a_network_that_is_checkpointed_as_a_whole_needs_no_context_around_its_backward_pass():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES)
    mask = (torch.arange(N) < 5).expand(B, -1)

    def train(context, whole, **settings):
        torch.manual_seed(3)
        network.zero_grad(set_to_none=True)
        with context:
            output = checkpoint(call, network, inputs, **settings) if whole else call(network, inputs)
            loss = (output * torch.randn(output.shape, generator=generator(9))).mean()
        loss.backward()
        return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    for context in (lambda: attachment.force_keep(mask), lambda: attachment.routed(0.75)):
        expected, grads = train(context(), False), train(context(), True, use_reentrant=False)
        assert max(worst_difference(grads[key], expected[key]) for key in expected) < 1e-6
    # Where the pass cannot be told, it is an error: other random numbers, or a first time without gradients, hence dense.
    for settings in (dict(use_reentrant=False, preserve_rng_state=False), dict(use_reentrant=True)):
        inputs["hidden_states"].requires_grad_()
        with pytest.raises(RuntimeError, match="which tokens it ran with is not known: checkpoint it with use_reentrant=False"):
            if settings["use_reentrant"]:
                checkpoint(
                    lambda x: call(network, inputs | {"hidden_states": x}), inputs["hidden_states"], **settings
                ).mean().backward()
            train(contextlib.nullcontext(), True, **settings)
    attachment.detach()
    network.zero_grad(set_to_none=True)


def test_a_tensor_that_several_passes_share_is_an_error_and_not_a_wrong_gradient():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Identity()  # the first block gets what the user gave
            self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            return x

    network = Shared().train()
    adapter = Adapter("Shared", "embed", (BlockList("blocks", argument="src"),))
    network.forward, plain = (lambda x: plain(network.embed(x))), network.forward
    attach(network, [Route(0.5, 0, 1)], adapter=adapter)
    x = torch.randn(2, 8, 8, generator=generator())
    grads = []
    for network.checkpointed in (False, True):
        x = x.clone()
        for step in range(3):  # passes of earlier steps are over
            torch.manual_seed(step)
            network.zero_grad(set_to_none=True)
            network(x).square().mean().backward()
        grads.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    loss = network(x).square().mean() + network(x).square().mean()
    with pytest.raises(RuntimeError, match="which tokens it ran with is not known"):
        loss.backward()


def test_threads_that_call_one_network_at_once_are_an_error_and_not_a_mixture():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES)
    now = threading.get_ident()

    def other_pass(module, args):
        if threading.get_ident() == now:
            thread = threading.Thread(target=call, args=(network, inputs))
            thread.start()
            thread.join()

    hook = network.transformer_blocks[2].register_forward_pre_hook(other_pass)
    with pytest.raises(RuntimeError, match="two threads call the routed network at the same time"):
        call(network, inputs)
    network.eval()
    call(network, inputs)  # dense passes share nothing
    hook.remove()
    network.train()
    call(network, inputs)
    attachment.detach()


def test_a_checkpointed_pass_of_a_network_in_evaluation_mode_stays_dense():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    network.eval()
    _, expected = run(network, inputs)
    attachment = attach(network, ROUTES)
    for mode in ("the default", "the attachment's"):
        switch_checkpointing(network, attachment, mode)
        _, grads = run(network, inputs)
        assert all(torch.equal(grads[key], expected[key]) for key in expected)
    network.disable_gradient_checkpointing()
    attachment.detach()
    network.train()


def test_nothing_of_a_pass_stays_in_the_hooks_when_recomputation_stops_half_way_through_a_block():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES)
    network.enable_gradient_checkpointing()
    run(network, inputs)
    for block, _ in blocks_of(network, NETWORKS["PixArt"]):
        for hook in block._forward_hooks.values():
            assert hook.__self__.before is None
    network.disable_gradient_checkpointing()
    attachment.detach()


# ---- compilation and precision ---------------------------------------------------------------------------------------


# Every graph takes seconds to trace: one network with positions per sample, one without.
@pytest.mark.parametrize(("name", "selection"), [("Flux", "uniform"), ("DiT", "importance")])
def test_a_routed_network_compiles_without_a_break_in_its_graph(name, selection):
    case = NETWORKS[name]
    network = copy.deepcopy(cached_network(name))
    inputs = case.inputs(False)
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    dense = call(compiled, inputs)
    attachment = attach(compiled, ROUTES, selection=selection)  # after the first compiled call: not ignored
    results = []
    for called in (network, compiled):
        torch.manual_seed(3)
        results.append(run(called, inputs))
    (output, grads), (compiled_output, compiled_grads) = results
    assert worst_difference(compiled_output, output) < 1e-6
    compiled_grads = {key.removeprefix("_orig_mod."): grad for key, grad in compiled_grads.items()}
    assert max(worst_difference(compiled_grads[key], grads[key]) for key in grads) < 1e-6
    assert worst_difference(output, dense.detach()) > 1e-3
    torch.manual_seed(3)
    first = call(compiled, inputs)
    assert not torch.equal(call(compiled, inputs), first)  # a new subset in every pass
    with attachment.force_keep(torch.ones(B, N)):
        assert worst_difference(call(compiled, inputs), dense) < 1e-6
    attachment.detach()
    assert torch.equal(call(compiled, inputs), dense)


def test_a_checkpointed_network_compiles_with_the_setting_that_the_error_names():
    case, network = NETWORKS["Flux"], copy.deepcopy(cached_network("Flux"))
    inputs = case.inputs(False)
    attachment = attach(network, ROUTES)
    network.enable_gradient_checkpointing(attachment.checkpoint)
    with pytest.raises(RuntimeError, match="set torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True"):
        run(torch.compile(network, backend="eager"), inputs)
    torch.compiler.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        output, grads = run(torch.compile(network, fullgraph=True, backend="eager"), inputs)
    windows = windows_of(attachment)
    attachment.detach()
    network.disable_gradient_checkpointing()
    with reference(network, case, windows):
        expected, expected_grads = run(network, inputs)
    assert worst_difference(output, expected) < 1e-5
    assert max(worst_difference(grads["_orig_mod." + key], expected_grads[key]) for key in expected_grads) < 1e-5


def test_blocks_that_are_compiled_one_by_one_are_routed():
    case = NETWORKS["Flux"]
    network = copy.deepcopy(cached_network("Flux"))
    inputs = case.inputs(False)
    attachment = attach(network, ROUTES)
    torch.manual_seed(3)
    output, grads = run(network, inputs)
    network.compile_repeated_blocks(fullgraph=True, backend="eager")
    for _ in range(2):
        torch.manual_seed(3)
        compiled_output, compiled_grads = run(network, inputs)
        assert worst_difference(compiled_output, output) < 1e-6
        assert max(worst_difference(compiled_grads[key], grads[key]) for key in grads) < 1e-6
    attachment.detach()


@pytest.mark.parametrize("name", ["Flux", "Wan", "SD3"])
def test_under_bfloat16_autocast_routing_means_the_same_and_dtypes_are_those_of_the_plain_network(name):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(False)
    dtypes = {"dense": [], "routed": []}
    now = ["dense"]
    hooks = [
        block.register_forward_hook(
            lambda module, args, output, i=i: dtypes[now[0]].append((output if i is None else output[i]).dtype)
        )
        for block, i in blocks_of(network, case)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        run(network, inputs)
        for hook in hooks:
            hook.remove()
        attachment = attach(network, ROUTES)
        now[0] = "routed"
        hooks = [
            block.register_forward_hook(
                lambda module, args, output, i=i: dtypes[now[0]].append((output if i is None else output[i]).dtype)
            )
            for block, i in blocks_of(network, case)
        ]
        output, grads = run(network, inputs)
        for hook in hooks:
            hook.remove()
        windows = windows_of(attachment)
        attachment.detach()
        with reference(network, case, windows):
            expected, expected_grads = run(network, inputs)
    assert dtypes["routed"] == dtypes["dense"]
    assert worst_difference(output.float(), expected.float()) < 0.05
    assert max(worst_difference(grads[key], expected_grads[key]) for key in grads) < 0.05


# ---- LoRA and int8 ---------------------------------------------------------------------------------------------------


def lora_config(*targets):
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=2, target_modules=list(targets), init_lora_weights=False)


def routed_equals_reference(network, case, inputs, attachment, tolerance=1e-5):
    output, grads = run(network, inputs)
    windows = windows_of(attachment)
    attachment.detach()
    with reference(network, case, windows):
        expected, expected_grads = run(network, inputs)
    assert worst_difference(output, expected) < tolerance
    assert grads.keys() == expected_grads.keys() and grads
    assert max(worst_difference(grads[key], expected_grads[key]) for key in grads) < tolerance
    return grads


def test_lora_adapters_of_diffusers_are_trained_fused_and_deleted_under_routes():
    pytest.importorskip("peft")
    case, network = NETWORKS["Flux"], randomized_network("Flux")
    inputs = case.inputs(False)
    attachment = attach(network, ROUTES)
    network.requires_grad_(False)
    # x_embedder is the module that counts the tokens; its replacement by a LoRA layer must not matter.
    network.add_adapter(lora_config("to_q", "to_k", "to_v", "proj_out", "x_embedder"))
    grads = routed_equals_reference(network, case, inputs, attachment)
    assert grads.keys() == {name for name, p in network.named_parameters() if "lora" in name}
    assert all(grad.abs().max() > 0 for grad in grads.values())

    attachment = attach(network, ROUTES, generator=seeded())
    with_lora = call(network, inputs)
    network.fuse_lora()
    attachment.generator = seeded()
    assert worst_difference(call(network, inputs), with_lora) < 1e-5
    network.unfuse_lora()
    network.delete_adapters("default")
    network.requires_grad_(True)
    routed_equals_reference(network, case, inputs, attachment)


def test_an_embedding_that_was_replaced_after_attaching_is_an_error_and_not_a_dense_pass():
    peft = pytest.importorskip("peft")
    case, network = NETWORKS["Flux"], randomized_network("Flux")
    inputs = case.inputs(False)
    dense = call(network.eval(), inputs)
    attachment = attach(network.train(), ROUTES)
    wrapped = peft.get_peft_model(
        network, peft.LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["x_embedder"], init_lora_weights=True)
    )
    with pytest.raises(RuntimeError, match=r"'x_embedder'.* did not run before.*detach\(\), and attach\(\) again"):
        call(wrapped, inputs)
    with torch.no_grad():
        assert torch.equal(call(wrapped, inputs), dense)  # what is dense anyway goes on
    attachment.detach()
    attached(network).detach()  # PEFT's copy of the embedding took the hooks along
    attachment = attach(wrapped, ROUTES)
    call(wrapped, inputs)
    assert attachment.statistics.num_kept == (8, 12)
    network = wrapped.unload().requires_grad_(True)  # the module that had the hook is gone
    with pytest.raises(RuntimeError, match="'x_embedder'.* did not run before"):
        call(network, inputs)
    with pytest.raises(ValueError, match="is routed already"):
        attach(network, ROUTES)
    attachment.detach()
    routed_equals_reference(network, case, inputs, attach(network, ROUTES))


@pytest.mark.parametrize("name", ["PixArt", "HunyuanDiT"])
def test_peft_models_are_routed_through_their_wrapper(name):
    peft = pytest.importorskip("peft")
    case, network = NETWORKS[name], randomized_network(name)
    inputs = case.inputs(case.padded_text)
    wrapped = peft.get_peft_model(network, lora_config("to_q", "to_v"))
    attachment = attach(wrapped, ROUTES)
    assert attached(wrapped) is attached(network) is attachment
    output, grads = run(wrapped, inputs)
    windows = windows_of(attachment)
    attachment.detach()
    with reference(network, case, windows, case.padded_text):
        expected, expected_grads = run(wrapped, inputs)
    assert worst_difference(output, expected) < 1e-5
    assert grads.keys() == expected_grads.keys() == {name for name, p in wrapped.named_parameters() if "lora" in name}


@pytest.mark.parametrize("name", ["Flux", "PixArt"])
def test_int8_weights_with_lora_on_top_are_routed(name):
    peft = pytest.importorskip("peft")
    quantization = pytest.importorskip("torchao.quantization")
    case, network = NETWORKS[name], randomized_network(name)
    inputs = case.inputs(False)
    blocks = blocks_of(network, case)
    before = call(network, inputs).detach()
    quantization.quantize_(torch.nn.ModuleList(block for block, _ in blocks), quantization.Int8WeightOnlyConfig())
    assert "Int8" in type(blocks[0][0].ff.net[2].weight).__name__
    assert 0 < worst_difference(call(network, inputs).detach(), before) < 0.1
    wrapped = peft.get_peft_model(network, lora_config("to_q", "to_v"))
    attachment = attach(wrapped, ROUTES)
    output, grads = run(wrapped, inputs)
    windows = windows_of(attachment)
    attachment.detach()
    with reference(network, case, windows):
        expected, expected_grads = run(wrapped, inputs)
    assert worst_difference(output, expected) < 1e-5
    assert grads.keys() == expected_grads.keys() == {name for name, p in wrapped.named_parameters() if "lora" in name}
    assert max(worst_difference(grads[key], expected_grads[key]) for key in grads) < 1e-5


# ---- copies, files, processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Flux", "ZImage", "DiT"])
def test_a_copy_has_routes_of_its_own_and_an_evaluation_copy_is_never_routed(name):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(False)
    dense = call(network, inputs)
    attachment = attach(network, ROUTES, generator=seeded())
    call(network, inputs)
    ema = copy.deepcopy(network).eval().requires_grad_(False)
    with attachment.routed(0.5):  # of the original, also while it is training
        assert worst_difference(call(ema, inputs), dense) < 1e-6
    run(network, inputs)
    assert worst_difference(call(ema, inputs), dense) < 1e-6
    own = attached(ema)
    assert own is not attachment and own.statistics is None
    with own.routed(0.5):
        assert worst_difference(call(ema, inputs), dense) > 1e-3
    own.detach()
    assert attached(ema) is None and attached(network) is attachment
    assert worst_difference(call(network, inputs), dense) > 1e-3
    trained = copy.deepcopy(network)  # a copy in training mode is routed, by itself
    call(trained, inputs)
    assert attached(trained).statistics is not None
    attachment.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_routes_leave_no_trace_in_state_dicts_and_files(tmp_path):
    from diffusers import PixArtTransformer2DModel

    case, network = NETWORKS["PixArt"], randomized_network("PixArt")
    inputs = case.inputs(False)
    keys, dense = list(network.state_dict()), call(network.eval(), inputs)
    attachment = attach(network.train(), ROUTES, generator=seeded())
    run(network, inputs)
    assert list(network.state_dict()) == keys
    network.save_pretrained(tmp_path)
    loaded = PixArtTransformer2DModel.from_pretrained(tmp_path).train()
    assert attached(loaded) is None and torch.equal(call(loaded, inputs), dense)
    network.load_state_dict(loaded.state_dict(), strict=True)
    assert attached(network) is attachment

    file = io.BytesIO()
    torch.save(network, file)  # the module itself, hooks included
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    call(pickled, inputs)
    assert attached(pickled).statistics.num_kept == (8, 12)


def train_in_one_of_two_processes(rank, init_file, results):
    """One step of DDP on this rank's sample; the gradients go to rank's file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    network = randomized_network("DiT")
    parallel = torch.nn.parallel.DistributedDataParallel(network)
    attachment = attach(parallel, ROUTES, generator=seeded(rank))
    inputs = {key: value[rank : rank + 1] for key, value in NETWORKS["DiT"].inputs(False).items()}
    _, grads = run(parallel, inputs)
    torch.save({"grads": grads, "ids_keep": attachment.ids_keep}, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_of_ddp_average_the_gradients_of_their_own_subsets(tmp_path):
    torch.multiprocessing.spawn(train_in_one_of_two_processes, (str(tmp_path / "init"), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert not torch.equal(ranks[0]["ids_keep"][0], ranks[1]["ids_keep"][0])
    case, network, expected = NETWORKS["DiT"], randomized_network("DiT"), []
    for rank in range(2):
        inputs = {key: value[rank : rank + 1] for key, value in case.inputs(False).items()}
        attachment = attach(network, ROUTES, generator=seeded(rank))
        expected.append(run(network, inputs)[1])
        attachment.detach()
    for key in expected[0]:
        mean = (expected[0][key] + expected[1][key]) / 2
        for rank in ranks:
            assert worst_difference(rank["grads"]["module." + key], mean) < 1e-6
