"""A roofline (Williams, Waterman, Patterson 2009): operations a second over operations per byte, both logarithmic.

Above the points stands what the machine's bandwidth and matmul rate allow. In characters for a terminal, or as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

COLUMNS, LINES = 66, 16
WIDTH, HEIGHT, MARGIN, LEGEND = 720, 440, 60, 18
MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Point(NamedTuple):
    """Something measured: operations per byte, operations a second."""

    label: str
    intensity: float
    flops: float


@dataclass(frozen=True, slots=True)
class Axes:
    """The range of both axes, in powers of ten, and the roof above it."""

    bandwidth: float
    peak: float
    left: float
    right: float
    bottom: float
    top: float

    def roof(self, intensity: float) -> float:
        return min(self.bandwidth * intensity, self.peak)

    def x(self, intensity: float) -> float:
        """From 0 (left) to 1."""
        return (math.log10(intensity) - self.left) / (self.right - self.left)

    def y(self, flops: float) -> float:
        """From 0 (bottom) to 1."""
        return (math.log10(flops) - self.bottom) / (self.top - self.bottom)


def axes(points: Sequence[Point], bandwidth: float, peak: float) -> Axes:
    """Axes on which all points and the roof's ridge can be seen."""
    ridge = peak / bandwidth
    left = math.log10(min(*(p.intensity for p in points), ridge)) - 0.3
    right = math.log10(max(*(p.intensity for p in points), ridge)) + 0.6
    bottom = math.log10(min(*(p.flops for p in points), bandwidth * 10**left)) - 0.1
    top = math.log10(max(*(p.flops for p in points), peak)) + 0.3
    return Axes(bandwidth, peak, left, right, bottom, top)


def text_plot(points: Sequence[Point], bandwidth: float, peak: float) -> list[str]:
    """Lines of at most 80 characters: the plot, and what each letter stands for."""
    a = axes(points, bandwidth, peak)
    grid = [[" "] * COLUMNS for _ in range(LINES)]

    def put(intensity: float, flops: float, mark: str) -> None:
        column = min(max(round(a.x(intensity) * (COLUMNS - 1)), 0), COLUMNS - 1)
        line = LINES - 1 - min(max(round(a.y(flops) * (LINES - 1)), 0), LINES - 1)
        taken = grid[line][column]
        grid[line][column] = "*" if taken not in " .-/" and mark not in "-/" else mark

    for i in range(COLUMNS):
        intensity = 10 ** (a.left + (a.right - a.left) * i / (COLUMNS - 1))
        put(intensity, a.roof(intensity), "/" if intensity < peak / bandwidth else "-")
    for mark, point in zip(_marks(len(points)), points, strict=True):
        put(point.intensity, point.flops, mark)
    lines = []
    for i, row in enumerate(grid):
        value = 10 ** (a.bottom + (a.top - a.bottom) * (LINES - 1 - i) / (LINES - 1))
        axis = _short(value) if i % 5 == 0 else ""
        lines.append(f"{axis:>8} |{''.join(row)}".rstrip())
    low, middle, high = (_short(10 ** (a.left + (a.right - a.left) * f)) for f in (0, 0.5, 1))
    lines.append(" " * 9 + "+" + "-" * COLUMNS)
    half = COLUMNS // 2
    lines.append(" " * 10 + low.ljust(half - 2) + middle + high.rjust(COLUMNS - half + 2 - len(middle)))
    lines.append(" " * 10 + "FLOP per byte; upwards FLOP/s; * is more than one")
    return lines + [f"{mark:>9}  {point.label}" for mark, point in zip(_marks(len(points)), points, strict=True)]


def svg_plot(points: Sequence[Point], bandwidth: float, peak: float, title: str) -> str:
    """The same as an SVG document."""
    a = axes(points, bandwidth, peak)
    height = HEIGHT + LEGEND * (len(points) + 1)

    def x(intensity: float) -> float:
        return MARGIN + a.x(intensity) * (WIDTH - 2 * MARGIN)

    def y(flops: float) -> float:
        return HEIGHT - MARGIN - a.y(flops) * (HEIGHT - 2 * MARGIN)

    def label(px: float, py: float, text: str, anchor: str = "middle") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        label(WIDTH / 2, MARGIN / 2, title),
    ]
    for power in range(math.ceil(a.left), math.floor(a.right) + 1):
        parts.append(_line(x(10**power), y(10**a.bottom), x(10**power), y(10**a.top), "#ddd"))
        parts.append(label(x(10**power), HEIGHT - MARGIN + 16, _short(10**power)))
    for power in range(math.ceil(a.bottom), math.floor(a.top) + 1):
        parts.append(_line(x(10**a.left), y(10**power), x(10**a.right), y(10**power), "#ddd"))
        parts.append(label(MARGIN - 6, y(10**power) + 4, _short(10**power), "end"))
    parts.append(label(WIDTH / 2, HEIGHT - MARGIN + 36, "FLOP per byte (upwards: FLOP/s)"))
    ridge, start, end = peak / bandwidth, 10**a.left, 10**a.right
    parts.append(_line(x(start), y(a.roof(start)), x(ridge), y(peak), "#c00"))
    parts.append(_line(x(ridge), y(peak), x(end), y(peak), "#c00"))
    for i, (mark, point) in enumerate(zip(_marks(len(points)), points, strict=True)):
        parts.append(f'<circle cx="{x(point.intensity):.1f}" cy="{y(point.flops):.1f}" r="4" fill="#06c"/>')
        parts.append(label(x(point.intensity) + 7, y(point.flops) + 4, mark, "start"))
        parts.append(label(MARGIN, HEIGHT + LEGEND * i, f"{mark}  {point.label}", "start"))
    return "\n".join([*parts, "</svg>\n"])


def _marks(count: int) -> list[str]:
    return [MARKS[i] if i < len(MARKS) else "+" for i in range(count)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _short(value: float) -> str:
    """Two digits and a unit: 4.4T, 790G, 0.5."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.2g}"
