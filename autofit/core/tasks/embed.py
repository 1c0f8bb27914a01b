"""embed: to bring the two texts of a pair together, and those of others apart."""

from autofit.core.task import Task

EMBED = Task(
    name="embed",
    medium="pairs of texts",
    labels="none",
    auto_classes=("AutoModel",),
    rows=(("anchor", "positive"),),
    tools={
        "sentencetransformers": {
            "class": "SentenceTransformer",
            "module": "sentence_transformer",
            "loss_class": "MultipleNegativesRankingLoss",
            "whole_batch": True,
        },
    },
)
