"""seq2seq: to write a text for another, as translations and summaries; of an encoder and a decoder."""

from autofit.core.task import MULTIMODAL, Task

SEQ2SEQ = Task(
    name="seq2seq",
    medium="text",
    labels="other tokens",
    auto_classes=("AutoModelForSeq2SeqLM", *MULTIMODAL),
    rows=(("source", "target"),),
)
