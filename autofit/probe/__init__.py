"""Probing: one Config measured in one child process. The parent side never touches the device."""

from autofit.probe.contention import Contention
from autofit.probe.place import Place, on_cards, on_cores, physical_cores
from autofit.probe.prober import Prober
from autofit.probe.timing import Plan
from autofit.probe.workers import Workers

__all__ = ["Contention", "Place", "Plan", "Prober", "Workers", "on_cards", "on_cores", "physical_cores"]
