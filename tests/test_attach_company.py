"""Routed networks with other tools: gradient checkpointing, compilation, autocast, LoRA, int8, DDP, copies, files."""

import copy

import peft
import pytest
import torch
import torch._dynamo
from networks import NETWORKS, B, N, blocks_of, build, call, difference, generator, normal, reference_error, run
from torch.utils.checkpoint import checkpoint

from extras.attach import attach, attached
from routing_module import Route

ROUTES = [Route(0.5, 1, 1), Route(0.25, 2, 3)]
TOLERANCE = 1e-5  # as in test_attach.py


def two_passes(network, first, second):
    """Return (outputs, gradients) of two routed passes with one backward pass at the end. A dense pass follows each of them."""
    outputs = []
    for inputs in (first, second):
        outputs.append(call(network, inputs))
        with torch.no_grad():
            call(network, inputs)
    sum((i + 1) * (output * normal(*output.shape, seed=9)).mean() for i, output in enumerate(outputs)).backward()
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return torch.cat(outputs).detach(), grads


@pytest.mark.parametrize("name", ["Flux", "Flux2"])
def test_two_checkpointed_passes_before_one_backward_recompute_each_with_its_own_subset(name):
    case, network, selection = NETWORKS[name], build(name), "importance" if name == "Flux2" else "uniform"
    results = []
    for checkpointed in (False, True):
        attachment = attach(network, ROUTES, selection=selection, generator=generator(5))
        if checkpointed:
            network.enable_gradient_checkpointing(attachment.checkpoint)
        results.append(two_passes(network, case.inputs(True), case.inputs(False)))
        for block, _ in blocks_of(network, case):  # recomputation may stop in the middle of a block
            assert all(hook.__self__.saved is None for hook in block._forward_hooks.values())
        attachment.detach()
    assert difference(results[1], results[0]) < TOLERANCE


def test_a_checkpoint_around_the_whole_network_routes_the_subset_of_its_own_pass():
    case, network = NETWORKS["PixArt"], build("PixArt")
    x, results = case.inputs(False)["hidden_states"], []
    for checkpointed in (False, True):
        attachment = attach(network, ROUTES, selection="importance", generator=generator(5))
        with torch.no_grad():
            call(network.eval(), case.inputs(False))  # the plan of this pass is dense
        network.train()
        outputs, kept = [], []
        for scale in (1, 2):
            args = (lambda x: call(network, case.inputs(False) | {"hidden_states": x}), scale * x)
            outputs.append(attachment.checkpoint(*args) if checkpointed else args[0](args[1]))
            kept.append(attachment.ids_keep)
        sum((i + 1) * output.square().mean() for i, output in enumerate(outputs)).backward()
        grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        network.zero_grad(set_to_none=True)
        results.append((torch.cat(outputs).detach(), grads, kept))
        attachment.detach()
    assert difference(results[1][:2], results[0][:2]) < TOLERANCE
    assert all(torch.equal(a, b) for one, two in zip(results[0][2], results[1][2]) for a, b in zip(one, two))


def test_an_embedding_in_another_mode_than_the_network_does_not_decide_whether_it_routes():
    network, inputs = build("Flux").eval(), NETWORKS["Flux"].inputs(False)
    network.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "x_embedder"]))
    dense, attachment = call(network, inputs), attach(network, ROUTES)
    assert network.x_embedder.training  # as peft's layers are at first
    assert torch.equal(call(network, inputs), dense) and attachment.ids_keep == (None, None)
    call(network.train(), inputs)
    assert None not in attachment.ids_keep


def test_dropout_of_a_checkpointed_pass_is_the_same_when_it_is_recomputed():
    network, inputs = build("diffusers DiT", dropout=0.3), NETWORKS["diffusers DiT"].inputs(False)
    attachment = attach(network, ROUTES, selection="importance")
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            network.enable_gradient_checkpointing(attachment.checkpoint)
        torch.manual_seed(7)
        results.append(run(network, inputs))
    assert difference(results[1], results[0]) < TOLERANCE
    expected = run(network.eval(), inputs)
    attachment.detach()
    assert difference(run(network, inputs), expected) == 0  # in evaluation mode, a checkpointed pass stays dense


def test_other_checkpoint_functions_are_an_error_and_not_a_wrong_gradient():
    network, inputs = build("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment = attach(network, ROUTES)
    with pytest.raises(RuntimeError, match="recomputes block 1; checkpoint blocks with attachment.checkpoint"):
        checkpoint(call, network, inputs, use_reentrant=False).mean().backward()
    network.enable_gradient_checkpointing()
    with pytest.raises(RuntimeError, match="recomputes block 3; checkpoint blocks with attachment.checkpoint"):
        call(network, inputs).mean().backward()
    network.enable_gradient_checkpointing(attachment.checkpoint)
    # Offloaded activations return at another memory address.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        call(network, inputs).mean().backward()


# Tracing a block takes seconds, so the networks have two blocks.
BOTH = [Route(0.5, 0, 1)]


def test_a_routed_network_compiles_without_a_break_in_its_graph():
    network, inputs = build("DiT", depth=2), NETWORKS["DiT"].inputs(False)
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    dense = call(compiled, inputs)
    attachment = attach(compiled, BOTH, selection="importance")  # also takes effect after the first compiled call
    results = []
    for called in (network, compiled):
        torch.manual_seed(3)
        results.append(run(called, inputs))
    assert difference(*results) < TOLERANCE < difference(results[0][0], dense)
    assert not torch.equal(call(compiled, inputs), results[1][0])  # a new subset in every pass
    attachment.detach()
    assert torch.equal(call(compiled, inputs), dense)


def test_checkpointed_and_single_blocks_compile():
    network, inputs = build("Flux", num_layers=1, num_single_layers=1), NETWORKS["Flux"].inputs(False)
    attachment = attach(network, BOTH)
    torch.manual_seed(3)
    expected = run(network, inputs)
    network.enable_gradient_checkpointing(attachment.checkpoint)
    torch.manual_seed(3)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        assert difference(run(torch.compile(network, fullgraph=True, backend="eager"), inputs), expected) < TOLERANCE
    network.disable_gradient_checkpointing()
    torch.manual_seed(3)
    passes = two_passes(network, inputs, inputs)
    network.compile_repeated_blocks(fullgraph=True, backend="eager")
    for _ in range(2):
        torch.manual_seed(3)
        assert difference(run(network, inputs), expected) < TOLERANCE
    network.enable_gradient_checkpointing(attachment.checkpoint)  # around blocks that are compiled
    torch.manual_seed(3)
    assert difference(two_passes(network, inputs, inputs), passes) < TOLERANCE


def test_a_compiled_network_takes_batches_of_several_sizes():
    network, inputs = build("DiT", depth=2), NETWORKS["DiT"].inputs(False)
    attach(network, BOTH)
    compiled = torch.compile(network, backend="eager")
    for size in (3, 2, 1):
        fewer = {name: x[:size] if isinstance(x, torch.Tensor) and len(x) == B else x for name, x in inputs.items()}
        torch.manual_seed(3)
        expected = call(network, fewer)
        torch.manual_seed(3)
        assert torch.allclose(call(compiled, fewer), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["Flux", "Wan"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Flux's own RMSNorm
def test_under_bfloat16_autocast_routing_gives_the_same_result_and_the_dtypes_of_the_plain_network(name):
    case, network = NETWORKS[name], build(name)
    inputs, dtypes = case.inputs(False), []
    attachment = attach(network, ROUTES)
    for block, i in blocks_of(network, case):
        block.register_forward_hook(lambda module, args, output, i=i: dtypes.append((output if i is None else output[i]).dtype))
    with torch.autocast("cpu", torch.bfloat16):
        for ratio in (0.0, 0.5):
            with attachment.routed(ratio):
                call(network, inputs)
        assert dtypes[:4] == dtypes[4:]
        assert reference_error(network, case, inputs, attachment) < 0.05  # bfloat16 has 8 bits of precision


def lora_config(*targets, **settings):
    return peft.LoraConfig(r=2, lora_alpha=2, target_modules=list(targets), init_lora_weights=False, **settings)


def test_lora_adapters_of_diffusers_are_trained_fused_and_deleted_under_routes():
    case, network = NETWORKS["Flux"], build("Flux")
    inputs = case.inputs(False)
    attachment = attach(network, ROUTES)
    network.requires_grad_(False)
    # The attachment counts tokens at x_embedder. LoRA replaces this layer, which must not matter.
    network.add_adapter(lora_config("to_q", "to_k", "to_v", "proj_out", "x_embedder"))
    _, grads = run(network, inputs)
    assert grads.keys() == {name for name, p in network.named_parameters() if "lora" in name}
    assert all(grad.abs().max() > 0 for grad in grads.values())
    assert reference_error(network, case, inputs, attachment) < TOLERANCE

    attachment = attach(network, ROUTES, generator=generator(5))
    with_lora = call(network, inputs)
    network.fuse_lora()
    attachment.generator = generator(5)
    assert difference(call(network, inputs), with_lora) < TOLERANCE
    network.unfuse_lora()
    network.delete_adapters("default")
    assert reference_error(network.requires_grad_(True), case, inputs, attachment) < TOLERANCE


def test_an_embedding_that_was_replaced_after_attaching_is_an_error_and_not_a_stale_subset():
    network, inputs = build("Flux"), NETWORKS["Flux"].inputs(False)
    wrapped = peft.get_peft_model(network, lora_config("to_q", modules_to_save=["x_embedder"]))
    attachment = attach(wrapped, ROUTES)
    call(wrapped, inputs)
    network = wrapped.unload()  # the module that had the hook is gone
    with pytest.raises(RuntimeError, match="'x_embedder' did not run before it"):
        call(network, inputs)
    attachment.detach()
    attach(network, ROUTES)
    call(network, inputs)


@pytest.mark.parametrize(("name", "int8"), [("PixArt", False), ("PixArt", True), ("Flux", True)])
def test_peft_models_with_and_without_int8_weights_are_routed_through_their_wrapper(name, int8):
    case, network = NETWORKS[name], build(name)
    inputs = case.inputs(False)
    if int8:
        from torchao.quantization.quant_api import Int8WeightOnlyConfig, quantize_  # slow to import

        blocks = torch.nn.ModuleList(block for block, _ in blocks_of(network, case))
        quantize_(blocks, Int8WeightOnlyConfig())
    wrapped = peft.get_peft_model(network, lora_config("to_q", "to_v"))
    attachment = attach(wrapped, ROUTES)
    assert attached(wrapped) is attached(network) is attachment
    assert run(wrapped, inputs)[1].keys() == {name for name, p in wrapped.named_parameters() if "lora" in name}
    assert reference_error(wrapped, case, inputs, attachment) < TOLERANCE


def test_ddp_is_routed_through_its_wrapper(tmp_path):
    network, inputs = build("DiT"), NETWORKS["DiT"].inputs(False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(network)
        assert reference_error(parallel, NETWORKS["DiT"], inputs, attach(parallel, ROUTES)) < TOLERANCE
    finally:
        torch.distributed.destroy_process_group()


def test_a_copy_has_routes_of_its_own_and_an_evaluation_copy_is_never_routed():
    network, inputs = build("ZImage"), NETWORKS["ZImage"].inputs(False)
    dense = call(network, inputs)
    attachment = attach(network, ROUTES, generator=generator(5))
    call(network, inputs)
    ema = copy.deepcopy(network).eval().requires_grad_(False)
    with attachment.routed(0.5):  # the original's, also while it is training
        assert difference(call(ema, inputs), dense) < TOLERANCE
    own = attached(ema)
    assert own is not attachment
    with own.routed(0.5):
        assert difference(call(ema, inputs), dense) > 1e-3
    assert attached(network) is attachment


def test_routes_change_no_state_dict_and_no_saved_file(tmp_path):
    from diffusers import PixArtTransformer2DModel

    network, inputs = build("PixArt"), NETWORKS["PixArt"].inputs(False)
    keys, dense = network.state_dict().keys(), call(network, inputs)
    attach(network, ROUTES, generator=generator(5))
    assert network.state_dict().keys() == keys
    network.save_pretrained(tmp_path)
    loaded = PixArtTransformer2DModel.from_pretrained(tmp_path).train()
    assert attached(loaded) is None and torch.equal(call(loaded, inputs), dense)

    torch.save(network, tmp_path / "network.pt")  # the whole module with its hooks
    pickled = torch.load(tmp_path / "network.pt", weights_only=False)
    call(pickled, inputs)
    assert [ids.shape for ids in attached(pickled).ids_keep] == [(B, N // 2), (B, N * 3 // 4)]
