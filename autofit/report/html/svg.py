"""SVG drawing: a picture that grows element by element, scales, and ticks at round numbers.

Colours are names of CSS classes, so that one drawing serves light, dark and paper. A picture that
stands alone brings the style along.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from autofit.core.quoting import xml_text

_DECADES = 200  # between the ends of a logarithmic axis, as far as 2 and 5 are worth a tick
_FONT = 6.1  # pixels that a letter of a label takes on average

At = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels: `low` to `start`, `high` to `end`, in proportion or by logarithm.

    Attributes:
        marked: its ticks, in place of round numbers.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    marked: tuple[float, ...] = ()

    def __call__(self, number: float) -> float:
        low = self.low
        high = self.high
        if self.logarithmic:
            low = math.log(low)
            high = math.log(high)
            number = math.log(max(number, 1e-300))

        share = 0.5
        if high > low:
            share = (number - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers within, or those that are marked."""
        if self.marked:
            return list(self.marked)
        if self.logarithmic:
            return powers(self.low, self.high)

        return round_numbers(self.low, self.high, about)


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, about so many."""
    if not high > low:
        return [low]

    least = (high - low) / max(1, about)
    exponent = math.floor(math.log10(least))
    power = 10.0**exponent
    step = power
    for factor in (2, 5, 10):
        if step < least * 0.999:
            step = power * factor

    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    numbers = []
    for index in range(first, last + 1):
        number = index * step
        numbers.append(round(number, 12))
    return numbers


def powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; powers alone where that would be many."""
    factors = [1]
    if high / low <= _DECADES:
        factors = [1, 2, 5]
    lowest = math.floor(math.log10(low))
    highest = math.ceil(math.log10(high))

    numbers = []
    for exponent in range(lowest, highest + 1):
        for factor in factors:
            number = factor * 10.0**exponent
            if low * 0.999 <= number <= high * 1.001:
                numbers.append(number)

    return numbers


class Picture:
    """An SVG of a fixed drawing size, which a page may scale."""

    def __init__(
        self,
        width: int,
        height: int,
        label: str,
        *,
        interactive: bool = False,
    ) -> None:
        self.width = width
        self.height = height
        self.label = label
        self.root = Element(
            "svg",
            {
                "viewBox": f"0 0 {width} {height}",
                "role": "group" if interactive else "img",
                "aria-label": xml_text(label),
                "class": "picture",
                "style": f"max-width:{width}px",
            },
        )

    def draw(
        self,
        tag: str,
        text: str | None = None,
        *,
        into: Element | None = None,
        **attributes: object,
    ) -> Element:
        """Add an element.

        Args:
            into: the element that holds it; the picture itself where there is none.
            attributes: `kind` is its class, other names have hyphens for underscores, None is left
                out.
        """
        given = {}
        for name, value in attributes.items():
            if value is not None:
                if name == "kind":
                    name = "class"
                given[name.replace("_", "-")] = _figure(value)

        element = SubElement(self.root if into is None else into, tag, given)
        if text is not None:
            element.text = xml_text(text)
        return element

    def titled(
        self,
        tag: str,
        title: str,
        *,
        into: Element | None = None,
        **attributes: object,
    ) -> Element:
        """Add an element that shows a title when it is pointed at."""
        element = self.draw(tag, None, into=into, **attributes)
        self.draw("title", title, into=element)

        return element

    def line(self, start: At, end: At, kind: str) -> None:
        """Draw a straight line."""
        x1, y1 = start
        x2, y2 = end
        self.draw(
            "line",
            x1=x1,
            y1=y1,
            x2=x2,
            y2=y2,
            kind=kind,
        )

    def path(self, d: str, kind: str | None = None, into: Element | None = None) -> None:
        """Draw a path; `d` is written as SVG has it."""
        self.draw("path", into=into, d=d, kind=kind)

    def circle(
        self,
        at: At,
        radius: float,
        kind: str | None = None,
        into: Element | None = None,
    ) -> None:
        """Draw a circle around a point."""
        x, y = at
        self.draw(
            "circle",
            into=into,
            cx=x,
            cy=y,
            r=radius,
            kind=kind,
        )

    def cross(
        self,
        at: At,
        radius: float,
        into: Element,
        kind: str | None = None,
    ) -> None:
        """Draw two crossing strokes."""
        x, y = at
        left = x - radius
        top = y - radius
        arm = f"{2 * radius:g}"

        falling = f"M{left:.1f},{top:.1f}l{arm},{arm}"
        rising = f"m0,-{arm}l-{arm},{arm}"
        self.path(falling + rising, kind, into)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        kind: str = "label",
        anchor: str | None = None,
    ) -> None:
        """Draw words whose baseline begins, or as anchored, at a point."""
        self.draw(
            "text",
            words,
            x=x,
            y=y,
            kind=kind,
            text_anchor=anchor,
        )

    def markup(self) -> str:
        """The element as it stands inside a page."""
        return tostring(self.root, encoding="unicode")

    def document(self, style: str) -> str:
        """A file of its own, with its style."""
        root = Element("svg", self.root.attrib)
        root.set("xmlns", "http://www.w3.org/2000/svg")
        root.set("width", str(self.width))
        root.set("height", str(self.height))

        SubElement(root, "style").text = style
        paper = {"class": "paper", "width": "100%", "height": "100%"}
        SubElement(root, "rect", paper)
        root.extend(list(self.root))

        markup = tostring(root, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{markup}\n'


class Plot(Picture):
    """A picture with an axis of numbers in each direction."""

    def __init__(
        self,
        size: tuple[int, int],
        label: str,
        *,
        across: Scale,
        up: Scale,
        interactive: bool = False,
    ) -> None:
        super().__init__(*size, label, interactive=interactive)
        self.across = across
        self.up = up

    def at(self, x: float, y: float) -> At:
        """Where a pair of numbers is drawn, in pixels."""
        return self.across(x), self.up(y)

    def frame(self, titles: tuple[str, str], ticks: tuple[int, int]) -> None:
        """Draw both axes with about so many round ticks and their titles; no box and no grid."""
        title_across, title_up = titles
        ticks_across, ticks_up = ticks
        left = self.across.start
        right = self.across.end
        bottom = self.up.start
        top = self.up.end
        self.line((left, bottom), (right, bottom), "axis")
        self.line((left, bottom), (left, top), "axis")

        for number in self.across.ticks(ticks_across):
            x = self.across(number)
            self.line((x, bottom), (x, bottom + 4), "axis")
            self.text(x, bottom + 16, _tick(number), anchor="middle", kind="tick")
        self.ticks_up(ticks_up)

        self.text(right, bottom + 32, title_across, anchor="end", kind="title")
        self.text(4, top - 10, title_up, kind="title")

    def ticks_up(self, about: int) -> None:
        """Draw the ticks of the upright axis."""
        left = self.across.start
        for number in self.up.ticks(about):
            y = self.up(number)
            self.line((left - 4, y), (left, y), "axis")
            self.text(left - 7, y + 3.5, _tick(number), anchor="end", kind="tick")


def steps(points: Sequence[At]) -> str:
    """The path of a stair through points: across first, then up or down."""
    (left, top), *others = points
    path = f"M{_figure(left)},{_figure(top)}"
    for x, y in others:
        path += f"H{_figure(x)}V{_figure(y)}"

    return path


def polyline(points: Iterable[At]) -> str:
    """The path of straight lines through points."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def width_of(words: str) -> float:
    """About how wide a label is."""
    return _FONT * len(words)


def apart(positions: Iterable[float], least: float) -> list[float]:
    """Positions in rising order, each moved to at least that far behind the one before."""
    moved: list[float] = []
    for position in sorted(positions):
        if moved:
            position = max(position, moved[-1] + least)
        moved.append(position)

    return moved


def _tick(number: float) -> str:
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:g}"


def _figure(value: object) -> str:
    """The value of an attribute; a fraction to a tenth of a pixel."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return xml_text(str(value))
