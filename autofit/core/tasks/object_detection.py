"""object-detection: to find what is in an image, each in a box."""

from autofit.core.task import Task

OBJECT_DETECTION = Task(
    name="object-detection",
    medium="images",
    labels="boxes",
    auto_classes=("AutoModelForObjectDetection",),
    class_endings=("ForObjectDetection",),
    pixels=640,  # COCO's
)
