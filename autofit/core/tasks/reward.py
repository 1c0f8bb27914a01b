"""reward: to give the better of two answers the higher score."""

from autofit.core.task import Script, Task

REWARD = Task(
    name="reward",
    medium="preferences",
    labels="better text",
    auto_classes=("AutoModelForSequenceClassification",),
    rows=(("chosen", "rejected"),),
    peft_type="SEQ_CLS",
    tools={
        "trl": {"lora_task_type": "SEQ_CLS"},
        "axolotl": {
            "reward_model": True,
            "model_type": "AutoModelForSequenceClassification",
            "num_labels": 1,
        },
    },
    stages={"trl": "reward"},
    script=Script(
        templates=("encode", "read_chat", "read_answers"),
        data_kind=".jsonl with prompt, chosen and rejected",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        slots={
            "what": "Prompts, each with its better and its worse answer",
            "texts": (
                'answers = [(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")]',
                "data = padded([read_answer(*each, tokenizer) for each in answers], tokenizer)",
            ),
        },
        valid='torch.ones(len(batch["labels"]))',
        loss="reward_loss",
        loss_templates=("reward_loss",),
        loss_imports=("from torch.nn.functional import logsigmoid",),
        constants=(),
    ),
)
