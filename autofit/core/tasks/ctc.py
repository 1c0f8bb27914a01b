"""ctc: to write what is said, with an encoder of sound and a loss over all alignments."""

from autofit.core.task import Task

CTC = Task(
    name="ctc",
    medium="sound",
    labels="transcript",
    auto_classes=("AutoModelForCTC",),
    class_endings=("ForCTC",),
    rows=(("audio", "transcript"),),
)
