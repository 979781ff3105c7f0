"""Draw curves in a terminal, with the dots of braille characters: two by four in each."""

from __future__ import annotations

from math import isfinite
from string import ascii_uppercase

from rich.text import Text

from hedgerow.sim.runs.plot import mean_curve
from hedgerow.sim.runs.results import Results, cost_named

# Bits of a braille character's dots, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLORS = ("blue", "red", "green", "magenta", "cyan", "yellow")
_AXIS = 10


def terminal_curves(results: Results, x: str, y: str, *, width: int = 80, height: int = 14) -> Text:
    """Return each variant's mean ``y`` over ``x``; of several, each ends at the letter of its legend.

    Raises
    ------
    ValueError
        If ``x`` is not a cost or a run lacks ``y``.
    """
    curves = {}
    for label, seeds in results.variants().items():
        curve = mean_curve([*seeds.values()], x, y)
        curves[label] = [
            (a, b) for a, b in zip(curve.x, curve.mean, strict=True) if isfinite(a) and isfinite(b)
        ]
    known = [point for points in curves.values() for point in points]
    cost = cost_named(x)
    text = Text(f"{y} over {cost.label}{f' ({cost.unit})' if cost.unit else ''}\n")
    if not known:
        return text.append("no finite value\n")
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*known, strict=True))
    columns = max(width - _AXIS - 2, 10)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    letters: dict[tuple[int, int], str] = {}
    for number, points in enumerate(curves.values()):
        color = _COLORS[number % len(_COLORS)]
        dots = [
            (
                round((a - left) / (right - left or 1) * (2 * columns - 1)),
                round((high - b) / (high - low or 1) * (4 * height - 1)),
            )
            for a, b in points
        ]
        for (a, b), (c, d) in zip(dots, dots[1:] or dots, strict=False):
            steps = max(abs(c - a), abs(d - b), 1)
            for step in range(steps + 1):
                column, row = a + round((c - a) * step / steps), b + round((d - b) * step / steps)
                bits = cells.get((row // 4, column // 2), (0, ""))[0]
                cells[row // 4, column // 2] = (bits | _DOTS[row % 4][column % 2], color)
        if dots and len(curves) > 1:
            letters[dots[-1][1] // 4, dots[-1][0] // 2] = ascii_uppercase[number % 26]
    for row in range(height):
        told = f"{high:.4g}" if row == 0 else f"{low:.4g}" if row == height - 1 else ""
        text.append(f"{told:>{_AXIS}} │")
        for column in range(columns):
            bits, color = cells.get((row, column), (0, ""))
            text.append(letters.get((row, column), chr(0x2800 + bits) if bits else " "), color or None)
        text.append("\n")
    ends = f"{left:.4g}", f"{right:.4g}"
    text.append(f"{'':{_AXIS}} └{ends[0]}{ends[1]:>{columns - len(ends[0])}}\n")
    for number, (label, points) in enumerate(curves.items()):
        letter = f"{ascii_uppercase[number % 26]} " if len(curves) > 1 else ""
        end = f"{points[-1][1]:.4g}" if points else "no finite value"
        text.append(f"{letter}{label}: {end}\n", _COLORS[number % len(_COLORS)])
    return text
