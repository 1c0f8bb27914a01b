"""A language model of Hugging Face on a text file: search the fastest config that fits, then train with it.

The bytes of the text are the tokens and the weights are random, so there is nothing to download.
"""

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autofit

TEXT = Path(__file__).parent / "data" / "alice.txt"
SEQUENCE_LENGTH = 64
BATCH_SIZE = 16
# small as the model is, all 16 samples at once do not fit without checkpointing
MEMORY_GIB = 1 / 64


def make_model() -> LlamaForCausalLM:
    """A small Llama whose vocabulary is the 256 bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def make_loader() -> DataLoader:
    """Batches of {"input_ids", "labels"}: what the model's forward takes, so that no loss has to be written."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    rows = tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    # the model shifts the labels itself
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)


def main(steps: int = 60, trials: int = 8) -> autofit.Trained:
    """Search, train, and tell what came out."""
    trained = autofit.fit(
        make_model(),
        make_loader(),  # its batch size is the effective batch: every config learns from the same 16 samples a step
        device="cpu",
        mem=MEMORY_GIB,
        trials=trials,
        # The space "full" would also try bf16 weights and 8-bit optimizers; this narrows it for a quick answer.
        set={
            "precision": ["fp32", "bf16-mixed"],
            "optimizer": "adamw",
            "attention": "sdpa",
            "loss": "standard",
            "compile": "none",
        },
        lr=3e-3,
        schedule="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        steps=steps,
    )
    print(autofit.explain(trained.result))
    print(
        f"loss: {trained.history[0].loss:.2f} -> {trained.history[-1].loss:.2f} in {len(trained.history)} steps"
    )
    return trained


if __name__ == "__main__":
    main()
