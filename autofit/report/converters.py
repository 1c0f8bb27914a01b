"""SVG pictures to PNG by whatever converter this machine has: autofit itself draws SVG only."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from autofit.core.errors import InputError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_BROWSER_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SECONDS = 120
_SHARPNESS = 2  # pixels of a PNG for one of the drawing


def browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def to_png(svg: str, path: Path, size: tuple[int, int]) -> None:
    """Write an SVG document of that size as a PNG.

    Raises:
        InputError: there is no converter, or it failed.
    """
    if importlib.util.find_spec("cairosvg"):
        importlib.import_module("cairosvg").svg2png(bytestring=svg.encode(), write_to=str(path), scale=_SHARPNESS)
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "picture.svg"
        source.write_text(svg, encoding="utf-8")
        if converter := shutil.which("rsvg-convert"):
            _run([converter, f"--zoom={_SHARPNESS}", f"--output={path}", str(source)], path)
        elif chromium := browser():
            shot = (f"--screenshot={path}", f"--window-size={size[0]},{size[1]}")
            profile = (f"--user-data-dir={folder}/profile", f"--force-device-scale-factor={_SHARPNESS}")
            _run([chromium, *_BROWSER_FLAGS, *profile, *shot, source.as_uri()], path)
        else:
            raise InputError(
                "a PNG needs a converter, and there is none: neither cairosvg nor rsvg-convert nor a Chromium.",
                "Install one (pip install cairosvg), or use --format svg.",
            )


def _run(command: list[str], path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{command[0]} took more than {_SECONDS} s to write {path}.", "Use --format svg.") from error
    if not path.exists():
        last = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise InputError(f"{command[0]} wrote no {path}: {last}.", "Use --format svg.")
