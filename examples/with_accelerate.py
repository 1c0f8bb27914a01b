"""A found config in a script on accelerate, whose losses are those of `autofit.fit`.

Accelerate starts the processes (`accelerate launch`, torchrun), and gathers, logs and saves.
`autofit.prepare` takes the place of `accelerator.prepare`, `accumulate`, `backward` and the
optimizer's step: each process gives it the whole batch, and it trains on its part.
"""

from accelerate import Accelerator
from hf_trainer import CONFIG, LR, losses_of_autofit, make_loader, make_model, show

import autofit


def losses_of_accelerate(config: dict, steps: int) -> list[float]:
    """The loss of every step, the same in every process."""
    accelerator = Accelerator(cpu=True)
    loader = make_loader()
    losses = []

    with autofit.prepare(make_model(), config, loader=loader, lr=LR, device="cpu") as step:
        while len(losses) < steps:
            for batch in loader:
                losses.append(step(batch))
                if len(losses) == steps:
                    break
        accelerator.print(f"after {steps} steps: {step.evaluate([batch]):.4f} on the last batch")
    accelerator.wait_for_everyone()
    return losses


def main(config: dict = CONFIG, steps: int = 17) -> tuple[list[float], list[float]]:
    """Train in both loops, and compare."""
    mine = losses_of_autofit(config, steps)
    theirs = losses_of_accelerate(config, steps)
    show("accelerate", mine, theirs)
    return mine, theirs


if __name__ == "__main__":
    main()
