"""parameter_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob, Trace
from autofit.core.some_blocks import offloaded_of

KNOB = Knob(
    "parameter_offload",
    off="none",
    values=("none", "cpu"),
    pattern=r"cpu:\d+",
    takes="none, cpu, or cpu:N for N of the blocks",
    title="Weights kept",
    short="weights offloaded",
    short_off="weights on the device",
    words={"cpu": "in host memory, fetched block by block"},
    of_blocks="of {} in even distances",
    trace=Trace.UNTRACED,
    quick=True,
)


def blocks_streamed(value: object, blocks: int) -> list[int]:
    """Which of so many blocks have their weights on the host.

    They are spread evenly: while the blocks between two of them run, the second one's weights come.
    """
    number = offloaded_of(value, blocks)
    return [at for at in range(blocks) if (at + 1) * number // blocks > at * number // blocks]
