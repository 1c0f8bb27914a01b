"""rerank: to tell how well a passage answers a query, both read together."""

from autofit.core.task import Script, Task

RERANK = Task(
    name="rerank",
    medium="text",
    labels="relevance",
    auto_classes=("AutoModelForSequenceClassification",),
    rows=(("query", "passage", "label"),),
    peft_type="SEQ_CLS",
    script=Script(
        templates=("judged_pairs",),
        data_kind=".jsonl with query, passage and label",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        valid='torch.ones(len(batch["labels"]))',
        loss="rerank_loss",
        loss_templates=("rerank_loss",),
        loss_imports=("from torch.nn.functional import binary_cross_entropy_with_logits",),
    ),
    tools={
        "sentencetransformers": {
            "class": "CrossEncoder",
            "module": "cross_encoder",
            "loss_class": "BinaryCrossEntropyLoss",
            "whole_batch": False,
        },
        "msswift": {"task_type": "reranker", "loss_type": "pointwise_reranker"},
    },
)
