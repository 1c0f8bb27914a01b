"""embed: to bring the two texts of a pair together, and those of others apart."""

from autofit.core.task import Script, Task

EMBED = Task(
    name="embed",
    medium="pairs of texts",
    labels="none",
    auto_classes=("AutoModel",),
    rows=(("anchor", "positive"),),
    script=Script(
        templates=("twins",),
        data_kind=".jsonl with anchor and positive",
        imports=("from torch.nn.utils.rnn import pad_sequence",),
        loss="embed_loss",
        loss_templates=("embed_loss",),
        loss_imports=("from torch.nn.functional import cross_entropy, normalize",),
        constants=("SCALE = 20.0  # of cosines",),
        replays=True,
    ),
    tools={
        "sentencetransformers": {
            "class": "SentenceTransformer",
            "module": "sentence_transformer",
            "loss_class": "MultipleNegativesRankingLoss",
            "whole_batch": True,
        },
    },
    by_micro_batch=("msswift",),
)
