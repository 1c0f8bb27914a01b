from dataclasses import dataclass
from collections.abc import Mapping
@dataclass(frozen=True)
class Rates:
    matmul: Mapping[str, float]
    bandwidth: float
    link: float
    launch_seconds: float
    source: str
