"""How train.py puts the samples together that a search knew: one after the other, or padded."""

from dataclasses import replace

from autofit.core.task import Script

_TO_THE_LONGEST = """longest = data["attention_mask"][chosen].sum(dim=1).max()
yield {name: tensor[chosen, :longest] for name, tensor in data.items()}"""
_BEGINS = (
    'data["position_ids"] = torch.cat([torch.arange(len(each)) == 0 for each, _ in samples]).long()',
)
_APART = (
    'begins = data["position_ids"]  # where positions start again, by which samples do not see one another',
    "begins[:, 0] = 1",
    "places = torch.arange(SEQUENCE_LENGTH).expand_as(begins)",
    'data["position_ids"] = places - (places * begins).cummax(dim=1).values',
    'data["labels"] = data["labels"].masked_fill(begins == 1, -100)',
)
_ROWS = ".jsonl with texts, with prompts and completions, or with messages"


def packed_samples(script: Script, *, apart: bool) -> Script:
    """A task's share of train.py with packed samples, which do not see one another where they are
    `apart`."""
    return replace(
        script,
        templates=("encode", "read_chat", "read_samples", "packed_samples"),
        data_kind=f"text, or {_ROWS}",
        slots={
            "lines": "",
            "begins": ", begins=False",
            "marks": _BEGINS if apart else (),
            "apart": _APART if apart else (),
        },
    )


def padded_samples(script: Script) -> Script:
    """A task's share of train.py with samples padded to the longest of a batch."""
    return replace(
        script,
        templates=("encode", "read_chat", "read_samples", "padded_samples"),
        data_kind=f"text with a sample in each line, or {_ROWS}",
        unit="samples",
        batch=_TO_THE_LONGEST,
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        slots={"lines": ' or path.suffix == ".txt"', "begins": ""},
    )
