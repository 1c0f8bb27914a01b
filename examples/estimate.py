"""Predict before there is a GPU: what a config needs, how fast it is expected to be, and where it fits.

The training step is followed on tensors without storage, so neither the card nor the model's weights are needed.
"""

import autofit

GIB = 2**30
MODEL = "tiny-llama"  # or "llama-3.1-8b", a directory with a config.json, or a Workload of your own
CARDS = ("rtx-3060", "rtx-4090", "h100")
# the other knobs are off
CONFIG = {"precision": "bf16", "micro_batch_size": 4, "activation_checkpointing": "full"}


def main(model: str = MODEL) -> dict[str, autofit.Estimate]:
    """Estimate one config for several cards, and say what the memory goes to."""
    found = {
        card: autofit.estimate(model, CONFIG, gpu=card, seq_len=512, effective_batch=16)
        for card in CARDS
    }
    for card, estimate in found.items():
        low, high = estimate.low / GIB, estimate.high / GIB
        print(
            f"{card}: fits {estimate.verdict}, {low:.2f}-{high:.2f} GiB, {estimate.tokens_per_second:,.0f} tokens/s"
        )
    largest = sorted(estimate.breakdown.items(), key=lambda part: -part[1])
    print(", ".join(f"{part} {nbytes / GIB:.3f} GiB" for part, nbytes in largest))
    return found


if __name__ == "__main__":
    main()
