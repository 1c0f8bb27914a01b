"""What `autofit report` makes of run directories: the page again, its pictures, Markdown, or a
comparison of two."""

import importlib.util
import shutil
import subprocess
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
_SECONDS = 120  # that a converter may take
_SHARPNESS = 2  # pixels of a PNG for one of the drawing


def report(runs: Sequence[Path], form: str | None, output: Path | None) -> RenderableType:
    """Report on one run, or compare two.

    Args:
        form: one of FORMATS; None: the page, or of two runs a table.
        output: a file, or for pictures a directory; None: in the run directory, or for Markdown
            nowhere.

    Returns:
        What to print: the paths written, a line each, or the text itself.

    Raises:
        InputError: not a run directory, an unknown format, or it cannot be written.
    """
    if form is not None and form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if len(runs) > 2:
        remedy = "Give one to report on, or two to compare."
        raise InputError(f"{len(runs)} runs were given.", remedy)

    records = [Record.of_run(run) for run in runs]
    output = output and expanded(output)
    directories = [expanded(run).absolute() for run in runs]
    try:
        if len(runs) == 2:
            return _compare(records, directories, form, output)
        return _report(records[0], directories[0], form or "html", output)
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


def _report(
    record: Record,
    directory: Path,
    form: str,
    output: Path | None,
) -> str:
    """Write a report on one run, or give it back as text."""
    if form == "md":
        return _text(markdown(record), output)
    if form == "html":
        page = output or directory / "report.html"
        write_atomically(page, report_page(record, directory))
        return str(page)

    folder = output or directory / "pictures"
    drawn = pictures(record)
    if not drawn:
        message = "there is nothing to draw: nothing was measured to fit."
        raise InputError(message, "See --format md.")

    if folder.exists() and not folder.is_dir():
        message = f"{folder} is a file; there are {len(drawn)} pictures."
        raise InputError(message, "Give a directory as --output.")

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in drawn.items():
        path = folder / f"{name}.{form}"
        document = picture.document(picture_style(alone=True))
        if form == "svg":
            write_atomically(path, document)
        else:
            to_png(document, path)

        paths.append(str(path))

    return "\n".join(paths)


def _compare(
    records: Sequence[Record],
    runs: Sequence[Path],
    form: str | None,
    output: Path | None,
) -> RenderableType:
    """Compare two runs, by the names of their directories where those differ."""
    if form not in (None, "md"):
        message = f"two runs are compared as a table or as Markdown, not as {form}."
        raise InputError(message, "Use --format md.")

    first, second = runs
    names = (first.name, second.name)
    if first.name == second.name:
        names = (str(first), str(second))

    comparison = compare(records[0], records[1], names)
    if form is None and output is None:
        return comparison.to_terminal()
    return _text(comparison.to_markdown(), output)


def _text(text: str, output: Path | None) -> str:
    """The text, or the path that it was written to."""
    if output is None:
        return text.rstrip("\n")
    write_atomically(output, text)

    return str(output)


def to_png(svg: str, path: Path) -> None:
    """Write an SVG document as a PNG.

    Raises:
        InputError: there is no converter, or it failed.
    """
    if importlib.util.find_spec("cairosvg"):
        cairosvg = importlib.import_module("cairosvg")
        drawn = cairosvg.svg2png(bytestring=svg.encode(), scale=_SHARPNESS)
        write_atomically(path, drawn)

        return

    converter = shutil.which("rsvg-convert")
    if converter is None:
        message = "a PNG needs a converter, and there is none: neither cairosvg nor rsvg-convert."
        raise InputError(message, "Install one (pip install cairosvg), or use --format svg.")

    try:
        process = subprocess.run(
            [converter, f"--zoom={_SHARPNESS}"],
            input=svg.encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{converter} took more than {_SECONDS} s to write {path}."
        raise InputError(message, "Use --format svg.") from error

    if not process.stdout:
        said = process.stderr.decode(errors="replace").strip()
        last = said.rpartition("\n")[2] or "it printed nothing"
        raise InputError(f"{converter} wrote no {path}: {last}.", "Use --format svg.")

    write_atomically(path, process.stdout)
