"""Which route to take: what candidates save, how long a step would be, and what the paper says of them.

    python -m benchmarks.routes model.backbone=DiT-XL/2                           # 256 tokens, times measured here
    python -m benchmarks.routes model.backbone=DiT-B/2 data.input_size=64         # 1,024 tokens
    python -m benchmarks.routes model.backbone=DiT-B/2 depth=20 block_ms=256:4.1,128:2.2   # another depth; times that you have
    python -m benchmarks.routes model.backbone=DiT-S/2 'model.routes=[{selection_ratio:0.6,start_layer_idx:1,end_layer_idx:-3}]'

FLOPs are of matrix products (sampling/flops.py), of a training step. The predicted step is the sum of measured parts: a block
at each number of tokens, a route's own cost, what lies around the blocks, and the update of the weights (AdamW and EMA); with
block_ms, of the blocks alone. verify=true also times whole steps, dense and with the default route, beside the prediction.

It prints a table and the default choice with its reason, and writes <output>.jsonl and <output>.md.
"""

from __future__ import annotations

import contextlib
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
from benchmarks.harness import Backbone, Report, choose_device, say, table, time_ms
from errors import UserError
from routing_module import Route, TokenRouter, num_kept_tokens
from sampling.flops import step_flops
from setup import cli, schema
from setup.schema import Precision
from setup.settings import Accepts, Count, Positive, Settings, Text
from training.ema import EMA
from training.speed import use_cores


def _read_block_ms(text: object) -> dict[int, float]:
    return {int(tokens): float(ms) for tokens, ms in (pair.split(":") for pair in str(text).split(","))}


def _read_routes(value: object) -> object:
    with contextlib.suppress(yaml.YAMLError):  # Hydra's commands need no space after a colon, YAML does
        return yaml.safe_load(value.replace(":", ": ")) if isinstance(value, str) else value
    return value


BlockTimes = Annotated[
    dict[Count, Positive], BeforeValidator(_read_block_ms), Accepts(bool, "tokens:milliseconds, such as 256:4.1,128:2.2")
]
Routes = Annotated[(list, BeforeValidator(_read_routes), *schema.Model.model_fields["routes"].metadata)]


class ModelSettings(Settings):
    backbone: Backbone = "DiT-XL/2"
    routes: Routes = []  # one more candidate: a route, or several that follow one another


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


# TREAD: change of FID by the route's place, DiT-B/2 (12 blocks, half of the tokens skip, shorter training, dense 49.89).
PLACEMENT = {
    (0, 2): 2.95, (0, 3): 2.59, (0, 4): 7.23, (0, 5): 0.92, (0, 6): -12.12, (0, 7): -15.71, (0, 8): -16.31, (0, 9): -14.82,
    (0, 10): 7.47, (7, 8): 0.61, (6, 8): 0.82, (5, 8): -4.84, (4, 8): -14.20, (3, 8): -16.31, (2, 8): -21.87, (1, 8): -21.68,
}  # fmt: skip
# TREAD: FID by selection ratio, DiT-B/2, 2 -> 8, 400K iterations.
FID_BY_RATIO = {0.0: 43.47, 0.25: 26.50, 0.5: 21.34, 0.75: 49.29}
# TREAD, DiT-XL/2: from block B/6 to 2B/3 FID 18.81, from 2 to B - 4 FID 7.38.
RELATIVE_FID, ABSOLUTE_FID = 18.81, 7.38
DEFAULT_RATIO = 0.5
BLOCKS_BEFORE, BLOCKS_AFTER = 2, 3  # the paper's route


@dataclass(frozen=True)
class Candidate:
    name: str
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a step's parts, for the whole batch.

    Attributes:
        block_ms: forward and backward of a block, by the tokens it sees.
        route_ms: start and end of a route, forward and backward; by kept tokens.
        around_ms: forward and backward of what is not in blocks.
        update_ms: AdamW and EMA, all weights.
    """

    block_ms: dict[int, float]
    route_ms: dict[int, float]
    around_ms: float
    update_ms: float


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, RouteSettings)
    device = choose_device(settings.device)
    use_cores(device, settings.cpu_threads)
    settings = settings.model_copy(update={"batch_size": settings.batch_size or (32 if device.type == "cuda" else 2)})
    dense = build_network(settings, ())
    depth, num_tokens = len(dense.blocks), dense.num_tokens
    default = default_route(depth)
    options = candidates(depth, default)
    if settings.model.routes:
        try:
            own = TokenRouter([Route(**route) for route in settings.model.routes], depth)
        except ValueError as e:
            raise UserError(f"model.{e}") from e
        options.append(Candidate("yours", own.routes))
    title = f"Routes for {settings.model.backbone}: {depth} blocks, {num_tokens:,} tokens"
    report = Report(title, settings, device)
    parts = given_parts(settings, options, num_tokens) if settings.block_ms else measure_parts(settings, options, device)
    rows = [describe(option, settings, dense, parts) for option in options]
    verified = verify_prediction(settings, default, parts, device) if settings.verify else []
    where = f"{report.machine['machine']}, batch {settings.batch_size}, {settings.precision}"
    sections = [table(rows), *([table(verified)] if verified else []), f"{advice(depth, default, rows)}\n"]
    report.save([*rows, *verified], sections)
    for text in (title, f"step_ms: {'blocks alone, from block_ms' if settings.block_ms else where}\n", *sections):
        say(text)


def build_network(
    settings: RouteSettings, routes: Sequence[Route], device: str | torch.device = "meta", depth: int | None = None
) -> dit.DiT:
    """The network of the settings; on `meta` it has sizes and no memory."""
    own_depth, width, num_heads, patch_size = dit.BACKBONES[settings.model.backbone]
    with torch.device(device):
        return dit.DiT(
            **settings.data.model_dump(),
            patch_size=patch_size,
            num_classes=1000,
            depth=(settings.depth or own_depth) if depth is None else depth,
            width=width,
            num_heads=num_heads,
            routes=routes,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Candidates, and what is known of them.


def default_route(depth: int) -> Route | None:
    """The paper's, 2 to depth - 4; in shallow networks what keeps a dense block on either side; None where nothing does."""
    start, end = BLOCKS_BEFORE, depth - 1 - BLOCKS_AFTER
    if end <= start:
        start, end = 1, depth - 2
    return Route(DEFAULT_RATIO, start, end) if start < end else None


def candidates(depth: int, default: Route | None) -> list[Candidate]:
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
    found = [Candidate("dense", ())]
    if default is not None:
        start, end = default.start_layer_idx, default.end_layer_idx
        found.append(Candidate("default", (default,)))
        others = [ratio for ratio in FID_BY_RATIO if ratio not in (0, DEFAULT_RATIO)]
        found += [Candidate(f"{ratio:.0%} skip", (Route(ratio, start, end),)) for ratio in others]
        middle = (start + end) // 2
        if start < middle < end - 1:
            two = (Route(DEFAULT_RATIO, start, middle), Route(DEFAULT_RATIO, middle + 1, end))
            found.append(Candidate("two in a row", two))
    for name, (start, end) in windows.items():
        routes = (Route(DEFAULT_RATIO, start, end),)
        if 0 <= start < end < depth and all(routes != other.routes for other in found):
            found.append(Candidate(name, routes))
    return found


def guidelines(routes: Sequence[Route], depth: int) -> str:
    """What the paper's guidelines, and its figures where they apply, say."""
    if not routes:
        return ""
    against = []
    num_routed = sum(route.end_layer_idx - route.start_layer_idx + 1 for route in routes)
    if 2 * num_routed < depth:
        against.append(f"short: {num_routed} of {depth} blocks")
    if routes[0].start_layer_idx == 0:
        against.append("starts at block 0")
    left = depth - 1 - routes[-1].end_layer_idx
    if left < BLOCKS_AFTER:
        against.append(f"ends {left} before the last" if left else "ends with the last block")
    if any(route.selection_ratio > 0.5 for route in routes):
        against.append("skips more than half")
    known = paper_figures(routes, depth)
    return (f"against: {', '.join(against)}" if against else "follows all") + (f" [{known}]" if known else "")


def paper_figures(routes: Sequence[Route], depth: int) -> str:
    """The paper's own figures of this route on 12 blocks, or of its kind on DiT-XL/2's 28."""
    if len(routes) != 1:
        return ""
    ratio, place = routes[0].selection_ratio, (routes[0].start_layer_idx, routes[0].end_layer_idx)
    words = []
    if depth == 12 and ratio == 0.5 and place in PLACEMENT:
        words.append(f"DiT-B/2: FID {PLACEMENT[place]:+.2f} against 49.89 dense")
    if depth == 12 and place == (2, 8) and ratio in FID_BY_RATIO:
        words.append(f"DiT-B/2 at 400K: {FID_BY_RATIO[ratio]} against {FID_BY_RATIO[0.0]} dense")
    if depth == 28 and ratio == 0.5 and place in ((2, 24), (4, 18)):
        words.append(f"DiT-XL/2 at 400K: FID {ABSOLUTE_FID if place == (2, 24) else RELATIVE_FID}")
    return "; ".join(words)


def describe(candidate: Candidate, settings: RouteSettings, dense: dit.DiT, parts: Parts) -> dict[str, object]:
    """A row of the table."""
    routes, depth, num_tokens = candidate.routes, len(dense.blocks), dense.num_tokens
    flops, dense_flops = (step_flops(net, routed=True) for net in (build_network(settings, routes), dense))
    step_ms, dense_ms = (predict(of, parts, depth, num_tokens) for of in (routes, ()))
    return {
        "route": candidate.name,
        "blocks": ", ".join(f"{route.start_layer_idx} -> {route.end_layer_idx}" for route in routes) or "none",
        "skip": f"{max(route.selection_ratio for route in routes):.0%}" if routes else "",
        "gflops_per_image": flops / 1e9,
        "flops_saved": f"{1 - flops / dense_flops:.1%}",
        "step_ms": step_ms,
        "time_saved": f"{1 - step_ms / dense_ms:.1%}",
        "guidelines": guidelines(routes, depth),
    }


def advice(depth: int, default: Route | None, rows: Sequence[dict]) -> str:
    """The default choice with its reason."""
    if default is None:
        return f"Choice: no route. {depth} blocks leave no window with a dense block on either side; train dense (model=dit)."
    mine = next(row for row in rows if row["route"] == "default")
    start, end = default.start_layer_idx, default.end_layer_idx
    setting = f"{{selection_ratio:{default.selection_ratio},start_layer_idx:{start},end_layer_idx:{end - depth}}}"
    if (start, end) == (BLOCKS_BEFORE, depth - 1 - BLOCKS_AFTER):
        reason = (
            "it is the paper's: the longest window that leaves two dense blocks before and three after it. In its tables this "
            "place is the best of 16 on DiT-B/2, and on DiT-XL/2 it beats one that scales with depth (FID "
            f"{ABSOLUTE_FID} against {RELATIVE_FID}); half of the tokens skipping is the best of 25%, 50% and 75%"
        )
    else:
        reason = f"{depth} blocks are too few for the paper's 2 -> depth - 4; this keeps a dense block on either side"
    savings = f"It saves {mine['flops_saved']} of the FLOPs and, as predicted, {mine['time_saved']} of the step."
    return f"Choice: model=tread 'model.routes=[{setting}]', because {reason}. {savings}"


# ----------------------------------------------------------------------------------------------------------------------
# Times.


def tokens_of_blocks(routes: Sequence[Route], depth: int, num_tokens: int) -> list[int]:
    """How many tokens each block sees in training."""
    tokens = [num_tokens] * depth
    for route in routes:
        for i in range(route.start_layer_idx, route.end_layer_idx + 1):
            tokens[i] = num_kept_tokens(num_tokens, route.selection_ratio)
    return tokens


def predict(routes: Sequence[Route], parts: Parts, depth: int, num_tokens: int) -> float:
    """Milliseconds of a step: the sum of its parts."""
    blocks = sum(parts.block_ms[tokens] for tokens in tokens_of_blocks(routes, depth, num_tokens))
    routing = sum(parts.route_ms[num_kept_tokens(num_tokens, route.selection_ratio)] for route in routes)
    return blocks + routing + parts.around_ms + parts.update_ms


def token_counts(options: Sequence[Candidate], num_tokens: int) -> list[int]:
    kept = {num_kept_tokens(num_tokens, route.selection_ratio) for option in options for route in option.routes}
    return sorted(kept | {num_tokens}, reverse=True)


def given_parts(settings: RouteSettings, options: Sequence[Candidate], num_tokens: int) -> Parts:
    """Blocks alone, from block_ms: linear in the tokens between and beyond two of its times.

    Raises:
        UserError: it gives a single time, and another number of tokens is needed.
    """
    times, needed = settings.block_ms, token_counts(options, num_tokens)
    if len(times) < 2 and needed != list(times):
        raise UserError(f"block_ms gives {len(times)} number of tokens; give two or more, of {', '.join(map(str, needed))}")

    def at(tokens: int) -> float:
        if tokens in times:
            return times[tokens]
        n0, n1 = sorted(times, key=lambda known: abs(known - tokens))[:2]
        return max(times[n0] + (times[n1] - times[n0]) * (tokens - n0) / (n1 - n0), 0.0)

    return Parts({tokens: at(tokens) for tokens in needed}, dict.fromkeys(needed, 0.0), 0.0, 0.0)


def measure_parts(settings: RouteSettings, options: Sequence[Candidate], device: torch.device) -> Parts:
    """Time every part by itself: a block at each number of tokens, a route, the rest of the network, and the update."""
    depth = settings.depth or dit.BACKBONES[settings.model.backbone][0]
    block = build_network(settings, (), device, depth=1).train().blocks[0]
    around = build_network(settings, (), device, depth=0).train()
    num_tokens, width = around.num_tokens, around.pos_embed.shape[-1]
    timer = Timer(settings, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(settings.batch_size, *shape, device=device, requires_grad=True)

    def route(x: Tensor, scores: Tensor) -> Tensor:
        ids_keep = TokenRouter.keep_highest(scores, tokens)
        return TokenRouter.end_route(TokenRouter.start_route(x, ids_keep), x, ids_keep)

    block_ms, route_ms = {}, {num_tokens: 0.0}
    for tokens in token_counts(options, num_tokens):
        block_ms[tokens] = timer.pass_ms(block, random(tokens, width), random(width))
        if tokens < num_tokens:
            scores = torch.rand(settings.batch_size, num_tokens, device=device)
            route_ms[tokens] = timer.pass_ms(route, random(num_tokens, width), scores)
    update_ms = depth * timer.update_ms(block) + timer.update_ms(around)
    return Parts(block_ms, route_ms, timer.pass_ms(around, *timer.inputs()), update_ms)


def verify_prediction(settings: RouteSettings, default: Route | None, parts: Parts, device: torch.device) -> list[dict]:
    """Whole steps, dense and with the default route, beside their predictions."""
    lines, timer = [], Timer(settings, device)
    for name, routes in (("dense", ()), ("default", (default,) if default else ())):
        net = build_network(settings, routes, device).train()
        measured = timer.pass_ms(net, *timer.inputs(), then=make_update(net))
        predicted = predict(routes, parts, len(net.blocks), net.num_tokens)
        error = f"{predicted / measured - 1:+.1%}"
        lines.append({"step": name, "predicted_ms": predicted, "measured_ms": measured, "error": error})
    return lines


class Timer:
    """Median milliseconds of parts of a step."""

    def __init__(self, settings: RouteSettings, device: torch.device):
        self.settings, self.device = settings, device

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, noise levels and labels of a batch."""
        data, batch_size = self.settings.data, self.settings.batch_size
        latents = torch.randn(batch_size, data.in_channels, data.input_size, data.input_size, device=self.device)
        return latents, torch.ones(batch_size, device=self.device), torch.zeros(batch_size, dtype=torch.long, device=self.device)

    def pass_ms(self, forward: Callable[..., Tensor], *inputs: Tensor, then: Callable[[], object] = bool) -> float:
        """Forward, backward, and what comes then."""

        def run() -> None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
                out = forward(*inputs)
            out.float().sum().backward()
            then()

        return median(time_ms(run, self.settings.repeats, self.device, warmup=1))

    def update_ms(self, module: nn.Module) -> float:
        return median(time_ms(make_update(module), self.settings.repeats, self.device, warmup=1))


def make_update(module: nn.Module) -> Callable[[], object]:
    """AdamW as training makes it, and the EMA, on the gradients of the module."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer, ema = torch.optim.AdamW(parameters, lr=1e-4, fused=True), EMA(module, 0.9999)
    return lambda: (optimizer.step(), ema.update(0))


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
