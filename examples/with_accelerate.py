"""A found config in a loop of one's own on accelerate, whose losses are those of autofit's loop.

Config, model and data are those of the example with Trainer.
"""

import itertools
import tempfile
from collections.abc import Iterable, Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from hf_trainer import CONFIG, LR, collate, losses_of_autofit, make_model, make_samples, show

import autofit


def endless(loader: Iterable[dict]) -> Iterator[dict]:
    """Pass after pass."""
    while True:
        yield from loader


def labels_in(batch: dict[str, torch.Tensor]) -> int:
    """How many tokens are predicted: a causal model never predicts the first one of a sample."""
    return int((batch["labels"][:, 1:] != -100).sum())


def losses_of_accelerate(config: dict, steps: int) -> list[float]:
    """The loss of every step in a hand-written loop."""
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        setup = autofit.training_arguments(config, output_dir=directory, model=model)
    arguments = setup.arguments
    accumulated = arguments.gradient_accumulation_steps
    accelerator = Accelerator(
        cpu=arguments.use_cpu,
        mixed_precision=arguments.mixed_precision,
        # Without sync_with_dataloader=False it would step at the first of the micro-batches that are taken together
        # at the end of a pass.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            accumulated, sync_with_dataloader=False
        ),
    )
    torch.manual_seed(0)  # adapters begin at random, and autofit.fit has a seed of 0
    model = setup.prepare(model)
    # before transformers 5.23
    kind = "activation" if hasattr(arguments, "activation_checkpointing") else "gradient"
    if getattr(arguments, f"{kind}_checkpointing"):  # what Trainer does by itself
        getattr(model, f"{kind}_checkpointing_enable")(
            getattr(arguments, f"{kind}_checkpointing_kwargs")
        )
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=arguments.weight_decay, fused=True
    )
    loader = torch.utils.data.DataLoader(
        make_samples(), arguments.per_device_train_batch_size, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    micro_batches = endless(loader)

    losses = []
    for _ in range(steps):
        batch = list(itertools.islice(micro_batches, accumulated))
        total = sum(labels_in(each) for each in batch)
        losses.append(0.0)
        for micro_batch in batch:
            with accelerator.accumulate(model):
                # The sum over this micro-batch's labels, divided by the number of labels in the whole batch.
                loss = model(**micro_batch, num_items_in_batch=total).loss
                # because it divides by the number of micro-batches
                accelerator.backward(loss * accumulated)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1] += loss.item()
    return losses


def main(config: dict = CONFIG, steps: int = 17) -> tuple[list[float], list[float]]:
    """Train in both loops, and compare."""
    mine, theirs = losses_of_autofit(config, steps), losses_of_accelerate(config, steps)
    show("accelerate", mine, theirs)
    return mine, theirs


if __name__ == "__main__":
    main()
