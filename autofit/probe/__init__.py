"""Probing: one Config measured in one child process. The parent side never touches the device."""

from autofit.probe.contention import Contention
from autofit.probe.executors import LEAST_SECONDS, Executor
from autofit.probe.executors.gang import GangExecutor
from autofit.probe.executors.local import LocalExecutor
from autofit.probe.executors.on_ray import RayExecutor
from autofit.probe.executors.pool import PoolExecutor
from autofit.probe.placement import Place, Placement, physical_cores, place_probes, place_ranks
from autofit.probe.steps import Request
from autofit.probe.timing import Plan

__all__ = [
    "LEAST_SECONDS",
    "Contention",
    "Executor",
    "GangExecutor",
    "LocalExecutor",
    "Place",
    "Placement",
    "Plan",
    "PoolExecutor",
    "RayExecutor",
    "Request",
    "physical_cores",
    "place_probes",
    "place_ranks",
]
