"""Division: how the file of another tool divides a training over devices, in autofit's knobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autofit.core.config import Value
from autofit.core.knobs.data_parallel import KNOB as LAYOUT


@dataclass(frozen=True)
class Division:
    """What a file says of several devices; without `knobs`, each of them trains a copy.

    Attributes:
        knobs: the knobs of several devices that the file decides, with their values.
        open: those of them that may change, because the file has a key for each.
        only: the values that other knobs may take beside it.
        holds: other knobs that stay as they are, because something outside the file decides them,
            too.
        devices: how many of each machine the file is for; None: it does not say.
        nodes: how many machines; None: several, and it does not say how many.
        widens: trained weights are held in float32 beside autocast, also by a tool that does not on
            one device.
        notes: what is predicted in place of what the file asks for, a sentence each.
    """

    knobs: Mapping[str, Value] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    only: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    devices: int | None = None
    nodes: int | None = 1
    widens: bool = False
    notes: tuple[str, ...] = ()

    @property
    def open_layout(self) -> str | None:
        """The knob that says whether weights are divided, if that may change."""
        return LAYOUT.name if LAYOUT.name in self.open else None

    def noted(self, *notes: str) -> "Division":
        """The same with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def closed(self, *knobs: str) -> "Division":
        """The same without knobs that may change; none named: without any."""
        left = tuple(knob for knob in self.open if knobs and knob not in knobs)
        return replace(self, open=left)
