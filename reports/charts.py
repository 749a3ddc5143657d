"""Line charts as SVG text: small, sharp at any size, and in the colours of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 12, 42
NUM_COLOURS = 8
MOST_POINTS = 160  # of a line; more are averaged, since nobody sees them and every reader loads them
LOG_FROM = 8  # the ratio of largest to smallest value from which the vertical axis is logarithmic


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        points: (x, y) sorted by x.
        band: (low, high) at each point, or empty.
        style: number of its colour and marker.
        dashed: dense runs are, so that colour is not all that tells lines apart.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    style: int = 0
    dashed: bool = False
    band: tuple[tuple[float, float], ...] = ()


def line_chart(
    series: Sequence[Series], identifier: str, title: str, x_label: str, y_label: str, markers: bool, from_zero: bool = True
) -> str:
    """An <svg> with title and description; "" where there is nothing to draw.

    Args:
        identifier: unique in the page.
        markers: for few points; without them, a line's points are averaged to MOST_POINTS.
        from_zero: the horizontal axis starts there.
    """
    series = [one if markers else thinned(one) for one in series if one.points]
    if not series:
        return ""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [y for one in series for pair in one.band for y in pair]
    logarithmic = min(ys) > 0 and max(ys) / min(ys) > LOG_FROM
    x_ticks = linear_ticks(0.0 if from_zero else min(xs), max(xs))
    y_ticks = log_ticks(min(ys), max(ys)) if logarithmic else linear_ticks(min(ys), max(ys))
    x_low, x_high = min(x_ticks[0], min(xs)), max(x_ticks[-1], max(xs))
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def px(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        low, high, y = (math.log(v) if logarithmic else v for v in (y_low, y_high, y))
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{identifier}-t {identifier}-d">',
        f'<title id="{identifier}-t">{escape(title)}</title>',
        f'<desc id="{identifier}-d">{escape(described(series, x_label))}</desc>',
    ]
    for tick in x_ticks:
        parts.append(f'<line class="grid" x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{px(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    y_words = f"{y_label} (log scale)" if logarithmic else y_label
    turned = f'transform="rotate(-90 12 {height:.0f})"'
    parts.append(f'<text class="axis" x="12" y="{height:.0f}" text-anchor="middle" {turned}>{escape(y_words)}</text>')
    for one in series:
        if one.band:
            there = [f"{px(x):.1f},{py(high):.1f}" for (x, _), (_, high) in zip(one.points, one.band)]
            back = [f"{px(x):.1f},{py(low):.1f}" for (x, _), (low, _) in zip(one.points, one.band)]
            parts.append(f'<polygon class="band c{one.style % NUM_COLOURS}" points="{" ".join(there + back[::-1])}"/>')
    for one in series:
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="{line_class(one)}" points="{path}"/>')
        if markers or len(one.points) == 1:
            parts += [marker(px(x), py(y), one.style) for x, y in one.points]
    return "".join([*parts, "</svg>"])


def swatch(one: Series) -> str:
    """The line as a legend shows it."""
    line = f'<line class="{line_class(one)}" x1="1" x2="35" y1="7" y2="7"/>'
    return f'<svg class="swatch" viewBox="0 0 36 14" aria-hidden="true">{line}{marker(18, 7, one.style)}</svg>'


def line_class(one: Series) -> str:
    return f"line c{one.style % NUM_COLOURS}{' dashed' if one.dashed else ''}"


def marker(x: float, y: float, style: int) -> str:
    """Circle, square, triangle or diamond."""
    kind = f'class="mark c{style % NUM_COLOURS}"'
    if style % 4 == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>'
    if style % 4 == 1:
        return f'<rect {kind} x="{x - 3.1:.1f}" y="{y - 3.1:.1f}" width="6.2" height="6.2"/>'
    corners = [(0, -4), (4, 3.2), (-4, 3.2)] if style % 4 == 2 else [(0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)]
    return f'<polygon {kind} points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


def thinned(one: Series) -> Series:
    """At most MOST_POINTS, each the mean of equally many neighbours."""
    size = -(-len(one.points) // MOST_POINTS)
    if size <= 1:
        return one

    def means(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        return tuple((sum(a for a, _ in chunk) / len(chunk), sum(b for _, b in chunk) / len(chunk)) for chunk in chunks)

    return Series(one.label, means(one.points), one.style, one.dashed, means(one.band))


def described(series: Sequence[Series], x_label: str) -> str:
    """For those who do not see the chart: where each line starts and ends."""
    words = []
    for one in series:
        (x0, y0), (x1, y1) = one.points[0], one.points[-1]
        words.append(f"{one.label}: from {y0:.4g} at {short(x0)} to {y1:.4g} at {short(x1)} {x_label}.")
    return " ".join(words)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers with steps of 1, 2 or 5 times a power of ten, that enclose [low, high] from below."""
    span = (high - low) or abs(high) or 1.0
    raw = span / (most - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten that enclose [low, high]; fewer where they would crowd."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        below = [tick for tick in ticks if tick <= low * (1 + 1e-9)][-1:]
        above = [tick for tick in ticks if tick >= high * (1 - 1e-9)][:1]
        inside = [tick for tick in ticks if low * (1 + 1e-9) < tick < high * (1 - 1e-9)]
        if len(inside) <= 7:
            break
    return below + inside + above


def short(value: float) -> str:
    """400000 -> 400k: as it stands at a tick."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"
