"""A found config in Hugging Face's Trainer, whose losses are those of autofit's own loop.

The bytes of the text are the tokens and the weights are random, so there is nothing to download.
"""

import re
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.trainer_callback import PrinterCallback

import autofit

TEXT = Path(__file__).parent / "data" / "alice.txt"
LENGTH = 64
BATCH_SIZE = 16
LR = 3e-3
CONFIG = {  # what a search found: its result, or the path of its result.yaml, goes in the same place
    "precision": "fp32",
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": "full",
    "optimizer": "adamw",
}


def make_model() -> LlamaForCausalLM:
    """A small Llama whose vocabulary is the 256 bytes; the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def make_samples() -> list[dict[str, torch.Tensor]]:
    """The clauses of the text, padded: micro-batches hold unlike numbers of tokens, and losses must be weighted."""
    clauses = re.split(r"(?<=[,;:.!?])\s", TEXT.read_text())
    return [sample(clause) for clause in clauses[: len(clauses) // BATCH_SIZE * BATCH_SIZE]]


def sample(clause: str) -> dict[str, torch.Tensor]:
    """One clause's bytes, padded to the length that all have; what is padding is no label."""
    tokens = torch.tensor(list(clause.encode())[:LENGTH])
    padding = LENGTH - len(tokens)
    return {
        "input_ids": torch.nn.functional.pad(tokens, (0, padding)),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(tokens), (0, padding)),
        "labels": torch.nn.functional.pad(tokens, (0, padding), value=-100),
    }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of all that the samples hold."""
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def make_loader() -> torch.utils.data.DataLoader:
    """Effective batches, in the order of the text."""
    return torch.utils.data.DataLoader(make_samples(), batch_size=BATCH_SIZE, collate_fn=collate)


def losses_of_autofit(config: dict, steps: int) -> list[float]:
    """The loss of every step in autofit's own loop."""
    trained = autofit.fit(
        make_model(), make_loader(), config=config, device="cpu", lr=LR, steps=steps
    )
    return [report.loss for report in trained.history]


def losses_of_trainer(config: dict, steps: int) -> list[float]:
    """The loss of every step in Trainer."""
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        setup = autofit.training_arguments(
            config,
            output_dir=directory,
            model=model,  # names the layers for adapters, if the config has some
            # From here on TrainingArguments of one's own. Trainer would shuffle, report to stdout, and save.
            learning_rate=LR,
            max_steps=steps,
            logging_steps=1,
            train_sampling_strategy="sequential",
            save_strategy="no",
            disable_tqdm=True,
        )
        # what Trainer cannot run as it was measured: nothing, with this config
        for note in setup.notes:
            print(f"note: {note}")
        torch.manual_seed(0)  # adapters begin at random, and autofit.fit has a seed of 0
        trainer = Trainer(
            setup.prepare(model),
            setup.arguments,
            train_dataset=make_samples(),
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def show(name: str, mine: list[float], theirs: list[float]) -> None:
    """Both curves side by side."""
    print(f"{'step':>4} {'autofit':>9} {name:>11}")
    for step, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        print(f"{step:>4} {left:>9.5f} {right:>11.5f}")


def main(config: dict = CONFIG, steps: int = 17) -> tuple[list[float], list[float]]:
    """Train in both loops, and compare."""
    mine, theirs = losses_of_autofit(config, steps), losses_of_trainer(config, steps)
    show("Trainer", mine, theirs)
    return mine, theirs


if __name__ == "__main__":
    main()
