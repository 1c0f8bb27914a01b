"""kto: to give good answers rather than bad ones, measured against the model before training."""

from autofit.core.task import REFERENCE, Script, Task

_WEIGHTS = ("desirable_weight", "undesirable_weight")

KTO = Task(
    name="kto",
    medium="preferences",
    labels="good or bad",
    frozen=(REFERENCE,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("prompt", "completion", "label"),),
    peft_type="CAUSAL_LM",
    tools={
        "trl": {"loss_type": "kto", "beta": 0.1, "train_sampling_strategy": "sequential"},
        "axolotl": {"rl": "kto", "rl_beta": 0.1},
        "llamafactory": {"stage": "kto", "pref_beta": 0.1},
        "msswift": {"rlhf_type": "kto", "loss_type": "kto", "beta": 0.1},
    },
    loss_keys={
        "trl": {name: name for name in ("beta", *_WEIGHTS)},
        "axolotl": {"beta": "rl_beta", **{name: f"kto_{name}" for name in _WEIGHTS}},
        "llamafactory": {
            "beta": "pref_beta",
            "desirable_weight": "kto_chosen_weight",
            "undesirable_weight": "kto_rejected_weight",
        },
        "msswift": {name: name for name in ("beta", *_WEIGHTS)},
    },
    stages={"trl": "kto", "msswift": "rlhf"},
    by_micro_batch=("trl", "axolotl", "llamafactory", "msswift"),
    script=Script(
        templates=("encode", "read_chat", "read_answers"),
        data_kind=".jsonl with prompt, completion and label",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        slots={
            "what": "Prompts, each with its answer and with that to another prompt",
            "texts": (
                'answers = [(row["prompt"], row["completion"]) for row in rows]',
                "others = [*answers[1:], answers[0]]  # to another prompt",
                "others = [(prompt, other) for (prompt, _), (_, other) in zip(answers, others)]",
                "both = [each for two in zip(answers, others) for each in two]",
                "data = padded([read_answer(*each, tokenizer) for each in both], tokenizer)",
                'data["desirable"] = torch.tensor([int(row["label"]) for row in rows])',
            ),
        },
        valid='torch.ones(len(batch["labels"]))',
        loss="kto_loss",
        loss_templates=("log_probabilities", "kto_loss"),
        loss_imports=("from torch.nn.functional import cross_entropy, pad",),
        constants=("BETA = 0.1  # how closely the model is held to what it was",),
        before_step=("batch = with_distance(model, batch)",),
    ),
)
