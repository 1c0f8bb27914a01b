"""image-classification: to tell the class of an image."""

from autofit.core.task import Script, Task

IMAGE_CLASSIFICATION = Task(
    name="image-classification",
    medium="images",
    labels="class",
    auto_classes=("AutoModelForImageClassification",),
    class_endings=("ForImageClassification",),
    rows=(("image", "label"),),  # as a folder for each class, or tensors in a .pt file
    script=Script(templates=("images",), data_kind=".pt with pixel_values and labels"),
)
