"""The allocator's own events: the peak of tensor storage where a dispatch mode would prevent compilation.

`StorageTracker` cannot watch compiled code, so the probes of configs that compile read what PyTorch's CPU allocator
told the profiler. On plain steps of networks of linear layers both give the same bytes; the allocator also sees the
scratch memory of kernels (convolutions) and the random states that checkpointing keeps.
"""

from __future__ import annotations

from types import TracebackType

from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile


class AllocationRecord:
    """Bytes of CPU tensors allocated while the context is open, known when it is left.

    Every operator inside costs some hundred bytes of the process until then, so it is for a few steps. It cannot stop a
    run that passes a limit: only a resource limit of the process does.

    Attributes:
        peak: the largest sum of live bytes; what was allocated before the context does not count.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    def __enter__(self) -> AllocationRecord:
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        self.peak = self._largest()

    def _largest(self) -> int:
        results = self._profile.profiler.kineto_results if self._profile.profiler else None
        events = list(results.experimental_event_tree()) if results else []
        totals: list[tuple[int, int, int]] = []  # (time, bytes live, bytes that changed)
        while events:
            event = events.pop()
            events.extend(event.children)
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        if not totals:
            return 0
        _, after, change = min(totals)
        before = after - change  # of an earlier record in this process, not freed yet
        return max(0, max(total for _, total, _ in totals) - before)
