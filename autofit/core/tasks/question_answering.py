"""question-answering: to find where in a text the answer to a question begins and ends."""

from autofit.core.task import Task

QUESTION_ANSWERING = Task(
    name="question-answering",
    medium="text",
    labels="span",
    auto_classes=("AutoModelForQuestionAnswering",),
    class_endings=("ForQuestionAnswering",),
    rows=(("question", "context", "answers"),),
)
