"""A chart as marks on a plane: layout, smoothing, thinning. Knows nothing of files, runs' metrics or formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from titanlite.tools.plot_scale import Axis, tick_texts

Point = tuple[float, float]

# Light and dark. The runs' colors are Okabe and Ito's, which color-blind people can tell apart, in an order that
# puts the most different first; the dark ones are lightened, their yellow is too pale for a light page.
RUN_COLOURS = [
    ("#0072b2", "#4aa8e0"),
    ("#d55e00", "#f58a4b"),
    ("#009e73", "#2fc79a"),
    ("#b9579a", "#e39ac8"),
    ("#d99500", "#f2bd42"),
    ("#4a4f57", "#c3c8d0"),
    ("#45a9e6", "#9bd7ff"),
    ("#7a4b1e", "#c79a6b"),
]
THEME = {
    "page": ("#f4f5f7", "#111418"),
    "card": ("#ffffff", "#1a1e24"),
    "edge": ("#e1e4e8", "#2a3038"),
    "ink": ("#1c2128", "#e8eaed"),
    "muted": ("#646c77", "#98a1ad"),
    "grid": ("#eceef1", "#272d35"),
    "axis": ("#b4bac3", "#4a525d"),
    **{f"run{i}": pair for i, pair in enumerate(RUN_COLOURS)},
}
WIDTH, MARGIN, GAP = 1240.0, 36.0, 16.0  # of a page, around it, and between charts


@dataclass(frozen=True)
class Curve:
    """Points in order of x; y may be NaN or infinite. Sparse ones get rings, and are never smoothed."""

    run: int
    name: str
    points: list[Point]
    sparse: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: list[Curve]
    may_log: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Page:
    """Charts under a title and a table with a row per run, in the order of the runs' colors."""

    title: str
    subtitle: str
    columns: list[str]
    rows: list[list[str]]
    over: str
    charts: list[Chart]


@dataclass(frozen=True)
class Line:
    """A polyline; `color` is a theme's name for it, `kind` says what it shows: grid, raw, smooth or validation."""

    kind: str
    points: list[Point]
    color: str
    width: float
    opacity: float = 1.0


@dataclass(frozen=True)
class Dot:
    """A ring."""

    kind: str
    x: float
    y: float
    color: str
    radius: float


@dataclass(frozen=True)
class Words:
    kind: str
    x: float
    y: float  # of the baseline
    text: str
    color: str
    size: float
    anchor: str = "start"  # or middle, or end


@dataclass(frozen=True)
class Reading:
    """What a hover reads from a curve: place, x, and y, which JSON can't hold where it is not finite."""

    run: int
    name: str
    points: list[tuple[float, float, float, float | str]]


@dataclass
class Drawing:
    """Marks in the order of painting, and the box that the curves lie in."""

    width: float
    height: float
    left: float
    top: float
    right: float
    bottom: float
    marks: list[Line | Dot | Words] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


def drawings(page: Page) -> list[Drawing]:
    """The first over the whole width, the others in one row below."""
    x, wide = x_axis(page.charts), WIDTH - 2 * MARGIN
    narrow = (wide - GAP * (len(page.charts) - 2)) / (len(page.charts) - 1)
    return [
        draw(chart, x, page.over, narrow if i else wide, 290 if i else 430) for i, chart in enumerate(page.charts)
    ]


def x_axis(charts: list[Chart]) -> Axis:
    """One for all charts; from zero unless the runs start far from it."""
    values = [x for chart in charts for curve in chart.curves for x, _ in curve.points]
    low, high = min(values), max(values)
    low = 0 if low < high / 5 or low == high else low
    return Axis(low, max(high, low + 1))


def y_axis(chart: Chart) -> Axis:
    """Over all finite values; logarithmic where most of a linear one would be given to a few high values."""
    values = [y for curve in chart.curves for _, y in curve.points if math.isfinite(y)] or [0.0, 1.0]
    low, high = min(values), max(values)
    if chart.may_log and low > 0 and high > 2.5 * median(values):
        margin = (high / low) ** 0.05
        return Axis(low / margin, high * margin, log=True)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Axis(0.0 if chart.from_zero and low >= 0 else low - margin, high + margin)


def draw(chart: Chart, x: Axis, over: str, width: float, height: float) -> Drawing:
    """The marks of a chart of this size."""
    y = y_axis(chart)
    top, bottom = 62.0, height - 46.0
    y_ticks = y.ticks(bottom - top, 28)
    y_texts = tick_texts(y_ticks, y.log)
    left, right = 30.0 + 6.5 * max(map(len, y_texts), default=0), width - 24.0
    drawing = Drawing(width, height, left, top, right, bottom)
    marks = drawing.marks
    parts = [chart.unit, "log scale" if y.log else ""]
    if any(not math.isfinite(value) for curve in chart.curves for _, value in curve.points):
        parts.append("crosses: NaN or infinite")
    marks.append(Words("title", 20, 30, chart.title, "ink", 16))
    marks.append(Words("unit", 20, 47, " · ".join(filter(None, parts)), "muted", 12))
    for value, text in zip(y_ticks, y_texts, strict=True):
        at = bottom - y.share(value) * (bottom - top)
        marks.append(Line("grid", [(left, at), (right, at)], "grid", 1))
        marks.append(Words("tick-y", left - 8, at + 4, text, "muted", 12, "end"))
    x_ticks = x.ticks(right - left, 85, whole=True)
    marks.append(Line("axis", [(left, bottom), (right, bottom)], "axis", 1))
    for value, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        at = left + x.share(value) * (right - left)
        marks.append(Line("axis", [(at, bottom), (at, bottom + 4)], "axis", 1))
        marks.append(Words("tick-x", at, bottom + 18, text, "muted", 12, "middle"))
    marks.append(Words("over", (left + right) / 2, bottom + 36, over, "muted", 12, "middle"))
    bold = [mark for curve in chart.curves for mark in _curve(curve, x, y, drawing)]
    marks.extend(bold)  # over every run's thin curve, which _curve put down at once
    return drawing


def _curve(curve: Curve, x: Axis, y: Axis, drawing: Drawing) -> list[Line | Dot]:
    """Put down what lies below; return what lies above."""
    color, above = f"run{curve.run}", list[Line | Dot]()
    wide, high = drawing.right - drawing.left, drawing.bottom - drawing.top
    pieces: list[list[Point]] = [[]]  # of finite values
    reading: list[tuple[float, float, float, float | str]] = []
    values: dict[Point, Point] = {}
    crossed = -math.inf
    for at, value in curve.points:
        px = drawing.left + x.share(at) * wide
        if math.isfinite(value):
            place = (px, drawing.bottom - y.share(value) * high)
            values[place] = (at, value)
            pieces[-1].append(place)
            continue
        pieces.append([])
        if px >= crossed + 7:  # a run that diverged has a thousand of them
            crossed, py = px, drawing.top + 2
            for slope in (3, -3):
                above.append(Line("nonfinite", [(px - 3, py - slope), (px + 3, py + slope)], color, 1.6))
            reading.append((px, py, at, {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")))
    for piece in filter(None, pieces):
        smoothed = [] if curve.sparse else smooth(piece)
        off = [abs(a[1] - b[1]) for a, b in zip(piece, smoothed, strict=False)]
        noisy = bool(off) and median(off) > 0.003 * high
        raw = piece if curve.sparse else thin(piece)
        kind = "validation" if curve.sparse else "raw"
        if noisy:
            drawing.marks.append(Line("raw", raw, color, 1, 0.4))
            above.append(Line("smooth", thin(smoothed), color, 2.2))
        elif len(piece) > 1:
            above.append(Line(kind, raw, color, 1.2 if curve.sparse else 2.2))
        if curve.sparse or len(piece) == 1:
            above.extend(Dot(kind, px, py, color, 3.6) for px, py in raw)
        reading.extend((*place, *values[place]) for place in raw)
    drawing.readings.append(Reading(curve.run, curve.name, sorted(reading, key=lambda read: read[0])))
    return above


def smooth(points: list[Point]) -> list[Point]:
    """A moving mean, over a thirtieth of the points, of what the eye sees: the logarithm on a log scale.

    Centred, so that it does not lag. At the start, where curves fall steeply, the window shrinks to stay centred; at
    the end, where they hardly do, it is cut, so that the last value is a mean as well.
    """
    half = max(2, len(points) // 60)
    if len(points) < 6 * half:
        return []
    sums = list(accumulate((y for _, y in points), initial=0.0))
    result: list[Point] = []
    for i, (x, _) in enumerate(points):
        first, end = max(0, i - half), min(len(points), i + min(half, i) + 1)
        result.append((x, (sums[end] - sums[first]) / (end - first)))
    return result


def thin(points: list[Point]) -> list[Point]:
    """At most four points for two pixels of width: first, lowest, highest and last, so that no spike is lost."""
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(int(point[0] / 2), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        if len(column) > 4:
            ends = {0, len(column) - 1}
            ends |= {pick(range(len(column)), key=lambda i: column[i][1]) for pick in (min, max)}  # noqa: B023
            column = [column[i] for i in sorted(ends)]
        kept.extend(column)
    return kept
