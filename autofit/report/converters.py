"""Pictures as PNG, with whatever on this machine can make them: autofit itself draws SVG only."""

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
    """Where a Chromium is, if there is one."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def to_png(svg: str, path: Path, size: tuple[int, int]) -> None:
    """Write an SVG document of that size as a PNG.

    Raises:
        InputError: nothing here can, or what should could not.
    """
    if importlib.util.find_spec("cairosvg"):
        importlib.import_module("cairosvg").svg2png(bytestring=svg.encode(), write_to=str(path), scale=_SHARPNESS)
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "picture.svg"
        source.write_text(svg, encoding="utf-8")
        _run(_command(source, path, size, Path(folder)), path)


def _command(source: Path, path: Path, size: tuple[int, int], folder: Path) -> list[str]:
    converter = shutil.which("rsvg-convert")
    if converter:
        return [converter, f"--zoom={_SHARPNESS}", f"--output={path}", str(source)]
    found = browser()
    if found is None:
        message = "a PNG needs a converter, and there is none: neither cairosvg nor rsvg-convert nor a Chromium."
        raise InputError(message, "Install one (pip install cairosvg), or use --format svg.")
    shot = [f"--screenshot={path}", f"--window-size={size[0]},{size[1]}", f"--force-device-scale-factor={_SHARPNESS}"]
    return [found, *_BROWSER_FLAGS, f"--user-data-dir={folder / 'profile'}", *shot, source.as_uri()]


def _run(command: list[str], path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{command[0]} took more than {_SECONDS} s to write {path}.", "Use --format svg.") from error
    if not path.exists():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(f"{command[0]} wrote no {path}: {last}.", "Use --format svg.")
