"""causal-lm: to continue text, token by token."""

from autofit.core.task import MULTIMODAL, Script, Task

CAUSAL_LM = Task(
    name="causal-lm",
    medium="text",
    labels="next tokens",
    auto_classes=("AutoModelForCausalLM", *MULTIMODAL),
    class_endings=("ForCausalLM", "LMHeadModel"),
    rows=(("text",), ("prompt", "completion"), ("messages",)),
    packs=True,
    defers_logits=True,
    peft_type="CAUSAL_LM",
    script=Script(
        templates=("packed",),
        data_kind="text, or .jsonl with texts",
        unit="tokens",
        valid='batch["labels"][:, 1:] != -100',
        forward_arguments=", use_cache=False",
    ),
)
