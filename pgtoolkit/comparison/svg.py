"""A line chart as an SVG element: mean curves with their range, readable on light and dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

COLORS = ("#2a78c2", "#d9731a", "#2e9e5b", "#c2417c", "#8a63c9", "#a8862a", "#2aa5a5", "#8c8c8c")
DASHES = ("", "6 3", "2 3")
"""Lines from the ninth on repeat the colours, dashed."""

_WIDTH, _HEIGHT = 620, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 44


@dataclass
class Line:
    """One line of a chart. points: (x, mean, lowest, highest). thin: (x, y) curves of its single runs."""

    label: str
    points: list[tuple[float, float, float, float]]
    thin: list[tuple[list[float], list[float]]]


def style(place: int) -> tuple[str, str]:
    """(colour, dash pattern) of the line at this place."""
    return COLORS[place % len(COLORS)], DASHES[place // len(COLORS) % len(DASHES)]


def chart(lines: list[Line], title: str, x_label: str, y_label: str) -> str:
    """The SVG element, with `title` as its accessible name."""
    xs = [x for line in lines for x, *_ in line.points] + [x for line in lines for thin in line.thin for x in thin[0]]
    ys = [y for line in lines for _, _, *ends in line.points for y in ends]
    ys += [y for line in lines for thin in line.thin for y in thin[1]]
    start = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n<title>{escape(title)}</title>'
    )
    if not xs:
        middle = f'x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle"'
        return f"{start}\n<text {middle}>no run has recorded this</text>\n</svg>"
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    to_x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    room = 0.04 * (max(ys) - min(ys))  # a curve at its limit is not to lie on the frame
    to_y = _scale(min(*ys, y_ticks[0]) - room, max(*ys, y_ticks[-1]) + room, _HEIGHT - _BOTTOM, _TOP)
    parts = [start, *_axes(x_ticks, y_ticks, to_x, to_y, x_label, y_label)]
    for place, line in enumerate(lines):
        parts += _line(line, *style(place), to_x, to_y)
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)] or [low]


def short(value: float) -> str:
    """A tick's number: 12k rather than 12000."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.4g}"


def _scale(low, high, first, last):
    def place(value):
        share = (value - low) / (high - low) if high > low else 0.5
        return round(first + share * (last - first), 1)

    return place


def _axes(x_ticks, y_ticks, to_x, to_y, x_label, y_label):
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = ['<g class="axes" stroke="currentColor" fill="none">']
    parts += [f'<path opacity=".15" d="M{_LEFT} {to_y(tick)}H{right}"/>' for tick in y_ticks]
    parts.append(f'<path opacity=".6" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    parts += [f'<path opacity=".6" d="M{to_x(tick)} {bottom}v4"/>' for tick in x_ticks]
    parts.append('</g>\n<g class="labels" fill="currentColor" font-size="12">')
    parts += [
        f'<text x="{_LEFT - 7}" y="{to_y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>' for tick in y_ticks
    ]
    parts += [f'<text x="{to_x(tick)}" y="{bottom + 18}" text-anchor="middle">{short(tick)}</text>' for tick in x_ticks]
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(13 {middle_y}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text></g>'
    )
    return parts


def _line(line, color, dash, to_x, to_y):
    parts = [f'<g stroke="{color}" fill="none"><title>{escape(line.label)}</title>']
    if any(low < high for *_, low, high in line.points):
        upper = [(x, high) for x, _, _, high in line.points]
        lower = [(x, low) for x, _, low, _ in reversed(line.points)]
        band = _path([*upper, *lower], to_x, to_y)
        parts.append(f'<path class="band" stroke="none" fill="{color}" opacity=".16" d="{band}Z"/>')
    for x, y in line.thin:
        parts.append(f'<path class="run" opacity=".55" d="{_path(_few(x, y), to_x, to_y)}"/>')
    if line.points:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        points = _path([(x, mean) for x, mean, *_ in line.points], to_x, to_y)
        parts.append(f'<path class="mean" stroke-width="2.2"{dashed} d="{points}"/>')
    return [*parts, "</g>"]


def _path(points, to_x, to_y):
    return "M" + "L".join(f"{to_x(x)} {to_y(y)}" for x, y in points)


def _few(x, y, most=200):
    """At most about `most` of the points, the last one among them: long runs keep the page small."""
    points = list(zip(x, y, strict=True))
    stride = -(-len(points) // most)
    return points[:-1:stride] + points[-1:]
