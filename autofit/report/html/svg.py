"""What pictures are drawn with: an SVG that grows element by element, scales, and ticks at round numbers.

Colours are names of CSS classes, so that one drawing serves light, dark and paper; a picture that stands alone brings
the style along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

_SVG = "http://www.w3.org/2000/svg"
_DECADES = 200  # between the ends of a logarithmic axis, as far as 2 and 5 are worth a tick
_FONT = 6.1  # pixels that a letter of a label takes on average


@dataclass(frozen=True)
class Scale:
    """Where a number is drawn: `low` at `start`, `high` at `end`, in proportion or by its logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, number: float) -> float:
        low, high, at = self.low, self.high, number
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(max(number, 1e-300))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers within."""
        return powers(self.low, self.high) if self.logarithmic else round_numbers(self.low, self.high, about)


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; powers alone where that would be many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low <= _DECADES else (1,)
    found = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [each for each in found if low * 0.999 <= each <= high * 1.001]


class Picture:
    """An SVG of a fixed drawing size, which a page may scale."""

    def __init__(self, width: int, height: int, label: str, *, interactive: bool = False) -> None:
        self.width = width
        self.height = height
        self.label = label
        self.root = ElementTree.Element(
            "svg",
            {
                "viewBox": f"0 0 {width} {height}",
                "role": "group" if interactive else "img",
                "aria-label": label,
                "class": "picture",
                "style": f"max-width:{width}px",
            },
        )

    def draw(
        self, tag: str, text: str | None = None, *, into: ElementTree.Element | None = None, **attributes: object
    ) -> ElementTree.Element:
        """Add an element: `kind` is its class, other names have hyphens for underscores, None is left out."""
        given = {_name(name): _figure(each) for name, each in attributes.items() if each is not None}
        made = ElementTree.SubElement(self.root if into is None else into, tag, given)
        made.text = text
        return made

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        """A straight line."""
        self.draw("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], kind=kind)

    def text(self, x: float, y: float, words: str, *, kind: str = "label", anchor: str | None = None) -> None:
        """Words whose baseline begins, or as anchored, at a place."""
        self.draw("text", words, x=x, y=y, kind=kind, text_anchor=anchor)

    def frame(self, across: Scale, up: Scale, *, titles: tuple[str, str], ticks: tuple[int, int] = (6, 5)) -> None:
        """The axes: a range each, ticks at round numbers, and what they are; no box and no grid."""
        bottom, left = up.start, across.start
        self.line((across.start, bottom), (across.end, bottom), "axis")
        self.line((left, up.start), (left, up.end), "axis")
        for number in across.ticks(ticks[0]):
            at = across(number)
            self.line((at, bottom), (at, bottom + 4), "axis")
            self.text(at, bottom + 16, short(number), anchor="middle", kind="tick")
        for number in up.ticks(ticks[1]):
            at = up(number)
            self.line((left - 4, at), (left, at), "axis")
            self.text(left - 7, at + 3.5, short(number), anchor="end", kind="tick")
        self.text(across.end, bottom + 32, titles[0], anchor="end", kind="title")
        self.text(4, up.end - 10, titles[1], kind="title")

    def markup(self) -> str:
        """The element as it stands inside a page."""
        return ElementTree.tostring(self.root, encoding="unicode")

    def document(self, style: str) -> str:
        """A file of its own, with its style."""
        root = ElementTree.Element("svg", {**self.root.attrib, "xmlns": _SVG})
        root.set("width", str(self.width))
        root.set("height", str(self.height))
        ElementTree.SubElement(root, "style").text = style
        ElementTree.SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
        root.extend(list(self.root))
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def steps(points: Sequence[tuple[float, float]]) -> str:
    """The path of a stair through points: across first, then up or down."""
    first, *rest = points
    return f"M{_figure(first[0])},{_figure(first[1])}" + "".join(f"H{_figure(x)}V{_figure(y)}" for x, y in rest)


def width_of(words: str) -> float:
    """About how wide a label is."""
    return _FONT * len(words)


def apart(places: Iterable[float], least: float) -> list[float]:
    """Places, in falling order of size, moved so that each is at least so far above the next one."""
    found: list[float] = []
    for place in sorted(places):
        found.append(max(place, found[-1] + least) if found else place)
    return found


def short(number: float) -> str:
    """A number of an axis."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:g}"


def _name(name: str) -> str:
    return "class" if name == "kind" else name.replace("_", "-")


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)
