"""image-text-to-text: to continue text that images stand in."""

from autofit.core.task import MULTIMODAL, Task

IMAGE_TEXT_TO_TEXT = Task(
    name="image-text-to-text",
    medium="images and text",
    labels="next tokens",
    auto_classes=MULTIMODAL,
    rows=(
        ("image", "prompt", "completion"),
        ("image", "messages"),
        ("image", "conversations"),
        ("image", "text"),
        ("messages",),
    ),
)
