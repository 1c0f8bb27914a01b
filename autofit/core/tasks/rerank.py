"""rerank: to tell how well a passage answers a query, both read together."""

from autofit.core.task import Task

RERANK = Task(
    name="rerank",
    medium="text",
    labels="relevance",
    auto_classes=("AutoModelForSequenceClassification",),
    rows=(("query", "passage", "label"),),
    peft_type="SEQ_CLS",
    tools={
        "sentencetransformers": {
            "class": "CrossEncoder",
            "module": "cross_encoder",
            "loss_class": "BinaryCrossEntropyLoss",
            "whole_batch": False,
        },
    },
)
