"""audio-classification: to tell the class of a sound."""

from autofit.core.task import Task

AUDIO_CLASSIFICATION = Task(
    name="audio-classification",
    medium="sound",
    labels="class",
    auto_classes=("AutoModelForAudioClassification",),
    class_endings=("ForAudioClassification",),
    rows=(("audio", "label"),),
)
