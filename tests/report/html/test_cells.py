"""What results, estimates and trainings show of themselves in a notebook."""

import base64
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.estimate import Estimate
from autofit.core.hardware import GIB
from autofit.core.record import Record
from autofit.report.html import trained_html

Make = Callable[..., Record]


def rows(html: str) -> dict[str, str]:
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    return dict(zip(cells[::2], cells[1::2], strict=True))


def picture(html: str) -> ElementTree.Element:
    (drawn,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    return ElementTree.fromstring(base64.b64decode(drawn))


def marks(html: str, kind: str) -> int:
    return sum(kind in each.get("class", "").split() for each in picture(html).iter())


def test_a_result(record: Make) -> None:
    html = record(model="<mine>").result._repr_html_()
    assert "The best config for &lt;mine&gt; on a test&#x27;s CPU within 2.00 GiB" in html
    told = rows(html)
    assert told["Speed"] == "6,400 tokens per second, verified in longer runs"
    assert told["Memory"] == "1.50 of 2.00 GiB, 75 %"
    assert told["Micro-batch"] == "2 samples at a time, 4 times for each update"
    assert marks(html, "dot") == 7  # that were measured, two of them out of memory
    assert "Of 23 configs 8 were measured" in html


def test_a_result_of_which_nothing_fits(record: Make) -> None:
    html = record(best=None, tiers={}).result._repr_html_()
    assert html.startswith("<p>Nothing fits: tiny-llama on")
    assert "<table" not in html


def estimate(**changes: Any) -> Estimate:
    parts = {
        "parameters": 6,
        "gradients": 2,
        "optimizer": 4,
        "activations": 5,
        "temporary": 1,
        "context": 1,
    }
    breakdown = {name: size * GIB for name, size in parts.items()}
    return Estimate(
        Config(precision="bf16"),
        18 * GIB,
        None,
        **{"low": 19 * GIB, "high": 20 * GIB, "breakdown": breakdown} | changes,
    )


def test_an_estimate() -> None:
    budget = Budget(24 * GIB, GIB)
    html = estimate(
        budget=budget,
        step_seconds=1.25,
        samples_per_second=6.4,
        bottleneck="compute",
        utilisation=0.4,
    )._repr_html_()
    told = rows(html)
    assert told["Memory"] == "19.00 to 20.00 GiB, fits 24.00 GiB"
    assert told["- optimizer state"] == "4.00 GiB"
    assert told["Speed"] == "6.4 samples/s"
    assert told["Step"] == "1.25 s, bound by arithmetic, 40 % of the peak rate put to use"
    assert marks(html, "band") == 5
    assert marks(html, "budget") == 1


def test_an_estimate_of_which_little_is_known() -> None:
    html = estimate(high=19 * GIB, breakdown={}, notes=("a & b",))._repr_html_()
    assert rows(html) == {"Memory": "19.00 GiB"}
    assert html.endswith("</div><p>a &amp; b</p>")


@pytest.mark.parametrize("steps", [2, 3000])
def test_a_training(steps: int) -> None:
    losses = [2.0 - step / steps for step in range(steps)]
    html = trained_html(
        losses, [1.5, 1.25], Config(precision="bf16"), samples=8 * steps, seconds=0.5 * steps
    )
    told = rows(html)
    assert told["Steps"] == f"{steps:,} ({8 * steps:,} samples)"
    assert told["Loss"] == f"2 at first, {2.0 - (steps - 1) / steps:.4g} at last"
    assert told["Evaluation"] == "1.5, 1.25"
    assert told["Speed"] == "16 samples/s"
    assert told["Numbers"].startswith("bfloat16 throughout")
    (curve,) = (
        each.get("d", "") for each in picture(html).iter() if each.get("class") == "leading"
    )
    assert 2 <= curve.count(",") <= 430


def test_a_training_that_had_nothing_left_to_do() -> None:
    assert rows(trained_html([], [], {}, samples=0, seconds=0.0)) == {"Steps": "0 (0 samples)"}
    assert "<img" not in trained_html([float("nan")], [], {}, samples=8, seconds=0.0)
