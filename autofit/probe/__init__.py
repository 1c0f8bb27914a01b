"""Probing: one Config measured in one child process. The parent side never touches the device."""

from autofit.probe.prober import Prober
from autofit.probe.timing import Plan

__all__ = ["Plan", "Prober"]
