"""What an out-of-memory proves of one config."""

from collections.abc import Mapping

from autofit.core.config import Value
from autofit.search.encoding import Encoding
from autofit.search.pruning import MemoryOrder, ruled_out


def rules_out(
    failed: Mapping[str, Value], candidate: Mapping[str, Value], memory_order: MemoryOrder
) -> bool:
    """Whether the candidate needs at least the memory of the one that failed."""
    return bool(ruled_out(failed, Encoding([candidate]), memory_order)[0])
