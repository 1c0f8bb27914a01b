"""What every task adds to the emitted script: the model's class, how data is read, and what the loss averages over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task's share of the script. `data` and `count` name templates; the rest are lines of `main`."""

    auto_class: str
    data: tuple[str, ...]
    data_help: str
    unit: str
    sample_key: str
    count: str
    load: tuple[str, ...]
    batch: tuple[str, ...]
    imports: tuple[str, ...] = ()
    standard: tuple[str, ...] = ()
    classes: bool = False  # whether the labels of the data say how many outputs the model needs
    forward_arguments: str = ""
    configure: tuple[str, ...] = ()

    @property
    def text(self) -> bool:
        """Whether the data is text, which needs a tokenizer."""
        return "text" in self.data


_TOKENIZER = "tokenizer = load_tokenizer(args.tokenizer, args.weights)"
_CLASSES = 'model = build_model(args.weights, int(data["labels"].max()) + 1)'
_NO_CACHE = "config.use_cache = False  # nothing is generated"
_TEXT_HELP = "text, or .jsonl with a text field"

TASKS = {
    "causal-lm": Task(
        auto_class="AutoModelForCausalLM",
        data=("text", "packed"),
        data_help=_TEXT_HELP,
        unit="tokens",
        sample_key="input_ids",
        count="count_causal",
        load=(
            _TOKENIZER,
            "data = load_data(args.data, tokenizer)",
            "model = build_model(args.weights)",
            'check_tokens(model, int(data["input_ids"].max()))',
        ),
        batch=(
            'input_ids = data["input_ids"][next(order)]',
            'batch = {"input_ids": input_ids, "labels": input_ids}',
        ),
        standard=("import json",),
        forward_arguments=", use_cache=False",
    ),
    "masked-lm": Task(
        auto_class="AutoModelForMaskedLM",
        data=("text", "packed", "masked"),
        data_help=_TEXT_HELP,
        unit="tokens",
        sample_key="input_ids",
        count="count_tokens",
        load=(
            _TOKENIZER,
            "mask_id = mask_token(tokenizer)",
            "data = load_data(args.data, tokenizer)",
            "model = build_model(args.weights)",
            'check_tokens(model, max(mask_id, int(data["input_ids"].max())))',
        ),
        batch=('batch = masked(data["input_ids"][next(order)], mask_id)',),
        standard=("import json",),
        configure=(_NO_CACHE,),
    ),
    "sequence-classification": Task(
        auto_class="AutoModelForSequenceClassification",
        data=("text", "classified_text"),
        data_help=".jsonl with fields text and label",
        unit="samples",
        sample_key="labels",
        count="count_samples",
        load=(
            _TOKENIZER,
            "data = load_data(args.data, tokenizer)",
            _CLASSES,
            'check_tokens(model, max(max(ids) for ids in data["input_ids"]))',
            "pad_id = (tokenizer and tokenizer.pad_token_id) or 0",
            "model.config.pad_token_id = pad_id  # tells some models where a text ends",
        ),
        batch=("batch = padded(data, next(order), pad_id)",),
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        standard=("import json",),
        classes=True,
        configure=(_NO_CACHE,),
    ),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification",
        data=("images",),
        data_help=".pt with pixel_values and labels",
        unit="samples",
        sample_key="labels",
        count="count_samples",
        load=("data = load_data(args.data)", _CLASSES),
        batch=(
            "chosen = next(order)",
            "batch = {name: tensor[chosen] for name, tensor in data.items()}",
        ),
        classes=True,
    ),
}
