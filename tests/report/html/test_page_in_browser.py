"""The page in a real browser: it draws without an error, computes, sorts and can be walked through by keys."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.record import Record
from autofit.report.html import report_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
# What a reader does, and what they then see.
ACTIONS = """
<script>
const seen = {};
const form = document.querySelector(".duration");
form.amount.value = "2.5M"; form.epochs.value = "4";
form.dispatchEvent(new Event("input", {bubbles: true}));
seen.hours = form.querySelector("output").textContent;
const rows = () => [...document.querySelectorAll(".sortable tbody tr")].map((row) => Number(row.id.slice(6)));
const headers = [...document.querySelectorAll(".sortable th button")];
const rate = headers.find((button) => button.textContent === "tokens/s");
rate.click(); seen.rising = rows();
rate.click(); seen.falling = rows();
seen.sorted = rate.parentNode.getAttribute("aria-sort");
const picture = [...document.querySelectorAll("svg")].find((svg) => svg.getBoundingClientRect().width > 0);
const dots = [...picture.querySelectorAll("a")];
seen.stops = dots.filter((dot) => dot.getAttribute("tabindex") === "0").length;
const first = dots.find((dot) => dot.getAttribute("tabindex") === "0");
first.focus();
seen.tip = document.getElementById("tip").textContent;
first.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
seen.next = document.activeElement !== first && dots.includes(document.activeElement);
const step = [...document.querySelectorAll(".timeline svg")].find((svg) => svg.getBoundingClientRect().width > 0);
step.focus();
seen.peak = document.getElementById("tip").textContent;
step.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
seen.after = document.getElementById("tip").textContent;
seen.wider = document.documentElement.scrollWidth - window.innerWidth;
document.body.dataset.seen = JSON.stringify(seen);
</script></body>"""


def chromium(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture
def page(record: Callable[..., Record], tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(report_page(record(), tmp_path))
    return path


@pytest.mark.parametrize(
    "flags", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"]
)
def test_it_draws_without_an_error(page: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    picture = tmp_path / "page.png"
    done = chromium(page, tmp_path, f"--screenshot={picture}", "--window-size=1100,3000", *flags)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000


@pytest.mark.parametrize("width", [1100, 500])
def test_what_a_reader_does(page: Path, tmp_path: Path, width: int) -> None:
    page.write_text(page.read_text().replace("</body>", ACTIONS))
    done = chromium(page, tmp_path, "--dump-dom", f"--window-size={width},900")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert seen["hours"] == "26 minutes"  # 10 million tokens at 6,400 a second
    assert seen["rising"] == [1, 5, 3, 4, 2, 0, 6, 7]  # what has no figure stays at the end
    assert seen["falling"] == [2, 4, 3, 5, 1, 0, 6, 7]
    assert seen["sorted"] == "descending"
    assert seen["stops"] == 1
    assert seen["tip"].startswith("probe ")
    assert seen["next"]
    assert seen["peak"].startswith(
        "60 % of the step: 1.5 GiB \u2014 temporary 0.6, activations 0.3, gradients 0.225, "
    )
    assert seen["after"].startswith("100 % of the step: 0.75 GiB ")
    assert seen["wider"] <= 0  # nothing has to be scrolled sideways but the table of trials
