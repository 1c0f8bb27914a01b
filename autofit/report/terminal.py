"""The console that every command prints to: whatever is shown, no text in it moves a cursor or
colours what follows."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class Terminal(Console):
    """A Console that leaves out what cannot be printed; colours and cursors are moved by its own
    segments alone."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of what is shown, without control characters in their texts."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or text.isprintable() or text == "\n":
                yield segment
                continue

            printable = [sign for sign in text if sign.isprintable() or sign == "\n"]
            yield Segment("".join(printable), style)

    def on_broken_pipe(self) -> None:
        """Leave it to the command to say that nobody reads; a Console would exit without a word."""
        raise  # the error that is being handled
