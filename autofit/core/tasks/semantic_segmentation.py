"""semantic-segmentation: to tell the class of each pixel of an image."""

from autofit.core.task import Task

SEMANTIC_SEGMENTATION = Task(
    name="semantic-segmentation",
    medium="images",
    labels="class of each pixel",
    auto_classes=("AutoModelForSemanticSegmentation",),
    class_endings=("ForSemanticSegmentation",),
    pixels=512,  # ADE's
)
