"""sequence-classification: to tell the class of a text."""

from autofit.core.task import Script, Task

SEQUENCE_CLASSIFICATION = Task(
    name="sequence-classification",
    medium="text",
    labels="class",
    auto_classes=("AutoModelForSequenceClassification",),
    class_endings=("ForSequenceClassification",),
    rows=(("text", "label"),),
    peft_type="SEQ_CLS",
    tools={"msswift": {"task_type": "seq_cls", "num_labels": 2}},
    script=Script(
        templates=("classified_text",),
        data_kind=".jsonl with text and label",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
    ),
)
