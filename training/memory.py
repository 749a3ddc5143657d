"""How much memory a run will need, before it starts."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dit
from common.errors import UserError
from extras.alignment import Alignment, Projector
from extras.lightningdit import LightningDiTBlock
from training.sharding import num_shards
from training.speed import SELECTIVELY_KEPT, attention_kernel, resolve_compile

# The estimate was within 10% of the measured peaks (docs/speed.md): a run is refused if it needs more even so.
MARGIN = 0.1


def check_memory(
    train, build_network: Callable[[], dit.DiT], accelerator: Accelerator, alignment: Alignment | None = None
) -> str:
    """One line about the memory that each process needs; it is empty where nobody would read it.

    It takes less than a second, and happens without the device, before anything large is made.

    Args:
        train: train.* of the configuration.
        build_network: makes the network of the run; called without memory for its weights.
        alignment: of the run, its encoder already on the device.

    Raises:
        UserError: the run cannot fit into the free memory of the CUDA device; with a setting that fits.
    """
    is_cuda = accelerator.device.type == "cuda"
    if not is_cuda and not accelerator.is_main_process:
        return ""
    train = train.model_copy(update={"compile": resolve_compile(train.compile, accelerator.device)})
    measure = partial(estimate, build_network=build_network, num_processes=accelerator.num_processes, alignment=alignment)
    parts = measure(train)
    line = describe_memory(parts)
    if is_cuda:
        free_bytes = torch.cuda.mem_get_info(accelerator.device)[0] + parts.get("encoder", 0)
        if (1 - MARGIN) * sum(parts.values()) > free_bytes:
            fits = _smaller_settings(train, measure, accelerator.num_processes, (1 - MARGIN) * free_bytes)
            raise UserError(
                f"train.batch_size={train.batch_size} with train.grad_accum_steps={train.grad_accum_steps} needs {line}; "
                f"{torch.cuda.get_device_name(accelerator.device)} has {_gib(free_bytes)} GiB free. {fits}"
            )
    return line


def describe_memory(parts: dict[str, int]) -> str:
    """`about 11.2 GiB per process: weights 2.5, AdamW 5.0, ...`."""
    return f"about {_gib(sum(parts.values()))} GiB per process: {', '.join(f'{name} {_gib(b)}' for name, b in parts.items())}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}" if num_bytes >= 2**30 else f"{num_bytes / 2**30:.2g}"


def _smaller_settings(train, measure: Callable[..., dict[str, int]], num_processes: int, available_bytes: float) -> str:
    """What to set so that the run fits: smaller micro-batches, if need be with checkpointing."""
    num_images = train.batch_size // num_processes
    for checkpointing in dict.fromkeys([train.activation_checkpointing, "blocks"]):
        for steps in (n for n in range(train.grad_accum_steps, num_images + 1) if num_images % n == 0):
            update = {"grad_accum_steps": steps, "activation_checkpointing": checkpointing}
            parts = measure(train.model_copy(update=update))
            if sum(parts.values()) <= available_bytes:
                extra = "" if checkpointing == train.activation_checkpointing else " train.activation_checkpointing=blocks"
                return f"Set train.grad_accum_steps={steps}{extra} ({_gib(sum(parts.values()))} GiB)"
    more = "train.parallel=fsdp with more processes" if train.parallel == "ddp" else "more processes"
    return f"One image at a time does not fit either: use {more}, or a smaller model.backbone"


def estimate(
    train, build_network: Callable[[], dit.DiT], num_processes: int, alignment: Alignment | None = None
) -> dict[str, int]:
    """Bytes of each process when memory is fullest, by what they hold.

    The forward of one micro-batch runs on fake tensors, which have shapes but no values, and counts what it keeps for the
    backward. That is the same on a CPU and a GPU, with every attention kernel but `math`, which keeps its matrices.

    Not counted: what the CUDA context, NCCL and the matrix libraries take (about a GiB), fragmentation, sampling, evaluation, and
    what alignment's encoder computes, which is gone before the backward needs its working memory.

    Args:
        train: train.* of the configuration; compile is resolved; every mode is counted as blocks.
        build_network: makes the network.
        num_processes: in all.
        alignment: of the run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    is_sharded, num_images = train.parallel == "fsdp", train.batch_size // num_processes // train.grad_accum_steps
    with FakeTensorMode():
        net = build_network().train()
        trained = nn.ModuleDict({"net": net})
        if alignment is not None:
            trained["projector"] = Projector(*alignment.projector.widths)
        averaged = sum(p.nbytes for p in net.parameters())
        weights = sum(p.nbytes for p in trained.parameters())
        gradients = sum(p.nbytes for p in trained.parameters() if p.requires_grad)
        block_weights = sum(p.nbytes for p in net.blocks[0].parameters())
        if train.precision == "fp8" or (is_sharded and train.precision == "bf16"):
            _use_bf16_weights(net)  # autocast then keeps no casts of them
        gathered = sum(p.nbytes for p in trained.parameters())
        if train.fsdp_reshard == "after_forward":  # this block and the next
            gathered -= sum(p.nbytes for block in net.blocks[2:] for p in block.parameters())
        activations, working = _activations(trained, train, num_images, None if alignment is None else alignment.tap)
    shards = num_shards(train, num_processes) if is_sharded else 1
    parts = {"weights": weights, "AdamW": 2 * gradients, "EMA": averaged}
    parts = {name: math.ceil(num_bytes / shards) for name, num_bytes in parts.items()}
    if alignment is not None:
        parts["encoder"] = alignment.encoder_bytes
    if is_sharded:
        parts["gathered weights"] = gathered
        working += 2 * block_weights  # the gradients of two blocks, before they are sharded
    # Gradients are there in the forward too: in the buckets of DDP, and those of earlier micro-batches.
    num_held = (num_processes > 1 and not is_sharded) + (train.grad_accum_steps > 1)
    gradients = math.ceil(gradients / shards)
    if num_held:
        parts |= {"gradients": num_held * gradients, "activations": activations}
    else:  # the backward frees activations while it makes gradients
        parts["activations or gradients"] = max(activations, gradients)
    return parts | {"working memory": working}


def _use_bf16_weights(net: dit.DiT) -> None:
    for i, block in enumerate(net.blocks):
        for module in block.modules() if i not in net.fp32_layers else ():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(p.bfloat16()))  # fake tensors refuse Module.bfloat16


def _activations(trained: nn.ModuleDict, train, num_images: int, tap: int | None) -> tuple[int, int]:
    """(bytes that the forward of one micro-batch keeps, bytes that the backward of a block needs for a while).

    Args:
        trained: `net`, and with alignment its `projector`.
        tap: the block that is aligned; None: without alignment.
    """
    net: dit.DiT = trained["net"]
    inputs: list[Tensor] = []  # the tokens that each block receives
    products: Counter[int] = Counter()  # bytes that selective checkpointing keeps, by place
    place = outside = -1  # or the number of the block that runs

    def enter(_, args: tuple) -> None:
        nonlocal place
        place = len(inputs)
        inputs.append(args[0])

    def leave(*_) -> None:
        nonlocal place
        place = outside

    class CountProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in SELECTIVELY_KEPT:
                products[place] += sum(tensor.nbytes for tensor in (out if isinstance(out, tuple) else [out]))
            return out

    for block in net.blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    x = torch.empty(num_images, net.x_embedder.proj.in_channels, net.input_size, net.input_size)
    labels, drop = torch.empty(num_images, dtype=torch.int64), torch.empty(num_images, dtype=torch.bool)
    scores = torch.empty(num_images, len(net.router.routes), net.num_tokens)
    is_compiled, checkpointing = train.compile != "none", train.activation_checkpointing
    with (
        attention_kernel(train.attention),
        torch.autocast("cpu", torch.bfloat16, enabled=train.precision != "fp32"),
        CountProducts() if checkpointing == "selective" and not is_compiled else contextlib.nullcontext(),
    ):
        forward = partial(net, x, torch.empty(num_images), labels, drop_labels=drop, route_scores=scores)

        def compute_loss() -> Tensor:
            if tap is None:
                return forward().sum()
            out, tokens, _ = forward(tap=tap)
            return out.sum() + trained["projector"](tokens).sum()

        kept = saved_for_backward(trained, compute_loss, place=lambda: place)
    by_block = [kept[i] - (_recomputed(net, i, h, train) if is_compiled else 0) for i, h in enumerate(inputs)]
    if checkpointing == "none":
        return kept[outside] + sum(by_block), max(by_block)
    del products[outside]
    return kept[outside] + sum(h.nbytes for h in inputs) + products.total(), max(by_block)


def _recomputed(net: dit.DiT, i: int, h: Tensor, train) -> int:
    """Bytes that block i keeps for its backward when it is not compiled, and recomputes when it is; `h` is its input."""
    tensors = 3  # in float32: the outputs of its norms, and the tokens between attention and MLP
    if not isinstance(net.blocks[i], LightningDiTBlock):
        return tensors * 4 * h.numel()
    tensors += 2  # the norms before their weights
    element_size = 4 if train.precision == "fp32" or i in net.fp32_layers else 2
    gate = h[..., 0].numel() * net.blocks[i].mlp.w3.in_features  # silu(first half)
    return tensors * 4 * h.numel() + element_size * gate


def saved_for_backward(
    network: nn.Module, compute_loss: Callable[[], Tensor], place: Callable[[], int] = lambda: 0
) -> Counter[int]:
    """Bytes that a forward pass keeps for the backward; weights do not count, casts of them do.

    Args:
        place: where the pass is now. A storage counts for the place that keeps it first.

    Returns:
        Bytes by place; `.total()` is the sum.
    """
    weights = {p.untyped_storage()._cdata for p in network.parameters()}  # fake tensors have no data_ptr
    saved: dict[int, tuple[int, int]] = {}  # by storage: everything that is kept is alive until the loss goes

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved.setdefault(storage._cdata, (place(), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compute_loss()
    del loss
    kept: Counter[int] = Counter()
    for where, num_bytes in saved.values():
        kept[where] += num_bytes
    return kept
