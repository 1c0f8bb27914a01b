"""video-classification: to tell the class of a video."""

from autofit.core.task import Task

VIDEO_CLASSIFICATION = Task(
    name="video-classification",
    medium="videos",
    labels="class",
    auto_classes=("AutoModelForVideoClassification",),
    class_endings=("ForVideoClassification",),
)
