"""token-classification: to tell the class of each token, as named entities."""

from autofit.core.task import Task

TOKEN_CLASSIFICATION = Task(
    name="token-classification",
    medium="text",
    labels="class of each token",
    auto_classes=("AutoModelForTokenClassification",),
    class_endings=("ForTokenClassification",),
    rows=(("tokens", "tags"),),
)
