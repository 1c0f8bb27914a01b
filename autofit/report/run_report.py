"""What `autofit report` makes of run directories: the page again, its pictures, Markdown, or a comparison of two."""

import importlib.util
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from autofit.core.errors import InputError, describe_error, unknown
from autofit.core.files import expanded, write_atomically
from autofit.core.record import RECORD, Record
from autofit.report.comparison import compare
from autofit.report.html import picture_style, pictures, report_page
from autofit.report.markdown import markdown

FORMATS = ("html", "svg", "png", "md")
_DAMAGED = "Restore it, or let autofit search --resume --out write it again."
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_BROWSER_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SECONDS = 120
_SHARPNESS = 2  # pixels of a PNG for one of the drawing


def report(runs: Sequence[Path], form: str | None, output: Path | None) -> RenderableType:
    """Report on one run, or compare two.

    Args:
        form: one of FORMATS; None: the page, or of two runs a table.
        output: a file, or for pictures a directory; None: in the run directory, or for Markdown nowhere.

    Returns:
        What to print: the paths written, a line each, or the text itself.

    Raises:
        InputError: not a run directory, an unknown format, or it cannot be written.
    """
    if form is not None and form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if len(runs) > 2:
        raise InputError(
            f"{len(runs)} runs were given.", "Give one to report on, or two to compare."
        )
    records = [Record.of_run(run) for run in runs]
    output = output and expanded(output)
    try:
        if len(runs) == 2:
            return _compare(records, [expanded(run).absolute() for run in runs], form, output)
        return _report(records[0], expanded(runs[0]).absolute(), form or "html", output)
    except OSError as error:
        message = f"{error.filename} cannot be written: {error.strerror}."
        raise InputError(message, "Choose another --output.") from error
    except InputError:
        raise
    except Exception as error:  # a digest says only that somebody wrote all of a file
        place = traceback.extract_tb(error.__traceback__)[-1]
        files = " or ".join(str(run / RECORD) for run in runs)
        why = f"{describe_error(error)}, in line {place.lineno} of {Path(place.filename).name}"
        raise InputError(f"nothing can be made of {files}: {why}.", _DAMAGED) from error


def _report(record: Record, directory: Path, form: str, output: Path | None) -> str:
    if form == "md":
        return _text(markdown(record), output)
    if form == "html":
        page = output or directory / "report.html"
        write_atomically(page, report_page(record, directory))
        return str(page)
    folder, drawn = output or directory / "pictures", pictures(record)
    if not drawn:
        raise InputError(
            "there is nothing to draw: nothing was measured to fit.", "See --format md."
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{folder} is a file; there are {len(drawn)} pictures.", "Give a directory as --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{form}" for name in drawn]
    for path, picture in zip(paths, drawn.values(), strict=True):
        document = picture.document(picture_style(alone=True))
        if form == "svg":
            write_atomically(path, document)
        else:
            to_png(document, path, (picture.width, picture.height))
    return "\n".join(map(str, paths))


def _compare(
    records: Sequence[Record], runs: Sequence[Path], form: str | None, output: Path | None
) -> RenderableType:
    if form not in (None, "md"):
        raise InputError(
            f"two runs are compared as a table or as Markdown, not as {form}.", "Use --format md."
        )
    first, second = runs
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    comparison = compare(records[0], records[1], names)
    if form is None and output is None:
        return comparison.to_terminal()
    return _text(comparison.to_markdown(), output)


def _text(text: str, output: Path | None) -> str:
    if output is None:
        return text.rstrip("\n")
    write_atomically(output, text)
    return str(output)


def browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def to_png(svg: str, path: Path, size: tuple[int, int]) -> None:
    """Write an SVG document of that size as a PNG. Raises InputError where there is no converter, or it failed."""
    if importlib.util.find_spec("cairosvg"):
        drawn = importlib.import_module("cairosvg").svg2png(
            bytestring=svg.encode(), scale=_SHARPNESS
        )
        write_atomically(path, drawn)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "picture.svg", Path(folder) / "picture.png"
        source.write_text(svg, encoding="utf-8")
        if converter := shutil.which("rsvg-convert"):
            command = [converter, f"--zoom={_SHARPNESS}", f"--output={made}", str(source)]
        elif chromium := browser():
            shot = (f"--screenshot={made}", f"--window-size={size[0]},{size[1]}")
            profile = (
                f"--user-data-dir={folder}/profile",
                f"--force-device-scale-factor={_SHARPNESS}",
            )
            command = [chromium, *_BROWSER_FLAGS, *profile, *shot, source.as_uri()]
        else:
            message = "a PNG needs a converter, and there is none: neither cairosvg nor rsvg-convert nor a Chromium."
            raise InputError(message, "Install one (pip install cairosvg), or use --format svg.")
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            message = f"{command[0]} took more than {_SECONDS} s to write {path}."
            raise InputError(message, "Use --format svg.") from error
        if not made.exists():
            last = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise InputError(f"{command[0]} wrote no {path}: {last}.", "Use --format svg.")
        write_atomically(path, made.read_bytes())
