"""dpo: to prefer the better of two answers, measured against the model before training."""

from autofit.core.task import REFERENCE, Script, Task

KINDS = ("sigmoid", "hinge", "ipo", "robust")

DPO = Task(
    name="dpo",
    medium="preferences",
    labels="better answer",
    frozen=(REFERENCE,),
    auto_classes=("AutoModelForCausalLM",),
    rows=(("chosen", "rejected"),),
    peft_type="CAUSAL_LM",
    tools={
        "trl": {"loss_type": ["sigmoid"], "beta": 0.1},
        "axolotl": {"rl": "dpo", "rl_beta": 0.1},
        "llamafactory": {"stage": "dpo", "pref_loss": "sigmoid", "pref_beta": 0.1},
        "msswift": {"rlhf_type": "dpo", "loss_type": "sigmoid", "beta": 0.1},
    },
    loss_keys={
        "trl": {
            "beta": "beta",
            "label_smoothing": "label_smoothing",
            "kind": {kind: {"loss_type": [kind]} for kind in KINDS},
        },
        "axolotl": {
            "beta": "rl_beta",
            "label_smoothing": "dpo_label_smoothing",
            "kind": {kind: {"dpo_loss_type": [kind]} for kind in KINDS},
        },
        "llamafactory": {
            "beta": "pref_beta",
            "label_smoothing": "dpo_label_smoothing",
            "kind": {kind: {"pref_loss": kind} for kind in KINDS if kind != "robust"},
        },
        "msswift": {
            "beta": "beta",
            "label_smoothing": "label_smoothing",
            "kind": {kind: {"loss_type": kind} for kind in KINDS},
        },
    },
    stages={"trl": "dpo", "msswift": "rlhf"},
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
        loss="dpo_loss",
        loss_templates=("log_probabilities", "dpo_loss"),
        loss_imports=("from torch.nn.functional import cross_entropy, logsigmoid, pad",),
        constants=("BETA = 0.1  # how closely the model is held to what it was",),
    ),
)
