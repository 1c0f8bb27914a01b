"""masked-lm: to fill in tokens that are hidden at random."""

from autofit.core.task import Script, Task

MASKED_LM = Task(
    name="masked-lm",
    medium="text",
    labels="hidden tokens",
    auto_classes=("AutoModelForMaskedLM",),
    class_endings=("ForMaskedLM",),
    saved_as=("ForPreTraining",),  # BERT's checkpoints
    rows=(("text",),),
    packs=True,
    script=Script(
        templates=("packed", "masked"),
        data_kind="text, or .jsonl with texts",
        unit="tokens",
        mask_argument=", mask_id",
        batch='yield masked(data["input_ids"][chosen], mask_id, generator)',
    ),
)
