"""Fast networks against the plain one: the same values and gradients; and what asks for more than the machine has."""

import copy
import logging
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import dit
from evaluations.metrics import full_float32
from extras.lightningdit import LightningDiT
from routing_module import Route
from training import machine, speed
from training.machine import allow_tf32
from training.speed import (
    attention_kernel,
    check_compile,
    check_machine,
    checkpoint_activations,
    compile_network,
    resolve_compile,
    use_float8,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[dit.DiT, LightningDiT])
def net(request):
    torch.manual_seed(0)
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=6, width=48, num_heads=3)
    net = request.param(**settings, routes=[Route(0.5, 1, 3)], init="official_tread")
    return net.train()


def outputs_and_gradients(net, seed=0, tap=None):
    """With `tap`, the tokens there are part of the output."""
    g = torch.Generator().manual_seed(seed)
    x, t, y = torch.randn(2, 3, 8, 8, generator=g), torch.randn(2, generator=g), torch.arange(2)
    drop, scores = torch.tensor([True, False]), torch.rand(2, 1, 16, generator=g)
    out = net(x, t, y, drop_labels=drop, route_scores=scores, tap=tap)
    if tap is not None:
        assert tap not in (2, 3, 4) or torch.equal(out[2], scores[:, 0].topk(8).indices.sort().values)
        out = torch.cat([part.flatten() for part in out[:2]])
    return [out, *torch.autograd.grad(out.square().sum(), [p for p in net.parameters() if p.requires_grad])]


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_checkpointing_changes_no_bit_and_computes_blocks_again(net, what):
    plain = outputs_and_gradients(net)
    names, calls = list(net.state_dict()), []
    for block in net.blocks:
        block.mlp.register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations(net, what)
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_gradients(net), plain))
    assert len(calls) == 2 * len(net.blocks)
    assert list(net.state_dict()) == names


def test_without_checkpointing_nothing_is_computed_twice(net):
    calls = []
    net.blocks[0].mlp.register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations(net, "none")
    outputs_and_gradients(net)
    assert calls == [1]


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that torch.compile makes from now on, which run as they are: nothing is generated, which would take long."""
    made = []

    def keep(graph, inputs):
        made.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    with torch._dynamo.config.patch():  # what compile_network sets there ends with the test
        yield made


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_compiled_blocks_agree_with_plain_ones_and_are_compiled_once(net, checkpointing):
    plain = [outputs_and_gradients(net, seed) for seed in range(3)]
    fast = copy.deepcopy(net)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_network(fast, "blocks")
    checkpoint_activations(fast, checkpointing)
    compiled = [outputs_and_gradients(fast, 0)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled += [outputs_and_gradients(fast, seed) for seed in (1, 2)]
    for got, expected in zip(compiled, plain):
        for a, b in zip(got, expected):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    # Dense, dense without a gradient for its input, and routed: not once for every block.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert list(fast.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("checkpointing", ["none", "blocks", "selective"])
def test_compiled_segments_agree_with_plain_blocks_and_end_where_routes_do(net, graphs, checkpointing):
    plain = outputs_and_gradients(net)
    fast = copy.deepcopy(net)
    compile_network(fast, "segments")
    checkpoint_activations(fast, checkpointing)
    for a, b in zip(outputs_and_gradients(fast), plain):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    # Blocks 1 to 3, which are routed, together; blocks 0, 4 and 5 alone, all by one graph. Block 4 may differ in precision.
    # With checkpointing, each block has a function of its own.
    assert len(graphs) == (2 if checkpointing == "none" else 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        outputs_and_gradients(fast, 1)


@pytest.mark.parametrize("tap", [1, 3, 4])  # before the route, inside of it, at its end
@pytest.mark.parametrize("mode", ["blocks", "segments", "default"])
def test_a_compiled_network_hands_out_the_tokens_that_a_plain_one_does(net, graphs, mode, tap):
    plain = outputs_and_gradients(net, tap=tap)
    fast = copy.deepcopy(net)
    compile_network(fast, mode)
    checkpoint_activations(fast, "none")
    for a, b in zip(outputs_and_gradients(fast, tap=tap), plain):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    assert graphs


@pytest.mark.parametrize("what", ["blocks", "segments"])
def test_ddp_does_not_cut_what_is_compiled(graphs, what):
    # Two buckets of 1 MiB, the least that DDP's optimizer takes, in each block.
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=6, width=192, num_heads=2)
    net = dit.DiT(**settings, routes=[Route(0.5, 1, 3)]).train()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:

        def count_graphs(cut):
            torch.compiler.reset()
            graphs.clear()
            fast = copy.deepcopy(net)
            compile_network(fast, what)
            if cut:
                torch._dynamo.config.optimize_ddp = True
            outputs_and_gradients(DistributedDataParallel(fast, bucket_cap_mb=1, find_unused_parameters=True))
            return len(graphs)

        assert count_graphs(cut=False) == 2  # dense and routed
        assert count_graphs(cut=True) > 2  # so that the test would see it
    finally:
        distributed.destroy_process_group()


def test_a_network_compiled_as_a_whole_is_cut_by_ddp_so_that_communication_overlaps(net, graphs):
    with torch._dynamo.config.patch(optimize_ddp=True):
        compile_network(copy.deepcopy(net), "blocks")  # as the EMA for grids
        compile_network(net, "default")
        assert torch._dynamo.config.optimize_ddp


# ----------------------------------------------------------------------------------------------------------------------
# Attention kernels.


def attention_calls(net, kernel):
    with profile() as profiler, attention_kernel(kernel):
        results = outputs_and_gradients(net)
    return results, {e.key for e in profiler.key_averages() if "_scaled_dot_product" in e.key and "backward" not in e.key}


def test_the_kernel_that_is_named_is_used_and_computes_the_same(net):
    plain, default = attention_calls(net, "auto")
    assert default == {"aten::_scaled_dot_product_flash_attention_for_cpu"}
    for kernel, operation in (("math", "aten::_scaled_dot_product_attention_math"), ("flash", *default)):
        results, used = attention_calls(net, kernel)
        assert used == {operation}
        for a, b in zip(results, plain):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


def test_a_kernel_that_the_tensors_do_not_fit_gives_way(net):
    # As flash attention does to the float32 block after a route on a GPU: an order of preference, not a demand.
    results, used = attention_calls(net, "cudnn")
    assert len(used) == 1
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, outputs_and_gradients(net)))


# ----------------------------------------------------------------------------------------------------------------------
# Precision.


def relative_errors(net, expected):
    """Of the output, and of all gradients as one vector."""
    got = outputs_and_gradients(net)
    pairs = [(got[0], expected[0]), tuple(torch.cat([g.flatten().float() for g in side[1:]]) for side in (got, expected))]
    return [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]


def test_bfloat16_and_float8_are_as_wrong_as_their_digits_allow(net):
    expected = outputs_and_gradients(net)
    fast = copy.deepcopy(net)
    use_float8(fast, emulate=True)
    with torch.autocast("cpu", torch.bfloat16):
        bf16 = relative_errors(net, expected)
    fp8 = relative_errors(fast, expected)
    # bfloat16 keeps 8 bits (a relative rounding of 2^-9 = 0.2%), float8 E4M3 4 bits (2^-5 = 3%); sums average it out.
    assert all(1e-5 < error < 0.01 for error in bf16)
    assert all(1e-5 < error < 0.05 for error in fp8)
    assert fp8[1] > bf16[1]


def test_float8_from_bfloat16_weights_is_as_exact(net, monkeypatch):
    """As FSDP gathers them. torchao asks for CUDA's autocast alone."""
    monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.bfloat16)
    expected, fast = outputs_and_gradients(net), copy.deepcopy(net)
    use_float8(fast, emulate=True)
    rounded = copy.deepcopy(fast)
    for i, block in enumerate(rounded.blocks):
        if i not in net.fp32_layers:
            block.bfloat16()
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            errors, errors_rounded = relative_errors(fast, expected), relative_errors(rounded, expected)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert errors_rounded == pytest.approx(errors, rel=0.2)


def test_float8_changes_no_name_and_leaves_the_float32_block_and_the_modulation(net):
    fast = copy.deepcopy(net)
    use_float8(fast, emulate=True)
    assert fast.fp32_layers == {4}
    in_float8 = {name for name, module in fast.named_modules() if type(module).__name__ == "Float8Linear"}
    layers = ("attn.qkv", "attn.proj", *(("mlp.w12", "mlp.w3") if isinstance(net, LightningDiT) else ("mlp.fc1", "mlp.fc2")))
    assert in_float8 == {f"blocks.{i}.{layer}" for i in (0, 1, 2, 3, 5) for layer in layers}
    net.load_state_dict(fast.state_dict(), strict=True)
    assert all(g.isfinite().all() and g.any() for g in outputs_and_gradients(fast))


def test_float8_leaves_layers_whose_sides_are_no_multiples_of_16():
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=1, width=64, num_heads=2)
    net = LightningDiT(**settings)  # its MLP is int(2/3 x 256) = 170 wide
    use_float8(net, emulate=True)
    names = {name for name, module in net.blocks[0].named_modules() if type(module).__name__ == "Float8Linear"}
    assert names == {"attn.qkv", "attn.proj"}


@pytest.fixture
def tf32_state():
    """() -> what each of torch's interfaces says of TF32; as it was after the test."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def state():
        products = (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)
        convolutions = (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32)
        return (*products, torch.backends.cuda.matmul.fp32_precision, *convolutions)

    yield state
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


def test_tf32_is_allowed_and_forbidden_so_that_all_interfaces_of_torch_agree(tf32_state):
    # Some of them raise where they do not, and torch's compiler reads several.
    allow_tf32(GPU, True)
    assert tf32_state() == ("high", True, "tf32", "tf32", True)
    allow_tf32(GPU, False)
    assert tf32_state()[:3] == ("highest", False, "ieee")
    assert tf32_state()[3] != "tf32" and tf32_state()[4] is False


def test_a_cpu_keeps_its_settings(tf32_state):
    before = tf32_state()
    allow_tf32(CPU, True)
    assert tf32_state() == before


def test_evaluations_compute_in_full_float32_although_tf32_is_allowed(tf32_state):
    allow_tf32(GPU, True)
    allowed = tf32_state()
    with full_float32():
        assert tf32_state()[:3] == ("highest", False, "ieee")
        assert tf32_state()[3] != "tf32" and tf32_state()[4] is False
    assert tf32_state() == allowed


# ----------------------------------------------------------------------------------------------------------------------
# What the machine lacks.


def train_keys(**changes):
    return OmegaConf.create({"precision": "fp32", "attention": "auto", "compile": "none", "grad_accum_steps": 1} | changes)


def test_auto_compiles_blocks_on_a_gpu_and_nothing_on_a_cpu():
    assert resolve_compile("auto", GPU) == check_compile("compile", "auto", GPU) == "blocks"
    assert resolve_compile("auto", CPU) == check_compile("compile", "auto", CPU) == "none"
    for mode in ("none", "segments", "max-autotune-no-cudagraphs"):
        assert {resolve_compile(mode, device) for device in (CPU, GPU)} == {check_compile("compile", mode, CPU)} == {mode}


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda m: m.setattr(speed.importlib.util, "find_spec", lambda name: None), "triton, .*pip install triton"),
        (lambda m: m.setattr(speed.shutil, "which", lambda name: None), "a C compiler, .*install gcc"),
        (lambda m: m.setattr(speed.sysconfig, "get_path", lambda *_: "/nowhere"), r"Python's C headers, .*gcc does not find"),
        (lambda m: m.setenv("CC", "/nowhere/cc"), "Python's C headers, which /nowhere/cc does not find"),
    ],
)  # fmt: skip
def test_without_triton_or_its_compiler_auto_compiles_nothing_and_a_mode_is_refused(monkeypatch, caplog, prepare, words):
    monkeypatch.delenv("CC", raising=False)
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    prepare(monkeypatch)
    speed._missing_for_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert check_compile("train.compile", "auto", GPU) == resolve_compile("auto", GPU) == "none"
        assert "train.compile=auto compiles nothing" in caplog.text
        with pytest.raises(ValueError, match=rf"train.compile=blocks on a GPU needs {words}.*, or use train.compile=none"):
            check_compile("train.compile", "blocks", GPU)
        check_compile("train.compile", "none", GPU)
    finally:
        speed._missing_for_triton.cache_clear()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_with_micro_batches(net, mode):
    message = rf"train.compile={mode} records CUDA graphs, .*grad_accum_steps=2; use train.compile=max-autotune-no-cudagraphs"
    with pytest.raises(ValueError, match=message):
        check_machine(train_keys(compile=mode, grad_accum_steps=2), net, GPU)
    check_machine(train_keys(compile=mode), net, GPU)
    check_machine(train_keys(compile="max-autotune-no-cudagraphs", grad_accum_steps=2), net, GPU)
    check_machine(train_keys(compile="max-autotune", grad_accum_steps=2), net, CPU)  # which has no CUDA graphs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8", "compile": "blocks"}, r"precision=fp8 needs a GPU .* 8\.9 .* the cpu, which has fp32 and bf16"),
        ({"attention": "cudnn"}, r"attention=cudnn is not there .* on the cpu, which has flash, math; .* train.attention=auto"),
        ({"compile": "reduce-overhead"}, r"compile=reduce-overhead records CUDA graphs, .* on the cpu; use blocks"),
    ],
)  # fmt: skip
def test_what_a_cpu_lacks_is_said_at_the_start(net, changes, message):
    with pytest.raises(ValueError, match=message):
        check_machine(train_keys(**changes), net, CPU)


def test_what_a_cpu_has_is_accepted(net):
    for changes in ({}, {"precision": "bf16"}, {"attention": "math"}, {"compile": "blocks"}, {"compile": "max-autotune"}):
        check_machine(train_keys(**changes), net, CPU)


def test_compilation_without_a_compiler_is_refused(net, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(ValueError, match=r"train.compile=blocks on a CPU needs a C\+\+ compiler.*install g\+\+"):
        check_machine(train_keys(compile="blocks"), net, CPU)


@pytest.mark.parametrize(
    ("capability", "has_bf16", "changes", "message"),
    [
        ((7, 5), False, {"precision": "bf16"}, r"precision=bf16: Some GPU \(compute .* 7.5\) has no bfloat16; .*=fp32"),
        ((8, 0), True, {"precision": "fp8", "compile": "blocks"}, r"fp8 needs a GPU .*Some GPU \(compute capability 8.0\)"),
        ((9, 0), True, {"precision": "fp8"}, r"fp8 is slower than bf16 unless .*add train.compile=blocks"),
        ((9, 0), True, {"precision": "fp8", "compile": "blocks"}, None),
        ((9, 0), True, {"precision": "fp8", "compile": "auto"}, None),
    ],
)  # fmt: skip
def test_what_a_gpu_lacks_is_said_at_the_start(net, monkeypatch, capability, has_bf16, changes, message):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    if message is None:
        check_machine(train_keys(**changes), net, GPU)
        return
    with pytest.raises(ValueError, match=message):
        check_machine(train_keys(**changes), net, GPU)


def test_float8_without_torchao_names_the_package(net, monkeypatch):
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None if name == "torchao" else object())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="pip install torchao"):
        check_machine(train_keys(precision="fp8", compile="blocks"), net, GPU)


def test_a_process_with_a_gpu_uses_its_share_of_the_cores_too(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    try:
        torch.set_num_threads(1)  # as under accelerate launch
        machine.use_cores(torch.device("cuda"), 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
