from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    matmul: Mapping[str, float]
    bandwidth: float
    link: float
    launch_seconds: float
    source: str
