"""Probing: one Config measured in one child process. The parent side never touches the device."""

from autofit.probe.contention import Contention
from autofit.probe.executors.local import LocalExecutor
from autofit.probe.executors.pool import PoolExecutor
from autofit.probe.placement import Place, on_cards, on_cores, physical_cores
from autofit.probe.steps import Request
from autofit.probe.timing import Plan

__all__ = [
    "Contention",
    "Place",
    "Plan",
    "LocalExecutor",
    "PoolExecutor",
    "Request",
    "on_cards",
    "on_cores",
    "physical_cores",
]
