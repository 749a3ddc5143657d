"""The report as one HTML file: no script, no network, nothing beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path

from PIL import Image

from reports.charts import Series, line_chart, swatch
from reports.content import Table, equal_table, figures_table, origin_lines, results_table, speedup_table
from reports.experiments import Experiment, Figure, curve_metric, leading_metric
from reports.runs import Point, Run, is_figure

# Grids above this size are embedded smaller, as JPEG.
LARGEST_IMAGE_BYTES = 250_000
LARGEST_IMAGE_PIXELS = 900


def html_report(
    marker: str, title: str, subtitle: str, tables: dict[str, list[Experiment]], problems: dict[str, list[str]]
) -> str:
    sections = [table_section(f"t{i}", name, experiments) for i, (name, experiments) in enumerate(tables.items())]
    links = [f'<li><a href="#t{i}">{escape(name)}</a></li>' for i, name in enumerate(tables)]
    links += ['<li><a href="#left-out">Incomplete or left out</a></li>'] if problems else []
    links += ['<li><a href="#reading">How to read this</a></li>']
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="{escape(marker)}">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            f'<header><h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p>',
            f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav></header>',
            "<main>",
            *sections,
            problems_section(problems),
            READING,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def table_section(identifier: str, name: str, experiments: Sequence[Experiment]) -> str:
    """One of the paper's tables, or the runs that belong to none."""
    parts = [f'<section id="{identifier}"><h2>{escape(name)}</h2>', table_html(results_table(experiments))]
    parts += [table_html(table) for make in (speedup_table, equal_table) if (table := make(experiments)) is not None]
    figures = figures_table(experiments)
    parts.append(curves(identifier, experiments))
    parts.append(sweeps(identifier, experiments))
    parts.append(grids(experiments))
    if figures is not None:
        parts.append(table_html(figures))
    parts.append(origins(experiments))
    return "\n".join([*filter(None, parts), "</section>"])


def table_html(table: Table) -> str:
    """A table with headers; on a phone each row becomes a card, with the roles of a table kept for screen readers."""
    head = "".join(f'<th scope="col" role="columnheader">{escape(column)}</th>' for column in table.columns)
    rows = []
    for row in table.rows:
        cells = [f'<th scope="row" role="rowheader">{breakable(row[0])}</th>']
        cells += [
            f'<td role="cell" data-label="{escape(c)}">{breakable(text)}</td>' for c, text in zip(table.columns[1:], row[1:])
        ]
        rows.append(f'<tr role="row">{"".join(cells)}</tr>')
    notes = "".join(f"<li>{breakable(note)}</li>" for note in table.notes)
    return (
        f'<div class="table"><table role="table"><caption>{escape(table.caption)}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">{"".join(rows)}</tbody></table></div>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def breakable(text: str) -> str:
    """Long names may break after a slash or an underscore."""
    return escape(text).replace("/", "/<wbr>").replace("_", "_<wbr>")


# ----------------------------------------------------------------------------------------------------------------------
# Charts.


def series_of(experiment: Experiment, style: int, curve: Sequence[Figure], to_x: Callable[[int], float | None]) -> Series:
    known = [(x, figure) for figure in curve if (x := to_x(figure.step)) is not None]
    band = [(min(figure.values), max(figure.values)) for _, figure in known if len(figure.values) > 1]
    points = tuple((float(x), figure.mean) for x, figure in known)
    return Series(experiment.label, points, style, not experiment.is_routed, tuple(band))


def curves(identifier: str, experiments: Sequence[Experiment]) -> str:
    """The metric and the loss, against steps and against hours."""
    metric = curve_metric(experiments)
    drawn = []
    for what, words, markers in ((metric, metric, True), ("loss", "training loss", False)):
        if what is None:
            continue
        for axis, x_label in (("steps", "steps"), ("hours", "hours of training")):
            series = []
            for style, experiment in zip(styles(experiments), experiments):
                to_x = float if axis == "steps" else partial(experiment.hours_at, metric=what)
                series.append(series_of(experiment, style, experiment.curve(what), to_x))
            title = f"{words} against {x_label}"
            drawn.append((title, line_chart(series, f"{identifier}-{axis}-{len(drawn)}", title, x_label, words, markers)))
    legend = legend_html([Series(e.label, (), style, not e.is_routed) for style, e in zip(styles(experiments), experiments)])
    notes = ["Dense runs are dashed."]
    if any(len(experiment.runs) > 1 for experiment in experiments):
        notes.append("Lines are means over seeds; bands reach from the lowest to the highest.")
    if any(experiment.is_routed for experiment in experiments):
        notes.append(
            "The loss of a routed run is measured with its tokens skipping: compare it among runs of the same routes only."
        )
    return figures_html("Curves", legend, drawn, " ".join(notes))


def sweeps(identifier: str, experiments: Sequence[Experiment]) -> str:
    """The leading metric against what fid.py swept, and against the guidance scales of training's own evaluations."""
    leading = leading_metric(experiments)
    if leading is None:
        return ""
    base = leading.partition("/")[0]
    axes: dict[str, list[Series]] = {}
    for style, experiment in zip(styles(experiments), experiments):
        for axis, curve, words in swept_curves(experiment.runs, base):
            label = experiment.label + (f", {words}" if words else "")
            axes.setdefault(axis, []).append(Series(label, tuple(curve), style, not experiment.is_routed))
    parts = []
    for axis, series in axes.items():
        if len({(one.style, one.dashed) for one in series}) < len(series):  # several lines of one experiment: a style for each
            series = [Series(one.label, one.points, style, one.dashed) for style, one in enumerate(series)]
        title = f"{base} against {axis}"
        chart = line_chart(
            series, f"{identifier}-sweep-{axis.replace('.', '-')}", title, axis, base, markers=True, from_zero=False
        )
        parts.append(figures_html(f"Sweep of {axis}", legend_html(series), [(title, chart)], ""))
    return "\n".join(filter(None, parts))


def styles(experiments: Sequence[Experiment]) -> list[int]:
    """A colour and marker for each; a dense experiment and its only routed one share theirs, and differ in the dashes."""
    numbers: dict[int, int] = {}
    for experiment in experiments:
        dense = experiment.baseline
        alone = dense is not None and sum(other.baseline is dense for other in experiments) == 1
        numbers[id(experiment)] = numbers[id(dense)] if alone and id(dense) in numbers else len(set(numbers.values()))
    return [numbers[id(experiment)] for experiment in experiments]


def swept_curves(runs: Sequence[Run], base: str) -> list[tuple[str, list[tuple[float, float]], str]]:
    """(axis, its values with the metric, the other settings in words) for all that varies while the rest stays the same.

    Of several seeds the mean, where all of them have a point.
    """
    by_run = [swept_values(run, base) for run in runs]
    whole: dict[tuple, dict[float, float]] = {}
    for key in by_run[0]:
        curves_of_runs = [found[key] for found in by_run if key in found]
        shared = set.intersection(*map(set, curves_of_runs))
        if len(curves_of_runs) == len(runs) and len(shared) > 1:
            whole[key] = {x: sum(curve[x] for curve in curves_of_runs) / len(runs) for x in shared}
    result = []
    for (axis, rest), curve in whole.items():
        others = [dict(other) for a, other in whole if a == axis]
        words = ", ".join(f"{key} {text}" for key, text in rest if len({str(other.get(key)) for other in others}) > 1)
        result.append((axis, sorted(curve.items()), words))
    return result


def swept_values(run: Run, base: str) -> dict[tuple, dict[float, float]]:
    """{(axis, the other settings): {value of the axis: metric}}, of fid.py and of training's last evaluation."""
    points = list(run.points)
    last = max(run.evaluations, default=None)
    for name, value in run.evaluations.get(last, {}).items():
        kind, _, guidance = name.partition("/cfg")
        scale = as_number(guidance)
        if kind == base and scale is not None:
            own = {"cfg_scale": scale, "weights": "ema", "num_steps": own_sampler_steps(run)}
            own["S_churn"] = run.config.get("diffusion.sampler.S_churn", 0.0)
            points.append(Point(last, own, {name: value}))
    found: dict[tuple, dict[float, float]] = {}
    for point in points:
        value = next((value for name, value in point.values.items() if name.partition("/")[0] == base), None)
        for axis, setting in point.settings.items():
            if value is not None and is_figure(setting):
                others = {key: other for key, other in {**point.settings, "step": point.step}.items() if key != axis}
                rest = tuple((key, others[key] if is_figure(others[key]) else str(others[key])) for key in sorted(others))
                found.setdefault((axis, rest), {}).setdefault(float(setting), value)
    return found


def as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def own_sampler_steps(run: Run) -> object:
    return run.config.get("eval.num_steps") or run.config.get("diffusion.sampler.num_steps")


def legend_html(series: Sequence[Series]) -> str:
    items = "".join(f"<li>{swatch(one)}<span>{breakable(one.label)}</span></li>" for one in series)
    return f'<ul class="legend" aria-label="Lines">{items}</ul>'


def figures_html(title: str, legend: str, charts: Sequence[tuple[str, str]], note: str) -> str:
    """Charts under one legend; "" where all are empty."""
    figures = [f"<figure>{svg}<figcaption>{escape(words)}</figcaption></figure>" for words, svg in charts if svg]
    if not figures:
        return ""
    words = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<h3>{escape(title)}</h3>{legend}<div class="charts">{"".join(figures)}</div>{words}'


# ----------------------------------------------------------------------------------------------------------------------
# Images, origins, problems.


def grids(experiments: Sequence[Experiment]) -> str:
    """The last grid of each experiment's first run, side by side."""
    figures = []
    for experiment in experiments:
        run = experiment.runs[0]
        if run.grid is None:
            continue
        step, file = run.grid
        source = embedded(file)
        label = f"{experiment.label}, step {step:,}"
        scale = run.config.get("guidance.cfg_scale")
        how = f", cfg {scale}" if scale is not None else ""
        figures.append(
            f'<figure><img src="{source}" alt="Grid of samples of {escape(run.name)} at step {step}, with the classes asked for">'
            f"<figcaption>{breakable(label)}{escape(how)}</figcaption></figure>"
        )
    return f'<h3>Samples</h3><div class="grids">{"".join(figures)}</div>' if figures else ""


def embedded(file: Path) -> str:
    """A data URL; large images are reduced."""
    data, kind = file.read_bytes(), "png"
    if len(data) > LARGEST_IMAGE_BYTES:
        with Image.open(io.BytesIO(data)) as image:
            image = image.convert("RGB")
        image.thumbnail((LARGEST_IMAGE_PIXELS, 4 * LARGEST_IMAGE_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=82)
        data, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def origins(experiments: Sequence[Experiment]) -> str:
    """Commands, commits and machines."""
    parts = ["<h3>How these runs were made</h3>"]
    for experiment in experiments:
        about = "".join(
            f"<dt>{key.capitalize()}</dt><dd>{escape(str(experiment.about[key]))}</dd>"
            for key in ("source", "differs")
            if experiment.about.get(key)
        )
        parts.append(f'<div class="origin"><h4>{breakable(experiment.label)}</h4>' + (f"<dl>{about}</dl>" if about else ""))
        for run in experiment.runs:
            rows = "".join(f"<dt>{escape(what)}</dt><dd>{origin_text(text)}</dd>" for what, text in origin_lines(run))
            parts.append(f"<h5>{breakable(run.name)}</h5><dl>{rows}</dl>")
        parts.append("</div>")
    return "".join(parts)


def origin_text(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text.startswith(("accelerate ", "python ")) else escape(text)


def problems_section(problems: dict[str, list[str]]) -> str:
    if not problems:
        return ""
    rows = tuple((path, "; ".join(reasons)) for path, reasons in problems.items())
    table = Table("What could not be read, or not wholly", ("File or folder", "Reason"), rows)
    return f'<section id="left-out"><h2>Incomplete or left out</h2>{table_html(table)}</section>'


READING = """<section id="reading"><h2>How to read this</h2><ul>
<li>A row is an experiment: runs that differ only in their seed, or in where they are and how they were watched.</li>
<li>Measured is the mean of the last evaluation of EMA weights. A metric's name holds its sample count and guidance:
fid50k/cfg1.0 is FID of 50,000 unguided samples.
Figures of other sample counts must not be compared, nor fd_digits (of the digits) with FID.</li>
<li>Hours are of training alone: checkpoints, grids and evaluations are not in them. Device hours are these times the number
of processes.</li>
<li>Images/s is the median over the lines of the training log; of several seeds, the lowest and the highest.</li>
<li>The speedup is the dense run's steps (or hours) at its best figure over the routed run's at the same figure. Hours
are comparable only between runs that had the same machine to themselves. Runs that start from the weights of others have no
speedup.</li>
</ul></section>"""

STYLE = (
    """
:root{--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d5dae0;--head:#f3f5f7;--link:#0a58a8;
--c0:#0b66a8;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#b91c4b;--c5:#0f766e;--c6:#8a6100;--c7:#4b5563}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#a3acb7;--line:#343b44;--head:#1d2229;--link:#7cb8f2;
--c0:#62b0ef;--c1:#fb923c;--c2:#5fd38a;--c3:#c99bff;--c4:#ff8aa8;--c5:#4fd1c5;--c6:#e3b341;--c7:#b4bdc8}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.5rem 1.25rem 4rem;max-width:72rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem}
h2{font-size:1.35rem;line-height:1.25;margin:2.5rem 0 .75rem;padding-top:1rem;border-top:2px solid var(--line)}
h3{font-size:1.08rem;margin:1.75rem 0 .5rem}
h4{font-size:1rem;margin:1rem 0 .25rem}
h5{font-size:.92rem;margin:.75rem 0 .25rem;color:var(--soft);font-weight:600}
a{color:var(--link)}
.subtitle,.note,.notes,figcaption{color:var(--soft)}
.subtitle{margin:0}
.note,.notes{font-size:.88rem}
.notes{margin:.5rem 0 0;padding-left:1.1rem}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;padding:0;margin:.75rem 0 0}
.table{overflow-x:auto;margin:1rem 0 0}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.25rem 0 .4rem}
th,td{padding:.45rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{background:var(--head);font-weight:600;vertical-align:bottom}
tbody th{font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.25rem;margin:.25rem 0 .5rem;padding:0;font-size:.92rem}
.legend li{display:flex;align-items:center;gap:.5rem}
.swatch{width:36px;height:14px;flex:none}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem 1.5rem}
.charts figure{max-width:36rem}
figure{margin:0;min-width:0}
figcaption{font-size:.88rem;margin-top:.25rem}
.chart{display:block;width:100%;height:auto}
.chart text{font-family:inherit;fill:var(--soft)}
.tick{font-size:11.5px}
.axis{font-size:12.5px}
.grid{stroke:var(--line);stroke-width:.7}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dashed{stroke-dasharray:6 4}
.band{opacity:.18;stroke:none}
"""
    + "".join(f".line.c{i}{{stroke:var(--c{i})}}.mark.c{i},.band.c{i}{{fill:var(--c{i})}}\n" for i in range(8))
    + """
.grids{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1rem 1.5rem}
.grids figure{max-width:36rem}
.grids img{width:100%;height:auto;border:1px solid var(--line);border-radius:4px;background:#fff}
dl{margin:.25rem 0 .5rem;display:grid;grid-template-columns:max-content 1fr;gap:.15rem .9rem;font-size:.9rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;min-width:0}
code{font:.86em/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
@media screen and (max-width:44rem){
body{padding:1rem 1rem 3rem}
.table{overflow:visible}
table,tbody,tr,th,td,caption{display:block;width:100%}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
tr{border:1px solid var(--line);border-radius:6px;padding:.4rem .75rem;margin:0 0 .6rem}
tbody th{border:0;padding:.2rem 0 .3rem}
td{display:flex;justify-content:space-between;gap:1rem;border:0;border-top:1px solid var(--line);padding:.3rem 0;text-align:right;
overflow-wrap:anywhere}
td::before{content:attr(data-label);color:var(--soft);text-align:left;flex:none;max-width:50%;overflow-wrap:anywhere}
dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:.35rem}
}
@media print{
:root{--bg:#fff;--fg:#000;--soft:#444;--line:#bbb;--head:#eee;--link:#000;
--c0:#0b66a8;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#b91c4b;--c5:#0f766e;--c6:#8a6100;--c7:#4b5563}
@page{margin:14mm}
body{max-width:none;padding:0;font-size:10pt}
nav{display:none}
table{font-size:8.2pt}
th,td{padding:.25rem .35rem}
.table{overflow:visible}
.charts,.grids{grid-template-columns:1fr 1fr;gap:.5rem 1rem}
figure,tr,.legend,dl{break-inside:avoid}
.legend{break-after:avoid}
h2,h3,h4,h5,caption{break-after:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""
)
