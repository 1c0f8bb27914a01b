"""How far rounding takes two computations of the same number apart: what tests of equal work allow.

A step in micro-batches, on ranks or in an exported script adds up the same numbers in another order, and the order
within a kernel depends on the processor, its threads and the shapes. So each tolerance follows from a number format,
not from what one machine has shown; the tests pass under other roundings, such as ATEN_CPU_CAPABILITY=default or
avx2 and MKL_CBWR=COMPATIBLE.
"""

from collections.abc import Mapping

import torch

# Losses of up to 8 of the tests' small models after some updates of fp32 weights. Numbers of fp32 are 4.8e-7 apart
# there; ten layers, a sum of some hundred labels and three updates round to about five of these, and twenty are
# allowed. Where one of two ranks weighs its samples 1 % too much, a loss is off by 2e-2; its gradients alone, by 5e-4.
LOSS = 1e-5

# The same where Adam's state is of 8 bits. A rank's part may begin elsewhere in a block, be too small to be quantised,
# or round to the next of 256 values, which lies some percent away; all of that together is what quantising changes.
LOSS_OF_8_BITS = 1e-4

# The same where products are of bf16 or fp16. A gradient then differs by 2^-9 of its typical size, so that of Adam's
# first step, which keeps only its sign, one element in a hundred goes the other way: at a rate of 1e-2 that counts
# ten times as much as at 1e-3.
LOSS_OF_16_BITS = 5e-3
LOSS_OF_16_BITS_IN_LARGE_STEPS = 2e-2


def assert_trained_alike(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, lr: float
) -> None:
    """Weights that Adam has trained in fp32 agree to a hundredth of a step, but for one element in a thousand.

    Adam divides a gradient by its own size: where the gradient is hardly more than rounding, so is the step. Such an
    element may be off by a step and back, and no further.
    """
    far = 0
    for name, weight in expected.items():
        apart = (found[name] - weight).abs()
        assert apart.max() <= 2 * lr, f"{name} is off by {float(apart.max()):.1e}"
        far += int((apart > 0.01 * lr).sum())

    elements = sum(weight.numel() for weight in expected.values())
    assert far <= max(1, elements / 1000), (
        f"{far} of {elements} elements are off by more than a hundredth of a step"
    )
