"""Which route to take: what candidates save, how long a step would be, and what the paper says of them.

    python -m extras.benchmarks.routes model.backbone=DiT-XL/2                           # 256 tokens, times measured here
    python -m extras.benchmarks.routes model.backbone=DiT-B/2 data.input_size=64         # 1,024 tokens
    python -m extras.benchmarks.routes model.backbone=DiT-B/2 depth=20 block_ms=256:4.1,128:2.2   # another depth; times that you have
    python -m extras.benchmarks.routes model.backbone=DiT-S/2 'model.routes=[{selection_ratio:0.6,start_layer_idx:1,end_layer_idx:-3}]'

FLOPs are of matrix products (sampling/flops.py), of a training step. The predicted step is the sum of measured parts: a block
at each number of tokens, a route's own cost, what lies around the blocks, and the update of the weights (AdamW and EMA); with
block_ms, of the blocks alone. Times that cannot be, because the machine did something else, are measured again and then refused.
verify=true also times whole steps, dense and with the default route, beside the prediction.

It prints a table and the default choice with its reason, and writes <output>.jsonl and <output>.md.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

import torch
import yaml
from pydantic import BeforeValidator
from torch import Tensor, nn

import dit
from common.errors import UserError
from configs import command_line as cli
from configs import schema
from configs.experiments import LOCATIONS, PLACEMENTS, PLACEMENTS_DENSE, SELECTION_RATES
from configs.schema import BACKBONES, Precision
from configs.settings import Accepts, Count, Positive, Settings, Text
from extras.benchmarks.harness import Backbone, Report, choose_device, table, time_ms
from routing_module import Route, TokenRouter, num_kept_tokens
from sampling.flops import forward_flops
from training.ema import EMA
from training.machine import allow_tf32, use_cores
from training.speed import compile_network, resolve_compile


def _read_block_ms(text: object) -> dict[int, float]:
    return {int(tokens): float(ms) for tokens, ms in (pair.split(":") for pair in str(text).split(","))}


def _read_routes(value: object) -> object:
    with contextlib.suppress(yaml.YAMLError):  # Hydra's commands need no space after a colon, YAML does
        return yaml.safe_load(value.replace(":", ": ")) if isinstance(value, str) else value
    return value


BlockTimes = Annotated[
    dict[Count, Positive], BeforeValidator(_read_block_ms), Accepts(bool, "tokens:milliseconds, such as 256:4.1,128:2.2")
]
RouteList = Annotated[(list, BeforeValidator(_read_routes), *schema.Model.model_fields["routes"].metadata)]
Routes = tuple[Route, ...]  # one after another


class ModelSettings(Settings):
    backbone: Backbone = "DiT-XL/2"
    routes: RouteList = []  # one more candidate: a route, or several that follow one another


class DataSettings(Settings):
    input_size: Count = 32  # of the latents: 32 at patch 2 is 256 tokens
    in_channels: Count = 4


class RouteSettings(Settings):
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    depth: Count | None = None  # blocks; null: the backbone's
    batch_size: Count | None = None  # of the measured step; null: 2 on a CPU, 32 on a GPU
    precision: Precision = "fp32"
    repeats: Count = 5  # timed passes; the median counts
    block_ms: BlockTimes | None = None  # of a block's forward and backward, by tokens, instead of measuring
    verify: bool = False  # also time whole steps
    device: Literal["cpu", "cuda"] | None = None  # null: what there is
    cpu_threads: Count | None = None  # as train.cpu_threads
    output: Text = "runs/benchmarks/routes"  # the files' name, without its ending


DEFAULT_RATIO = 0.5
BLOCKS_BEFORE, BLOCKS_AFTER = 2, 3  # the paper's route
MAX_MEASUREMENTS = 4
NOISE = 0.1  # by which the medians of equal work differ on an idle machine, at the most


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, RouteSettings)
    if settings.verify and settings.block_ms:
        raise UserError("verify=true times whole steps here, and block_ms gives the blocks alone; leave one of them out")
    device = choose_device(settings.device)
    use_cores(device, settings.cpu_threads)
    allow_tf32(device, True)
    settings = settings.model_copy(update={"batch_size": settings.batch_size or (32 if device.type == "cuda" else 2)})
    dense = build_candidate(settings, "meta")  # it has sizes and no memory
    depth, num_tokens = len(dense.blocks), dense.num_tokens
    default = default_route(depth)
    options = candidates(depth, default)
    if settings.model.routes:
        try:
            options["yours"] = TokenRouter([Route(**route) for route in settings.model.routes], depth).routes
        except ValueError as e:
            raise UserError(f"model.{e}") from e
    kept = {num_kept_tokens(num_tokens, route.selection_ratio) for routes in options.values() for route in routes}
    token_counts = sorted(kept | {num_tokens}, reverse=True)
    given = given_parts(settings.block_ms, token_counts) if settings.block_ms else None
    title = f"Routes for {settings.model.backbone}: {depth} blocks, {num_tokens:,} tokens"
    report = Report(title, settings, device)
    parts = given or measure_believable_parts(settings, token_counts, device)
    rows = [{"route": name, **describe_candidate(routes, dense, parts)} for name, routes in options.items()]
    verified = verify_prediction(settings, default, parts, device) if settings.verify else []
    where = f"{report.machine['machine']}, batch {settings.batch_size}, {settings.precision}"
    sections = [
        table(rows),
        *([table(verified)] if verified else []),
        f"{advice(settings.model.backbone, depth, default, rows)}\n",
    ]
    times = f"step_ms: {'blocks alone, from block_ms' if settings.block_ms else where}\n"
    report.save([*rows, *verified], sections, [title, times, *sections])


def build_candidate(
    settings: RouteSettings, device: str | torch.device, depth: int | None = None, routes: Sequence[Route] = ()
) -> dit.DiT:
    """The network of the settings, or one of another depth, compiled as training would on this device."""
    backbone = settings.model.backbone
    depth = (settings.depth or BACKBONES[backbone][0]) if depth is None else depth
    try:
        with torch.device(device):
            network, _ = schema.family_of(backbone)
            net = network.build(backbone, **settings.data.model_dump(), num_classes=1000, depth=depth, routes=routes)
    except ValueError as e:
        raise UserError(f"data.input_size={settings.data.input_size}, model.backbone={settings.model.backbone}: {e}") from e
    compile_network(net, resolve_compile("auto", torch.device(device)))
    return net


# ----------------------------------------------------------------------------------------------------------------------
# Candidates, and what is known of them.


def default_route(depth: int) -> Route | None:
    """The paper's, 2 to depth - 4; in shallow networks what keeps a dense block on either side; None where nothing does."""
    start, end = BLOCKS_BEFORE, depth - 1 - BLOCKS_AFTER
    if end <= start:
        start, end = 1, depth - 2
    return Route(DEFAULT_RATIO, start, end) if start < end else None


def candidates(depth: int, default: Route | None) -> dict[str, Routes]:
    """Dense, the default, and what differs from it in one respect. Windows that do not fit or are there already are left out."""
    windows = {
        "paper's relative place": (depth // 6, 2 * depth // 3),
        "from block 0": (0, depth - 4),
        "to the last block": (2, depth - 1),
        "everything": (0, depth - 1),
        "ends later": (2, depth - 3),
        "starts later": (depth // 3, depth - 4),
        "first half": (2, depth // 2 - 1),
        "second half": (depth // 2, depth - 4),
    }
    found: dict[str, Routes] = {"dense": ()}
    if default is not None:
        start, end = default.start_layer_idx, default.end_layer_idx
        found["default"] = (default,)
        others = [rate / 100 for rate in SELECTION_RATES if rate / 100 not in (0, DEFAULT_RATIO)]
        found |= {f"{ratio:.0%} skip": (Route(ratio, start, end),) for ratio in others}
        middle = (start + end) // 2
        if start < middle < end - 1:
            found["two in a row"] = (Route(DEFAULT_RATIO, start, middle), Route(DEFAULT_RATIO, middle + 1, end))
    for name, (start, end) in windows.items():
        routes = (Route(DEFAULT_RATIO, start, end),)
        if 0 <= start < end < depth and routes not in found.values():
            found[name] = routes
    return found


def guidelines(routes: Sequence[Route], depth: int) -> str:
    """What the paper's guidelines, and its figures where they apply, say."""
    if not routes:
        return ""
    num_routed = sum(route.end_layer_idx - route.start_layer_idx + 1 for route in routes)
    left = depth - 1 - routes[-1].end_layer_idx
    against = {
        f"short: {num_routed} of {depth} blocks": 2 * num_routed < depth,
        "starts at block 0": routes[0].start_layer_idx == 0,
        f"ends {left} before the last" if left else "ends with the last block": left < BLOCKS_AFTER,
        "skips more than half": any(route.selection_ratio > 0.5 for route in routes),
    }
    objections = ", ".join(words for words, holds in against.items() if holds)
    known = paper_figures(*routes, depth) if len(routes) == 1 else ""
    return (f"against: {objections}" if objections else "follows all") + (f" [{known}]" if known else "")


def paper_figures(route: Route, depth: int) -> str:
    """The paper's own figures of this route on 12 blocks, or of its kind on DiT-XL/2's 28."""
    ratio, place = route.selection_ratio, (route.start_layer_idx, route.end_layer_idx)
    words = []
    if depth == 12 and ratio == 0.5 and place in PLACEMENTS:
        change = PLACEMENTS[place]
        below = f"{abs(change):.2f} {'below' if change < 0 else 'above'} dense ({PLACEMENTS_DENSE})"
        words.append(f"DiT-B/2: FID {PLACEMENTS_DENSE + change:.2f}, {below}")
    if depth == 12 and place == (2, 8) and 100 * ratio in SELECTION_RATES:
        words.append(f"DiT-B/2 at 400K: {SELECTION_RATES[100 * ratio]} against {SELECTION_RATES[0]} dense")
    if depth == 28 and ratio == 0.5 and place in LOCATIONS:
        words.append(f"DiT-XL/2 at 400K: FID {LOCATIONS[place]}")
    return "; ".join(words)


def describe_candidate(routes: Routes, dense: dit.DiT, parts: Parts) -> dict[str, object]:
    """A row of the table."""
    depth, num_tokens = len(dense.blocks), dense.num_tokens
    flops, dense_flops = (forward_flops(dense, None, TokenRouter(of, depth)) for of in (routes, ()))
    step_ms, dense_ms = (predict(of, parts, depth, num_tokens) for of in (routes, ()))
    return {
        "blocks": ", ".join(f"{route.start_layer_idx} -> {route.end_layer_idx}" for route in routes) or "none",
        "skip": f"{max(route.selection_ratio for route in routes):.0%}" if routes else "",
        "gflops_per_image": 3 * flops / 1e9,  # the backward is twice the forward
        "flops_saved": f"{1 - flops / dense_flops:.1%}",
        "step_ms": step_ms,
        "time_saved": f"{1 - step_ms / dense_ms:.1%}" if step_ms <= dense_ms else f"none: {step_ms / dense_ms - 1:.1%} longer",
        "guidelines": guidelines(routes, depth),
    }


def advice(backbone: str, depth: int, default: Route | None, rows: Sequence[dict]) -> str:
    """The default choice with its reason."""
    _, (dense_name, routed_name) = schema.family_of(backbone)
    if default is None:
        return (
            f"Choice: no route. {depth} blocks leave no window with a dense block on either side; train dense "
            f"(model={dense_name})."
        )
    mine = next(row for row in rows if row["route"] == "default")
    start, end = default.start_layer_idx, default.end_layer_idx
    setting = f"{{selection_ratio:{default.selection_ratio},start_layer_idx:{start},end_layer_idx:{end - depth}}}"
    if (start, end) == (BLOCKS_BEFORE, depth - 1 - BLOCKS_AFTER):
        reason = (
            "it is the paper's: the longest window that leaves two dense blocks before and three after it. In its tables this "
            "place is the best of 16 on DiT-B/2, and on DiT-XL/2 it beats one that scales with depth (FID "
            f"{LOCATIONS[2, 24]} against {LOCATIONS[4, 18]}); half of the tokens skipping is the best of 25%, 50% and 75%"
        )
    else:
        reason = f"{depth} blocks are too few for the paper's 2 -> depth - 4; this keeps a dense block on either side"
    dense_ms = next(row["step_ms"] for row in rows if row["route"] == "dense")
    if mine["step_ms"] <= dense_ms:
        time = f"and, as predicted, {mine['time_saved']} of the step"
    else:
        time = f"but no time: a step is predicted to take {mine['step_ms'] / dense_ms - 1:.1%} longer than a dense one, because "
        time += "with so few tokens a route costs more than it saves"
    savings = f"It saves {mine['flops_saved']} of the FLOPs {time}."
    return f"Choice: model={routed_name} 'model.routes=[{setting}]', because {reason}. {savings}"


# ----------------------------------------------------------------------------------------------------------------------
# Times.


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a step's parts, for the whole batch."""

    block_ms: dict[int, float]  # forward and backward of a block, by the tokens it sees
    route_ms: dict[int, float]  # start and end of a route, forward and backward; by kept tokens
    around_ms: float  # forward and backward of what is not in blocks
    update_ms: float  # AdamW and EMA, all weights


def predict(routes: Sequence[Route], parts: Parts, depth: int, num_tokens: int) -> float:
    """Milliseconds of a step: the sum of its parts."""
    ms = depth * parts.block_ms[num_tokens] + parts.around_ms + parts.update_ms
    for route in routes:
        kept, num_blocks = num_kept_tokens(num_tokens, route.selection_ratio), route.end_layer_idx - route.start_layer_idx + 1
        ms += num_blocks * (parts.block_ms[kept] - parts.block_ms[num_tokens]) + parts.route_ms[kept]
    return ms


def given_parts(times: dict[int, float], token_counts: Sequence[int]) -> Parts:
    """Blocks alone, from block_ms: linear in the tokens between and beyond two of its times.

    Raises:
        UserError: it gives a single time, and another number of tokens is needed; a block on fewer tokens takes longer; the line
            through its times leaves nothing for a number of tokens that is needed.
    """
    if len(times) < 2 and [*token_counts] != [*times]:
        needed = ", ".join(map(str, token_counts))
        raise UserError(f"block_ms gives {len(times)} number of tokens; give two or more, of {needed}")
    for fewer, more in itertools.pairwise(sorted(times)):
        if times[fewer] > times[more]:
            raise UserError(
                f"block_ms={fewer}:{times[fewer]:g},{more}:{times[more]:g}: a block takes no longer on {fewer} tokens than on "
                f"{more}; are the two times swapped? block_ms is tokens:milliseconds"
            )

    def at(tokens: int) -> float:
        if tokens in times:
            return times[tokens]
        n0, n1 = sorted(times, key=lambda known: abs(known - tokens))[:2]
        ms = times[n0] + (times[n1] - times[n0]) * (tokens - n0) / (n1 - n0)
        if ms <= 0:
            raise UserError(
                f"block_ms={n0}:{times[n0]:g},{n1}:{times[n1]:g} leaves no time for {tokens} tokens; add {tokens}:<ms>"
            )
        return ms

    return Parts({tokens: at(tokens) for tokens in token_counts}, dict.fromkeys(token_counts, 0.0), 0.0, 0.0)


def measure_believable_parts(settings: RouteSettings, token_counts: Sequence[int], device: torch.device) -> Parts:
    """`measure_parts`, again while it cannot be true: of each part the shortest time counts, since others only lengthen it.

    Raises:
        UserError: it is still not to be believed after MAX_MEASUREMENTS.
    """
    parts = measure_parts(settings, token_counts, device)
    for again in range(2, MAX_MEASUREMENTS + 1):
        if (reason := disbelief(parts)) is None:
            return parts
        sys.stderr.write(f"{reason}: measuring again ({again} of {MAX_MEASUREMENTS})\n")
        parts = shortest(parts, measure_parts(settings, token_counts, device))
    if (reason := disbelief(parts)) is not None:
        raise UserError(
            f"{reason}, in each of {MAX_MEASUREMENTS} measurements: the machine does other work at the same time, so that its "
            f"times say nothing. Wait until it is idle, measure longer with repeats={4 * settings.repeats}, or give times that "
            "you have with block_ms=<tokens>:<ms>,..."
        )
    return parts


def disbelief(parts: Parts) -> str | None:
    """What cannot be true of measured times, in words.

    A block does less work on fewer tokens, and a route moves each token once, which a block does many times. On few tokens the
    start of each operation takes all the time: there a block may take as long on half of them, and a route make a step longer.
    """
    for more, fewer in itertools.combinations(sorted(parts.block_ms, reverse=True), 2):
        if parts.block_ms[fewer] > parts.block_ms[more] * (1 + NOISE):
            return f"a block took {parts.block_ms[fewer]:.3g} ms on {fewer} tokens and {parts.block_ms[more]:.3g} ms on {more}"
    slowest, block_ms = max(parts.route_ms, key=parts.route_ms.get), max(parts.block_ms.values())
    if parts.route_ms[slowest] > block_ms:
        return f"starting and ending a route took {parts.route_ms[slowest]:.3g} ms, more than a whole block ({block_ms:.3g} ms)"
    return None


def shortest(first: Parts, second: Parts) -> Parts:
    """Of each part the shorter time."""
    block_ms, route_ms = (
        {tokens: min(ms, other[tokens]) for tokens, ms in one.items()}
        for one, other in ((first.block_ms, second.block_ms), (first.route_ms, second.route_ms))
    )
    return Parts(block_ms, route_ms, min(first.around_ms, second.around_ms), min(first.update_ms, second.update_ms))


def measure_parts(settings: RouteSettings, token_counts: Sequence[int], device: torch.device) -> Parts:
    """Time every part by itself: a block at each number of tokens, a route, the rest of the network, and the update."""
    depth = settings.depth or BACKBONES[settings.model.backbone][0]
    block = build_candidate(settings, device, depth=1).train().blocks[0]
    around = build_candidate(settings, device, depth=0).train()
    num_tokens, width = around.num_tokens, around.pos_embed.shape[-1]
    like = {"device": device, "requires_grad": True}

    def route(x: Tensor, scores: Tensor) -> Tensor:
        ids_keep = TokenRouter.keep_highest(scores, tokens)
        return TokenRouter.end_route(TokenRouter.start_route(x, ids_keep), x, ids_keep)

    block_ms, route_ms, B = {}, {num_tokens: 0.0}, settings.batch_size
    for tokens in token_counts:
        tables = [table[:, :tokens] for table in around.token_tables()]
        inputs = torch.randn(B, tokens, width, **like), torch.randn(B, width, **like), *tables
        block_ms[tokens] = pass_ms(settings, block, *inputs)
        if tokens < num_tokens:
            scores = torch.rand(B, num_tokens, device=device)
            route_ms[tokens] = pass_ms(settings, route, torch.randn(B, num_tokens, width, **like), scores)
    around_ms = pass_ms(settings, around, *network_inputs(settings, device))
    update_ms = sum(
        count * median(time_ms(make_update(module), settings.repeats, device, warmup=1))
        for module, count in ((block, depth), (around, 1))
    )
    return Parts(block_ms, route_ms, around_ms, update_ms)


def verify_prediction(settings: RouteSettings, default: Route | None, parts: Parts, device: torch.device) -> list[dict]:
    """Whole steps, dense and with the default route, beside their predictions."""
    lines = []
    for name, routes in {"dense": (), "default": (default,) if default else ()}.items():
        net = build_candidate(settings, device, routes=routes).train()
        measured = pass_ms(settings, net, *network_inputs(settings, device), then=make_update(net))
        predicted = predict(routes, parts, len(net.blocks), net.num_tokens)
        error = f"{predicted / measured - 1:+.1%}"
        lines.append({"step": name, "predicted_ms": predicted, "measured_ms": measured, "error": error})
    return lines


def network_inputs(settings: RouteSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, noise levels and labels of a batch."""
    data, B = settings.data, settings.batch_size
    latents = torch.randn(B, data.in_channels, data.input_size, data.input_size, device=device)
    return latents, torch.ones(B, device=device), torch.zeros(B, dtype=torch.long, device=device)


def pass_ms(settings: RouteSettings, forward: Callable[..., Tensor], *inputs: Tensor, then: Callable[[], object] = bool) -> float:
    """Median milliseconds of forward, backward, and what comes then."""
    device = inputs[0].device

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            out = forward(*inputs)
        out.float().sum().backward()
        then()

    return median(time_ms(run, settings.repeats, device, warmup=1))


def make_update(module: nn.Module) -> Callable[[], object]:
    """AdamW as training makes it, and the EMA, on the gradients of the module."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer, ema = torch.optim.AdamW(parameters, lr=1e-4, fused=True), EMA(module, 0.9999)
    return lambda: (optimizer.step(), ema.update(0))


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
