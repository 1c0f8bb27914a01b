import re

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.utils.data import DataLoader

from autofit.hardware.out_of_memory import is_host_out_of_memory
from benchmarks.peer_tools import TOOLS, Rows, SmallMachine, settle_for
from benchmarks.record_table import workload_named
from tests.tiny import llama_workload

BATCH = 4


def _refused(nbytes: int) -> RuntimeError:
    with SmallMachine(nbytes), pytest.raises(RuntimeError) as caught:
        torch.zeros(nbytes + 1, dtype=torch.uint8)
    return caught.value


def _peak(batch_size: int) -> int:
    """Of two steps with accelerate's loop, counted without a limit."""
    machine = SmallMachine(1 << 40)
    with machine:
        TOOLS["accelerate"](llama_workload(batch_size), machine, [])()
    return machine.peak


def test_beyond_its_bytes_a_machine_fails_with_the_words_of_the_allocator() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert re.sub(r"\d+", "N", str(_refused(1000))) == re.sub(r"\d+", "N", str(real.value))


def test_what_it_says_is_out_of_memory_to_those_that_are_asked() -> None:
    assert should_reduce_batch_size(_refused(1000))
    assert is_host_out_of_memory(_refused(1000))
    assert not should_reduce_batch_size(RuntimeError("another"))


def test_lightning_knows_it_too() -> None:
    memory = pytest.importorskip("lightning.pytorch.utilities.memory", reason="not a dependency")
    assert memory.is_oom_error(_refused(1000))


def test_what_needs_less_than_a_try_before_it_is_refused_too() -> None:
    machine = SmallMachine(1000)
    with machine:
        for size in (3000, 2000, 1001):
            with pytest.raises(RuntimeError, match=f"{size} bytes"):
                torch.zeros(size, dtype=torch.uint8)
        torch.zeros(1000, dtype=torch.uint8)
    assert machine.refusals == 3


def test_data_is_the_effective_batch_over_and_over() -> None:
    for workload in (llama_workload(BATCH), workload_named("cnn")):
        rows, samples = Rows(workload), workload.effective_batch_size
        batch, again = list(zip(range(2), DataLoader(rows, batch_size=samples), strict=False))
        values = [
            list(each.values()) if isinstance(each, dict) else each
            for each in (batch[1], again[1], rows.batch)
        ]
        for first, second, whole in zip(*values, strict=True):
            assert torch.equal(first, whole)
            assert torch.equal(second, whole)


def test_accelerate_goes_down_until_it_fits() -> None:
    workload, peak = llama_workload(BATCH), _peak(BATCH)
    whole = settle_for(workload, "accelerate", peak)
    assert (whole.batch_size, whole.tried, whole.out_of_memory) == (BATCH, (BATCH,), 0)
    less = settle_for(workload, "accelerate", peak - 1)
    assert (less.batch_size, less.tried, less.out_of_memory) == (BATCH - 1, (BATCH, BATCH - 1), 1)
    none = settle_for(workload, "accelerate", 1000)
    assert (none.batch_size, none.tried, none.out_of_memory) == (None, (4, 3, 2, 1), 4)
    assert "No executable batch size found" in (none.reason or "")
    assert whole.seconds > 0


def test_a_mistake_is_no_answer_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOLS, "broken", lambda *_: lambda: len(None))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError):
        settle_for(llama_workload(BATCH), "broken", 1000)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lightning", "lightning-binsearch"])
def test_lightning_doubles_until_it_fails(name: str) -> None:
    pytest.importorskip("lightning", reason="not a dependency")
    found = settle_for(llama_workload(BATCH), name, _peak(12))
    assert found.tried[:3] == (2, 4, 8)
    assert found.out_of_memory >= 1
    assert found.batch_size
    assert 8 <= found.batch_size <= 12
    assert settle_for(llama_workload(BATCH), "lightning", 1000).batch_size is None
