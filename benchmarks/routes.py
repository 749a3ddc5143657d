"""Which route to take: what candidates save, how long a step would be, and what the paper says of them.

    python -m benchmarks.routes model.backbone=DiT-XL/2                           # 256 tokens, times measured here
    python -m benchmarks.routes model.backbone=DiT-B/2 data.input_size=64         # 1,024 tokens
    python -m benchmarks.routes model.backbone=DiT-B/2 depth=20 block_ms=256:4.1,128:2.2   # another depth; times that you have
    python -m benchmarks.routes model.backbone=DiT-S/2 'model.routes=[{selection_ratio:0.6,start_layer_idx:1,end_layer_idx:-3}]'

FLOPs are of matrix products (sampling/flops.py), of a training step. The predicted step is the sum of measured parts: a block
at each number of tokens, what a route itself costs, what lies around the blocks, and the update of the weights (AdamW and EMA);
with block_ms, of the blocks alone. verify=true also times whole steps, dense and with the default route, beside the prediction.

It prints a table and the default choice with its reason, and writes <output>.jsonl and <output>.md.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from torch import nn

import dit
from benchmarks.report import describe_machine, markdown_table, prepare_output, say, synchronise, write_report
from errors import UserError
from routing_module import Route, TokenRouter, num_kept_tokens
from sampling.flops import step_flops
from setup.schema import Accepts, choice, or_null, text, true_or_false, whole
from training import cli, config
from training.ema import EMA

PLANNER_DEFAULTS = {
    "model.backbone": "DiT-XL/2",
    "model.routes": [],  # more candidates, as one route (or several that follow one another) of the configuration
    "data.input_size": 32,  # of the latents: 32 at patch 2 is 256 tokens
    "data.in_channels": 4,
    "depth": None,  # blocks; null: the backbone's
    "batch_size": None,  # of the measured step; null: 2 on a CPU, 32 on a GPU
    "precision": "fp32",  # fp32 | bf16
    "repeats": 5,  # timed passes; the median counts
    "block_ms": None,  # tokens:milliseconds of a block's forward and backward, comma-separated, instead of measuring
    "verify": False,  # also time whole steps
    "device": None,  # cpu | cuda; null: what there is
    "cpu_threads": None,
    "output": "runs/benchmarks/routes",
}


def _is_block_ms(v) -> bool:
    try:
        return v is None or len(parse_block_ms(v)) > 0
    except (ValueError, AttributeError):
        return False


PLANNER_KEYS = {
    **{key: config.TRAIN_KEYS[key] for key in ("model.backbone", "model.routes")},
    "data.input_size": whole(1),
    "data.in_channels": whole(1),
    "depth": or_null(whole(1)),
    "batch_size": or_null(whole(1)),
    "precision": choice("fp32", "bf16"),
    "repeats": whole(1),
    "block_ms": Accepts(_is_block_ms, "tokens:milliseconds, such as 256:4.1,128:2.2"),
    "verify": true_or_false(),
    "device": or_null(choice("cpu", "cuda")),
    "cpu_threads": or_null(whole(1)),
    "output": text(),
}

# TREAD: change of FID by the route's place, DiT-B/2 (12 blocks, half of the tokens skip, shorter training, dense 49.89).
PLACEMENT = {
    (0, 2): 2.95, (0, 3): 2.59, (0, 4): 7.23, (0, 5): 0.92, (0, 6): -12.12, (0, 7): -15.71, (0, 8): -16.31, (0, 9): -14.82,
    (0, 10): 7.47, (7, 8): 0.61, (6, 8): 0.82, (5, 8): -4.84, (4, 8): -14.20, (3, 8): -16.31, (2, 8): -21.87, (1, 8): -21.68,
}  # fmt: skip
PLACEMENT_DEPTH, PLACEMENT_RATIO = 12, 0.5
# TREAD: FID by the fraction that skips, DiT-B/2, 2 -> 8, 400K iterations.
SELECTION_RATE = {0.0: 43.47, 0.25: 26.50, 0.5: 21.34, 0.75: 49.29}
# TREAD, DiT-XL/2: from block B/6 to 2B/3 FID 18.81, from 2 to B - 4 FID 7.38.
RELATIVE_FID, ABSOLUTE_FID = 18.81, 7.38
DEFAULT_RATIO = 0.5
# Blocks before and after the paper's route.
BLOCKS_BEFORE, BLOCKS_AFTER = 2, 3


@dataclass(frozen=True)
class Candidate:
    name: str
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Parts:
    """Measured milliseconds of a step's parts, for the whole batch.

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
    settings = parse_planner_settings(arguments)
    device = choose_device(settings["device"])
    cli.use_cores(device, settings["cpu_threads"])
    dense = network(settings, ())
    depth, num_tokens = len(dense.blocks), dense.num_tokens
    default = default_route(depth)
    options = candidates(depth, default)
    if settings["model.routes"]:
        routes = TokenRouter([Route(**route) for route in settings["model.routes"]], depth).routes
        options.append(Candidate("yours", routes))
    prepare_output(settings["output"])
    batch_size = settings["batch_size"] or (32 if device.type == "cuda" else 2)
    if settings["block_ms"]:
        parts = given_parts(parse_block_ms(settings["block_ms"]), options, num_tokens)
    else:
        parts = measure_parts(settings, options, batch_size, device)

    rows = [row(settings, dense, option, parts) for option in options]
    machine = describe_machine(device) | {"settings": settings | {"batch_size": batch_size}}
    title = f"Routes for {settings['model.backbone']}: {depth} blocks, {num_tokens:,} tokens"
    verified = verify_prediction(settings, default, parts, batch_size, device) if settings["verify"] else []
    sections = [markdown_table(rows), *([markdown_table(verified)] if verified else []), f"{advice(depth, default, rows)}\n"]
    write_report(settings["output"], title, machine, [*rows, *verified], sections)
    say(title)
    where = (
        "blocks alone, from block_ms"
        if settings["block_ms"]
        else f"{machine['machine']}, batch {batch_size}, {settings['precision']}"
    )
    say(f"step_ms: {where}\n")
    for section in sections:
        say(section)


def parse_planner_settings(arguments: Sequence[str]) -> dict[str, object]:
    """Raises UserError: an argument of another form, an unknown key, or a value that is not accepted."""
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"{argument!r} is not of the form key=value; the keys are {', '.join(PLANNER_DEFAULTS)}")
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments) if key == "block_ms"}
    others = [argument for argument in arguments if not argument.startswith("block_ms=")]  # Hydra would read it as a sweep
    try:
        parsed = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(others)}
    except OverrideParseException as e:
        raise UserError(f"{e.override} cannot be read: {e}") from e
    settings = PLANNER_DEFAULTS | parsed | given
    config.check_keys(settings, PLANNER_KEYS)
    return settings


def parse_block_ms(words: str) -> dict[int, float]:
    """`256:4.1,128:2.2` -> {256: 4.1, 128: 2.2}."""
    pairs = [part.split(":") for part in words.split(",")]
    times = {int(tokens): float(ms) for tokens, ms in pairs}
    if not all(tokens > 0 and 0 < ms < math.inf for tokens, ms in times.items()):
        raise UserError(words)
    return times


def choose_device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but this machine has no CUDA device; use device=cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def network(settings: dict, routes: Sequence[Route], device: str | torch.device = "meta", depth: int | None = None) -> dit.DiT:
    """The network of the settings; on `meta` it has sizes and no memory."""
    own_depth, width, num_heads, patch_size = dit.BACKBONES[settings["model.backbone"]]
    with torch.device(device):
        return dit.DiT(
            input_size=settings["data.input_size"],
            patch_size=patch_size,
            in_channels=settings["data.in_channels"],
            num_classes=1000,
            depth=depth if depth is not None else settings["depth"] or own_depth,
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
        found += [
            Candidate(f"{ratio:.0%} skip", (Route(ratio, start, end),)) for ratio in SELECTION_RATE if ratio not in (0, 0.5)
        ]
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
    words = []
    first, last = routes[0].start_layer_idx, routes[-1].end_layer_idx
    num_routed = sum(route.end_layer_idx - route.start_layer_idx + 1 for route in routes)
    if 2 * num_routed < depth:
        words.append(f"short: {num_routed} of {depth} blocks")
    if first == 0:
        words.append("starts at block 0")
    if depth - 1 - last < BLOCKS_AFTER:
        left = depth - 1 - last
        words.append(f"ends {'with the last block' if left == 0 else f'{left} before the last'}")
    if any(route.selection_ratio > 0.5 for route in routes):
        words.append("skips more than half")
    verdict = "against: " + ", ".join(words) if words else "follows all"
    known = measured_by_paper(routes, depth)
    return verdict + (f" [{known}]" if known else "")


def measured_by_paper(routes: Sequence[Route], depth: int) -> str:
    """The paper's own figure of this route on 12 blocks, or of its kind on DiT-XL/2's 28."""
    if len(routes) != 1:
        return ""
    route, place = routes[0], (routes[0].start_layer_idx, routes[0].end_layer_idx)
    words = []
    if depth == PLACEMENT_DEPTH and route.selection_ratio == PLACEMENT_RATIO and place in PLACEMENT:
        words.append(f"DiT-B/2: FID {PLACEMENT[place]:+.2f} against 49.89 dense")
    if depth == PLACEMENT_DEPTH and place == (2, 8) and route.selection_ratio in SELECTION_RATE:
        words.append(f"DiT-B/2 at 400K: {SELECTION_RATE[route.selection_ratio]} against {SELECTION_RATE[0.0]} dense")
    if depth == 28 and route.selection_ratio == 0.5 and place in ((2, 24), (4, 18)):
        words.append(f"DiT-XL/2 at 400K: FID {ABSOLUTE_FID if place == (2, 24) else RELATIVE_FID}")
    return "; ".join(words)


def tokens_of_blocks(routes: Sequence[Route], depth: int, num_tokens: int) -> list[int]:
    """How many tokens each block sees in training."""
    tokens = [num_tokens] * depth
    for route in routes:
        for i in range(route.start_layer_idx, route.end_layer_idx + 1):
            tokens[i] = num_kept_tokens(num_tokens, route.selection_ratio)
    return tokens


def row(settings: dict, dense: dit.DiT, candidate: Candidate, parts: Parts) -> dict[str, object]:
    """A line of the table."""
    depth, num_tokens = len(dense.blocks), dense.num_tokens
    net = network(settings, candidate.routes)
    flops, dense_flops = step_flops(net, routed=True), step_flops(dense, routed=False)
    step, dense_step = predict(candidate.routes, parts, depth, num_tokens), predict((), parts, depth, num_tokens)
    places = ", ".join(f"{route.start_layer_idx} -> {route.end_layer_idx}" for route in candidate.routes)
    ratios = {route.selection_ratio for route in candidate.routes}
    return {
        "route": candidate.name,
        "blocks": places or "none",
        "skip": f"{max(ratios):.0%}" if ratios else "",
        "gflops_per_image": flops / 1e9,
        "flops_saved": f"{1 - flops / dense_flops:.1%}",
        "step_ms": step,
        "time_saved": f"{1 - step / dense_step:.1%}",
        "guidelines": guidelines(candidate.routes, depth),
    }


def advice(depth: int, default: Route | None, rows: Sequence[dict]) -> str:
    """The default choice with its reason."""
    if default is None:
        return f"Choice: no route. {depth} blocks leave no window with a dense block on either side; train dense (model=dit)."
    mine = next(line for line in rows if line["route"] == "default")
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


def predict(routes: Sequence[Route], parts: Parts, depth: int, num_tokens: int) -> float:
    """Milliseconds of a step: the sum of its parts."""
    blocks = sum(parts.block_ms[tokens] for tokens in tokens_of_blocks(routes, depth, num_tokens))
    routing = sum(parts.route_ms[num_kept_tokens(num_tokens, route.selection_ratio)] for route in routes)
    return blocks + routing + parts.around_ms + parts.update_ms


def token_counts(options: Sequence[Candidate], num_tokens: int) -> list[int]:
    kept = {num_kept_tokens(num_tokens, route.selection_ratio) for option in options for route in option.routes}
    return sorted(kept | {num_tokens}, reverse=True)


def given_parts(times: dict[int, float], options: Sequence[Candidate], num_tokens: int) -> Parts:
    """Blocks alone, from given times: linear in the tokens between and beyond two of them.

    Raises:
        UserError: a single time is given, and another number of tokens is needed.
    """
    needed = token_counts(options, num_tokens)
    if len(times) < 2 and needed != list(times):
        raise UserError(f"block_ms gives {len(times)} number of tokens; give two or more, of {', '.join(map(str, needed))}")
    known = sorted(times.items())

    def at(tokens: int) -> float:
        if tokens in times:
            return times[tokens]
        (n0, t0), (n1, t1) = sorted(sorted(known, key=lambda pair: abs(pair[0] - tokens))[:2])
        return max(t0 + (t1 - t0) * (tokens - n0) / (n1 - n0), 0.0)

    return Parts({tokens: at(tokens) for tokens in needed}, dict.fromkeys(needed, 0.0), 0.0, 0.0)


def measure_parts(settings: dict, options: Sequence[Candidate], batch_size: int, device: torch.device) -> Parts:
    """Time every part by itself: a block at each number of tokens, a route, the rest of the network, and the update."""
    net = network(settings, (), device, depth=1).train()
    num_tokens, width, repeats = net.num_tokens, net.pos_embed.shape[-1], settings["repeats"]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings["precision"] == "bf16")
    block, c = net.blocks[0], torch.randn(batch_size, width, device=device, requires_grad=True)
    block_ms, route_ms = {}, {}
    for tokens in token_counts(options, num_tokens):
        x = torch.randn(batch_size, tokens, width, device=device, requires_grad=True)

        def one_block(x=x) -> None:
            with autocast:
                out = block(x, c)
            out.float().sum().backward()

        block_ms[tokens] = median_ms(one_block, repeats, device)
        whole_x = torch.randn(batch_size, num_tokens, width, device=device, requires_grad=True)

        def one_route(tokens=tokens, whole_x=whole_x) -> None:
            ids_keep = TokenRouter.choose_ids_keep(whole_x, 0.0, scores=torch.rand(batch_size, num_tokens, device=device))[
                :, :tokens
            ]
            TokenRouter.end_route(TokenRouter.start_route(whole_x, ids_keep), whole_x, ids_keep).sum().backward()

        route_ms[tokens] = median_ms(one_route, repeats, device) if tokens < num_tokens else 0.0
    around = network(settings, (), device, depth=0).train()
    images, sigma, labels = inputs(settings, batch_size, device)

    def rest() -> None:
        with autocast:
            out = around(images, sigma, labels)
        out.float().sum().backward()

    around_ms = median_ms(rest, repeats, device)
    depth = settings["depth"] or dit.BACKBONES[settings["model.backbone"]][0]
    block_update_ms, around_update_ms = (median_ms(updater(module), repeats, device) for module in (block, around))
    return Parts(block_ms, route_ms, around_ms, depth * block_update_ms + around_update_ms)


def inputs(settings: dict, batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random latents, noise levels and labels."""
    size = settings["data.input_size"]
    images = torch.randn(batch_size, settings["data.in_channels"], size, size, device=device)
    return images, torch.ones(batch_size, device=device), torch.zeros(batch_size, dtype=torch.long, device=device)


def updater(module: nn.Module) -> Callable[[], None]:
    """AdamW as training makes it, and the EMA, on the gradients of the module."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer, ema = torch.optim.AdamW(parameters, lr=1e-4, fused=True), EMA(module, 0.9999)

    def update() -> None:
        optimizer.step()
        ema.update(0)

    return update


def median_ms(action: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median milliseconds, after one pass that does not count."""
    action()
    times = []
    for _ in range(repeats):
        synchronise(device)
        start_sec = time.perf_counter()
        action()
        synchronise(device)
        times.append(1000 * (time.perf_counter() - start_sec))
    return median(times)


def verify_prediction(settings: dict, default: Route | None, parts: Parts, batch_size: int, device: torch.device) -> list[dict]:
    """Whole steps, dense and with the default route, beside their predictions."""
    lines = []
    for name, routes in (("dense", ()), ("default", (default,) if default else ())):
        net = network(settings, routes, device).train()
        update, (images, sigma, labels) = updater(net), inputs(settings, batch_size, device)

        def step(net=net, update=update, images=images, sigma=sigma, labels=labels) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=settings["precision"] == "bf16"):
                out = net(images, sigma, labels)
            out.float().sum().backward()
            update()

        measured = median_ms(step, settings["repeats"], device)
        predicted = predict(routes, parts, len(net.blocks), net.num_tokens)
        lines.append(
            {"step": name, "predicted_ms": predicted, "measured_ms": measured, "error": f"{predicted / measured - 1:+.1%}"}
        )
    return lines


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
