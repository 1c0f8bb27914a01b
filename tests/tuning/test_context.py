"""The context of a search: the memory that workers share."""

import pytest

from autofit.core.budget import Budget
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, MIB
from autofit.tuning.context import check_memory


def test_on_a_cpu_the_memory_that_all_workers_may_take_together_must_be_free() -> None:
    check_memory(4, "workers", Budget(GIB, GIB), 4 * GIB, given=True)
    with pytest.raises(
        InputError, match=r"budget of 1.00 GiB each may take more than the 3.99 GiB"
    ) as caught:
        check_memory(4, "workers", Budget(GIB, GIB), 4 * GIB - MIB, given=True)
    assert caught.value.remedy == "Give at most --mem 0.99, or fewer workers."
    with pytest.raises(InputError, match="the budget of each must be given"):
        check_memory(4, "workers", Budget(MIB, GIB), 4 * GIB, given=False)
