"""Fast networks give the values and gradients of plain ones. Settings that the machine does not support are refused."""

import copy
import importlib
import logging
import os
from functools import partial

import pytest
import torch
from conftest import REPOSITORY, checked, losses, run_script, run_train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import dit
from common.errors import UserError
from evaluations.metrics import full_float32
from extras.alignment import ObservedNetwork
from extras.lightningdit import LightningDiT
from routing_module import Route
from runtime import compilation, launch_checks, machine
from runtime.compilation import check_compile_mode, check_machine, checkpoint_activations, compile_network, resolve_compile
from runtime.machine import choose_kernels
from training.stop import LAUNCHER_VARIABLES
from training.trainer import Trainer


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("runs"), "run", "train.num_steps=1", "machine.tf32=false")


@pytest.mark.parametrize("tf32", [True, False])
def test_training_passes_tf32_on(tf32, monkeypatch):
    given = []

    def stop(*args, **kwargs):
        given.append(kwargs["tf32"])
        raise UserError("stop")

    monkeypatch.setattr(machine, "start_accelerator", stop)
    with pytest.raises(UserError, match="stop"):
        importlib.import_module("train").main(checked([f"machine.tf32={tf32}"]))
    assert given == [tf32]


@pytest.mark.parametrize("name", ["fid", "sample"])
@pytest.mark.parametrize(("typed", "expected"), [([], False), (["machine.tf32=true", "machine.cpu_threads=2"], True)])
def test_the_other_commands_use_tf32_as_the_run_unless_they_set_it(exact_run, name, typed, expected, monkeypatch):
    given, use = [], machine.apply_machine_settings

    def stop(settings, device):
        monkeypatch.setattr(machine, "choose_kernels", lambda device, tf32: given.append((tf32, torch.get_num_threads())))
        use(settings, GPU)
        raise UserError("stop")

    monkeypatch.setattr(machine, "apply_machine_settings", stop)
    num_threads = torch.get_num_threads()
    with pytest.raises(UserError, match="stop"):
        run_script(name, f"checkpoint={exact_run}", *typed)
    torch.set_num_threads(num_threads)
    assert given == [(expected, 2 if typed else 1)]  # TINY trains with one thread


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[dit.DiT, LightningDiT])
def net(request):
    torch.manual_seed(0)
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=6, width=48, num_heads=3)
    net = request.param(**settings, routes=[Route(0.5, 1, 3)], init="official_tread")
    return net.train()


def outputs_and_gradients(net, seed=0, block=None):
    """Return the output, the tokens of a block if one is given, and the gradients of a loss of both."""
    g = torch.Generator().manual_seed(seed)
    x, t, y = torch.randn(2, 3, 8, 8, generator=g), torch.randn(2, generator=g), torch.arange(2)
    drop, scores = torch.tensor([True, False]), torch.rand(2, 1, 16, generator=g)
    observed = ObservedNetwork(net, block)
    out = [observed(x, t, y, drop_labels=drop, route_noise=scores)]
    out += [observed.tokens] if block else []
    loss = sum(tensor.square().sum() for tensor in out)
    return out + list(torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad]))


def test_checkpointing_changes_no_bit_and_recomputes_blocks(net):
    plain = outputs_and_gradients(net)
    names, calls = list(net.state_dict()), []
    for block in net.blocks:
        block.mlp.register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations(net, "none")
    outputs_and_gradients(net)
    assert len(calls) == len(net.blocks)
    calls.clear()
    checkpoint_activations(net, "blocks")
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_gradients(net), plain))
    assert len(calls) == 2 * len(net.blocks) and list(net.state_dict()) == names


@pytest.fixture
def graphs(monkeypatch):
    """Fixture: a list of the graphs that torch.compile captures. They run without code generation, which would take long."""
    made = []

    def keep(graph, inputs):
        made.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    with torch._dynamo.config.patch():  # restores the settings of compile_network after the test
        yield made


# The block whose tokens are observed: before the window, inside it, and at its end.
@pytest.mark.parametrize(("checkpointing", "block"), [("none", 1), ("blocks", 3), ("none", 4)])
def test_compiled_blocks_agree_with_plain_ones_and_are_compiled_once(net, graphs, checkpointing, block):
    plain = [outputs_and_gradients(net, seed, block) for seed in range(3)]
    fast = copy.deepcopy(net)
    checkpoint_activations(fast, checkpointing)
    compile_network(fast, "blocks")
    compiled = [outputs_and_gradients(fast, 0, block)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled += [outputs_and_gradients(fast, seed, block) for seed in (1, 2)]
    for got, expected in zip(compiled, plain):
        for a, b in zip(got, expected):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    # Three graphs, not one per block: dense, dense without a gradient for its input, and routed.
    assert 0 < len(graphs) <= 3
    assert list(fast.state_dict()) == list(net.state_dict())


def test_ddp_does_not_cut_blocks(graphs):
    # Each block fills two buckets of 1 MiB, the minimum of DDP's optimizer.
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=6, width=192, num_heads=2)
    net = dit.DiT(**settings, routes=[Route(0.5, 1, 3)]).train()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:

        def count_graphs(cut):
            torch.compiler.reset()
            graphs.clear()
            fast = copy.deepcopy(net)
            compile_network(fast, "blocks")
            if cut:
                torch._dynamo.config.optimize_ddp = True
            outputs_and_gradients(DistributedDataParallel(fast, bucket_cap_mb=1, find_unused_parameters=True))
            return len(graphs)

        assert count_graphs(cut=False) == 2  # dense and routed
        assert count_graphs(cut=True) > 2  # the test can detect a cut
    finally:
        distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# TF32 and attention.


@pytest.fixture
def tf32_state():
    """Fixture: a function that returns what torch's interfaces report. Settings are restored after the test."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def state():
        products = (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)
        # torch replaces the module by an object with the attribute `conv`.
        convolution = torch.backends.cudnn.conv.fp32_precision  # ty: ignore[missing-attribute]
        convolutions = (convolution, torch.backends.cudnn.allow_tf32)
        return (*products, torch.backends.cuda.matmul.fp32_precision, *convolutions)

    yield state
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.compiler.config.cache_key_tag = ""


def test_all_interfaces_of_torch_agree_after_tf32_is_allowed_or_forbidden(tf32_state):
    before = tf32_state()
    choose_kernels(CPU, True)
    assert tf32_state() == before  # a CPU keeps its settings
    # Some interfaces raise if the others disagree, and torch's compiler reads several.
    choose_kernels(GPU, True)
    assert tf32_state() == ("high", True, "tf32", "tf32", True)
    with full_float32():  # evaluations
        assert tf32_state()[:3] == ("highest", False, "ieee") and tf32_state()[4] is False
    assert tf32_state() == ("high", True, "tf32", "tf32", True)
    choose_kernels(GPU, False)
    assert tf32_state()[:3] == ("highest", False, "ieee")
    assert tf32_state()[3] != "tf32" and tf32_state()[4] is False


@pytest.mark.parametrize(("version", "is_sound"), [(91900, False), (92509, False), (92600, True), (None, False)])
def test_cudnns_attention_is_used_from_9_26_on_and_graphs_compiled_without_it_are_not_shared(
    monkeypatch, tf32_state, version, is_sound
):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    torch.backends.cuda.enable_cudnn_sdp(not is_sound)
    choose_kernels(CPU, True)
    assert torch.backends.cuda.cudnn_sdp_enabled() is not is_sound  # a CPU keeps its settings
    choose_kernels(GPU, True)
    assert torch.backends.cuda.cudnn_sdp_enabled() is is_sound
    assert torch.compiler.config.cache_key_tag == f"cudnn_sdp={is_sound}"


# ----------------------------------------------------------------------------------------------------------------------
# Settings that the machine does not support.


def test_auto_compiles_blocks_on_a_gpu_and_nothing_on_a_cpu(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert resolve_compile("auto", GPU) == "blocks" and resolve_compile("auto", CPU) == "none"
    for mode in ("none", "blocks"):
        assert {resolve_compile(mode, device) for device in (CPU, GPU)} == {mode}
        check_compile_mode(mode, CPU)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda m: m.setattr(compilation.importlib.util, "find_spec", lambda name: None),
        lambda m: m.setattr(compilation.shutil, "which", lambda name: None),
        lambda m: m.setattr(compilation.sysconfig, "get_path", lambda *_: "/nowhere"),
    ],
)
def test_without_triton_or_its_compiler_auto_compiles_nothing(monkeypatch, caplog, prepare):
    monkeypatch.delenv("CC", raising=False)
    prepare(monkeypatch)
    with caplog.at_level(logging.WARNING):
        check_compile_mode("auto", GPU)
    assert resolve_compile("auto", GPU) == "none" and "machine.compile=auto does not compile" in caplog.text
    check_compile_mode("none", GPU)


@pytest.mark.parametrize(
    ("device", "needs"), [(CPU, "a C\\+\\+ compiler"), (GPU, "triton, a C compiler .gcc. and Python's C headers")]
)
def test_compiled_blocks_without_a_compiler_are_refused(monkeypatch, device, needs):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    for check in (resolve_compile, check_compile_mode):  # train.py, fid.py and sample.py call the second before slow work
        with pytest.raises(UserError, match=f"machine.compile=blocks needs {needs}.*; install it, or set machine.compile=none"):
            check("blocks", device)
    assert resolve_compile("none", device) == "none"


def test_bf16_without_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(UserError, match="train.precision=bf16: Some GPU"):
        check_machine(checked(["train.precision=bf16", "machine.compile=none"]), GPU, 1)


@pytest.mark.parametrize(("given", "expected"), [(None, "4"), ("3", "3")])
def test_the_compiler_uses_a_share_of_the_cores_of_the_node(monkeypatch, given, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(32))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    machine.start_accelerator(torch.get_num_threads())
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == expected


def test_a_command_sets_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as accelerate launch sets it
        machine.start_accelerator(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_omp_num_threads_is_respected_unless_a_launcher_has_set_it(monkeypatch):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    share = machine.cores_per_process()
    for given, expected in (("3", 3), ("0", share), ("1,2", share)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert machine.cores_per_process() == expected
    for launcher in LAUNCHER_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "999")
            patch.setenv(launcher, "x")
            assert machine.cores_per_process() == share


def test_a_task_of_slurm_uses_its_own_cores_whether_it_is_bound_to_them_or_not(monkeypatch):
    for name in ("OMP_NUM_THREADS", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("LOCAL_WORLD_SIZE", "8"), ("SUBMITIT_EXECUTOR", "slurm"), ("SLURM_CPUS_PER_TASK", "8")):
        monkeypatch.setenv(name, value)
    for visible in (8, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, visible=visible: range(visible))
        assert machine.cores_per_process() == 8
    monkeypatch.delenv("SUBMITIT_EXECUTOR")  # one task of Slurm starts torch's launcher, whose processes share its cores
    assert machine.cores_per_process() == 8


def test_a_task_of_slurm_with_fewer_cores_than_the_job_asks_for_gets_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    for visible, is_warned in ((64, False), (1, True)):
        launch_checks.warn_about_launch(visible)
        assert ("this task has 1 of the 64 CPU cores in --cpus-per-task: give srun --cpus-per-task" in caplog.text) == is_warned
    assert "srun --cpus-per-task=$SLURM_CPUS_PER_TASK" in (REPOSITORY / "docs" / "speed_and_clusters.md").read_text()


def test_tasks_of_srun_that_do_not_know_of_each_other_get_a_warning(monkeypatch, caplog):
    for rank, num_tasks, is_warned in (("0", "2", False), (None, "1", False), (None, "2", True)):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num_tasks)
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        launch_checks.warn_about_launch(1)
        assert ("srun started 2 tasks, and each of them works alone" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("MIXED_PRECISION", "bf16", "train.precision or sampling.precision"),
        ("MIXED_PRECISION", "fp8", "train.precision or sampling.precision"),
        ("GRADIENT_ACCUMULATION_STEPS", "2", "train.grad_accum_steps"),
        ("DYNAMO_BACKEND", "INDUCTOR", "machine.compile"),
        ("MIXED_PRECISION", "no", None),
        ("GRADIENT_ACCUMULATION_STEPS", "1", None),
        ("DYNAMO_BACKEND", "NO", None),
        ("USE_FSDP", "false", None),
    ],
)
def test_what_accelerate_was_told_in_vain_is_said(monkeypatch, caplog, name, value, key):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    launch_checks.check_accelerate_settings("fp32")
    expected = f"accelerate's {name.lower()}={value.lower()} has no effect: {key} counts"
    assert caplog.messages == ([expected] if key else [])
    caplog.clear()
    launch_checks.check_accelerate_settings("bf16")  # as the launcher was told
    assert bool(caplog.messages) == (key is not None and value != "bf16")


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_ways_to_divide_the_network_are_refused(monkeypatch, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UserError, match=f"launched with {name}, but this project supports only DDP"):
        launch_checks.check_accelerate_settings("fp32")


def test_a_memory_budget_keeps_fewer_activations_and_changes_no_loss(tmp_path, monkeypatch):
    saved, train_step = [], Trainer.train_step

    def counted_step(trainer, *args):
        weights = {p.data_ptr() for p in trainer.parameters.values()}

        def pack(tensor):
            saved[-1] += tensor.nbytes * (tensor.data_ptr() not in weights)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return train_step(trainer, *args)

    monkeypatch.setattr(Trainer, "train_step", counted_step)
    # Dynamo and torch's partitioner decide which activations are kept. The parts run without code generation.
    monkeypatch.setattr(compilation.torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    runs = []
    torch.compiler.reset()
    for budget in (1.0, 0.3):  # the second run must not use the blocks that the first run compiled
        saved.append(0)
        keys = ["machine.compile=blocks", f"train.activation_memory_budget={budget}", "train.num_steps=2"]
        runs.append(run_train(tmp_path, f"budget_{budget}", *keys))
    assert losses(runs[0]) == losses(runs[1])
    assert saved[1] < 0.6 * saved[0]
    with pytest.raises(UserError, match="activation_memory_budget=0.3 needs machine.compile=blocks"):
        run_train(tmp_path, "eager", "machine.compile=none", "train.activation_memory_budget=0.3")
