"""What every task adds to train.py: the model's class, how data is read, and what the loss averages over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Task:
    """One task's share of train.py. `data` names templates; the rest are lines of the script or parts of them."""

    auto_class: str
    data: tuple[str, ...]
    data_kind: str  # what the script reads, in words
    unit: str = "samples"
    valid: str = 'batch["labels"] != -100'  # which labels the loss is a mean of
    batch: str = "yield {name: tensor[chosen] for name, tensor in data.items()}"
    imports: tuple[str, ...] = ()
    text: bool = True  # whether the data is text, which needs a tokenizer
    classes: bool = False
    slots: Mapping[str, str | Sequence[str]] = field(default_factory=dict)  # of the templates of `data`
    forward_arguments: str = ""
    configure: tuple[str, ...] = ()

    def with_packing(self, packing: bool | None, *, apart: bool) -> "Task":
        """The same for samples that a search knew: packed, where they may not see one another (`apart`), or padded to
        the longest of a batch; None: it knew none."""
        if packing is None:
            return self
        kind = ".jsonl with texts, with prompts and completions, or with messages"
        if packing:
            slots: dict[str, str | Sequence[str]] = {"lines": "", "start": '(start if "prompt" in row else [])'}
            slots |= {"begins": _BEGINS if apart else (), "apart": _APART if apart else ()}
            return replace(self, data=("read_samples", "packed_samples"), data_kind=f"text, or {kind}", slots=slots)
        return replace(
            self,
            data=("read_samples", "padded_samples"),
            data_kind=f"text with a sample in each line, or {kind}",
            unit="samples",
            batch=_TO_THE_LONGEST,
            imports=("from torch.nn.utils.rnn import pad_sequence",),
            slots={"lines": ' or path.suffix == ".txt"', "start": "start"},
        )

    @property
    def mask_argument(self) -> str:
        """The further argument of a task that hides tokens when a batch is made."""
        return ", mask_id" if "masked" in self.data else ""

    @property
    def checks(self) -> list[str]:
        """Lines of `main` that compare data and model, before a wrong index fails the first step."""
        return [*(_KNOWN_TOKENS if self.text else ()), *(_KNOWN_CLASSES if self.classes else ())]


_TO_THE_LONGEST = """longest = data["attention_mask"][chosen].sum(dim=1).max()
yield {name: tensor[chosen, :longest] for name, tensor in data.items()}"""
_BEGINS = ('data["position_ids"] = torch.cat([torch.arange(len(each)) == 0 for each, _ in samples]).long()',)
_APART = (
    'begins = data["position_ids"]  # where positions start again, by which samples do not see one another',
    "begins[:, 0] = 1",
    "places = torch.arange(SEQUENCE_LENGTH).expand_as(begins)",
    'data["position_ids"] = places - (places * begins).cummax(dim=1).values',
    'data["labels"] = data["labels"].masked_fill(begins == 1, -100)',
)
_NO_CACHE = "model.config.use_cache = False  # nothing is generated"
PADDING = "{}pad_token_id = {}pad_token_id or 0  # where a text ends"
_TEXT = "text, or .jsonl with texts"
_KNOWN_TOKENS = (
    'if data["input_ids"].max() >= model.get_input_embeddings().num_embeddings:',
    '    raise SystemExit("the data has tokens that the model does not know: check --tokenizer")',
)
_KNOWN_CLASSES = (
    'if data["labels"].max() >= NUM_LABELS:',
    '    raise SystemExit("the data has more classes than the model: change NUM_LABELS")',
)

TASKS = {
    "causal-lm": Task(
        auto_class="AutoModelForCausalLM",
        data=("packed",),
        data_kind=_TEXT,
        unit="tokens",
        valid='batch["labels"][:, 1:] != -100',
        forward_arguments=", use_cache=False",
    ),
    "masked-lm": Task(
        auto_class="AutoModelForMaskedLM",
        data=("packed", "masked"),
        data_kind=_TEXT,
        unit="tokens",
        batch='yield masked(data["input_ids"][chosen], mask_id, generator)',
    ),
    "sequence-classification": Task(
        auto_class="AutoModelForSequenceClassification",
        data=("classified_text",),
        data_kind=".jsonl with text and label",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        classes=True,
        configure=(_NO_CACHE, PADDING.format("model.config.", "model.config.")),
    ),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification",
        data=("images",),
        data_kind=".pt with pixel_values and labels",
        text=False,
        classes=True,
    ),
}
