"""What files of other tools train without adapters, by the names of a model's weights."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.core.tasks import TASKS
from autofit.export.importers import importer_of
from autofit.export.importers.frozen import Trained, Weights
from autofit.models.huggingface import HuggingFaceModel
from tests import tiny

AXOLOTL = {"base_model": "some/model"}
LLAMA_FACTORY = {"model_name_or_path": "some/model", "finetuning_type": "full"}
SWIFT = {"model": "some/model", "tuner_type": "full"}

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "text_config": {
        **_SIZES,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    },
}


def weights_of(model: HuggingFaceModel) -> Weights:
    return Weights(model, model.config)


LLAMA = weights_of(tiny.llama(num_hidden_layers=4))
SEEING = weights_of(HuggingFaceModel("seeing", "image-text-to-text", QWEN3_VL))
MIXTRAL = weights_of(
    HuggingFaceModel(
        "mixture",
        "causal-lm",
        {"model_type": "mixtral", **_SIZES, "num_hidden_layers": 2, "num_local_experts": 4},
    )
)


def trained(keys: dict[str, Any], weights: Weights) -> Trained:
    found = importer_of(keys, "file").trains(keys, weights)
    assert found is not None
    return found


def inside(weights: Weights, *words: str) -> set[str]:
    return {name for name in weights.sizes if any(word in name for word in words)}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["model.layers.[2-3]."], (".layers.2.", ".layers.3.")),
        (["^lm_head.weight$", "model.norm"], ("lm_head", "model.norm")),
        (["^model.embed_tokens.weight$[:32]"], ("embed_tokens",)),
        ("model.layers.0.mlp.up_proj", (".0.mlp.up_proj",)),
        # from its beginning, as axolotl matches
        (["layers.0", "model.layers.1.+self_attn"], (".0.", ".1.self_attn")),
    ],
)
def test_patterns_of_axolotl(patterns: Any, words: Collection[str]) -> None:
    found = trained({**AXOLOTL, "unfrozen_parameters": patterns}, LLAMA)
    assert found.names == inside(LLAMA, *words)


def test_names_of_older_versions_are_known() -> None:
    keys = {**AXOLOTL, "unfrozen_parameters": ["model.layers.1.block_sparse_moe.experts"]}
    assert trained(keys, MIXTRAL).names == inside(MIXTRAL, "layers.1.mlp.experts")
    config = {**tiny.LLAMA, "text_config": {}}
    part = Weights(tiny.llama(), config)  # of a model that sees, too
    keys = {**AXOLOTL, "unfrozen_parameters": ["^model.language_model.*", "^lm_head.*"]}
    assert trained(keys, part).names == set(part.sizes)


def test_axolotl_asks_for_gradients_of_inputs_where_it_names_embeddings_or_checkpoints() -> None:
    last = {**AXOLOTL, "unfrozen_parameters": ["model.layers.3"]}
    assert not trained(last, LLAMA).asks_inputs
    assert trained({**last, "gradient_checkpointing": True}, LLAMA).asks_inputs
    named = {**last, "unfrozen_parameters": ["model.layers.3", "lm_head"]}
    assert trained(named, LLAMA).asks_inputs
    assert trained(last, LLAMA).holds == ("activation_checkpointing",)


def test_axolotl_freezes_what_reads_images() -> None:
    found = trained({**AXOLOTL, "freeze_mm_modules": True}, SEEING)
    assert found.names == inside(SEEING, "language_model", "lm_head")
    both = {**AXOLOTL, "freeze_mm_modules": True, "unfrozen_parameters": ["model.visual", "lm"]}
    assert trained(both, SEEING).names == inside(SEEING, "lm_head")


def test_patterns_that_match_nothing_are_told() -> None:
    some = trained({**AXOLOTL, "unfrozen_parameters": ["lm_head", "wings"]}, LLAMA)
    assert some.names == {"lm_head.weight"}
    assert "matches wings" in some.notes[0]
    for wrong, message in ((["wings"], "no weight"), (["("], "no pattern"), (3, "list of names")):
        with pytest.raises(InputError, match=message):
            trained({**AXOLOTL, "unfrozen_parameters": wrong}, LLAMA)
    beside = {**AXOLOTL, "adapter": "qlora", "unfrozen_parameters": ["lm_head"]}
    assert "beside an adapter" in str(importer_of(beside, "file").refuse(beside))
    assert importer_of(AXOLOTL, "file").trains(AXOLOTL, LLAMA) is None


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({}, ("visual",)),
        ({"freeze_multi_modal_projector": False}, ("pos_embed", "patch", "blocks", "deepstack")),
        ({"freeze_vision_tower": False}, ("visual.merger",)),
    ],
)
def test_what_llama_factory_freezes_of_a_model_that_sees(
    keys: dict[str, Any], frozen: Collection[str]
) -> None:
    found = trained({**LLAMA_FACTORY, **keys}, SEEING)
    assert found.names == set(SEEING.sizes) - inside(SEEING, *frozen)
    assert not found.asks_inputs and not found.holds  # it checkpoints what is trained alone
    assert trained({**LLAMA_FACTORY, **keys}, LLAMA).names == set(LLAMA.sizes)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"freeze_trainable_layers": 1}, (".layers.3.",)),
        ({}, (".layers.2.", ".layers.3.")),
        ({"freeze_trainable_layers": 9}, (".layers.",)),
        ({"freeze_trainable_layers": -1}, (".layers.0.",)),
        ({"use_llama_pro": True}, (".layers.1.", ".layers.3.")),
        (
            {"freeze_trainable_layers": 1, "freeze_trainable_modules": "mlp, input_layernorm"},
            (".3.mlp", ".3.input"),
        ),
        (
            {"freeze_trainable_layers": 1, "freeze_extra_modules": "lm_head,norm"},
            (".layers.3.", "lm_head", "norm"),
        ),
    ],
)
def test_the_layers_of_llama_factory(keys: dict[str, Any], words: Collection[str]) -> None:
    by_layer = {**LLAMA_FACTORY, "finetuning_type": "freeze", **keys}
    assert importer_of(by_layer, "file").refuse(by_layer) is None
    assert trained(by_layer, LLAMA).names == inside(LLAMA, *words)


def test_layers_of_llama_factory_that_cannot_be_are_told() -> None:
    by_layer = {**LLAMA_FACTORY, "finetuning_type": "freeze"}
    for more, message in (
        ({"freeze_trainable_layers": 0}, "must be a positive whole number"),
        ({"freeze_trainable_layers": -2, "use_llama_pro": True}, "must be a positive"),
        ({"freeze_trainable_layers": 3, "use_llama_pro": True}, "no 3 groups"),
        ({"freeze_trainable_modules": "wings"}, "no weight is in wings"),
    ):
        with pytest.raises(InputError, match=message):
            trained({**by_layer, **more}, LLAMA)


def test_llama_factory_checkpoints_no_layer_that_it_freezes() -> None:
    def fields(**keys: Any) -> dict[str, Any]:
        found = {**LLAMA_FACTORY, **keys}
        importer = importer_of(found, "file")
        assert importer.refuse(found) is None
        return dict(importer.fields(found, TASKS["causal-lm"], tiny.LLAMA))

    assert fields(finetuning_type="freeze") == {"spares_frozen": True}
    assert fields(freeze_language_model=True) == {"spares_frozen": True}
    assert fields() == {}

    pro = {"finetuning_type": "freeze", "use_llama_pro": True, "freeze_trainable_layers": 2}
    assert fields(**pro) == {"spares_frozen": True}
    # of a model that is not there, which has more layers than what stands for it
    found = fields(**pro, model_name_or_path="models/llama3-8b-pro")
    assert found["options"] == {"num_hidden_layers": 4}
    keys = {**LLAMA_FACTORY, **pro, "model_name_or_path": "models/llama3-8b-pro"}
    assert "added the 2 layers" in importer_of(keys, "file").notes(keys)[0]


def test_ms_swift_trains_the_blocks_that_it_adds() -> None:
    keys: dict[str, Any] = {**SWIFT, "tuner_type": "llamapro", "llamapro_num_new_blocks": 2}
    importer = importer_of(keys, "file")
    assert importer.refuse(keys) is None
    config = {**tiny.LLAMA, "num_hidden_layers": 4, "layer_types": ["a", "b", "a", "c"]}
    fields = importer.fields(keys, TASKS["causal-lm"], config)
    kinds = ["a", "b", "b", "a", "c", "c"]
    assert fields == {"options": {"num_hidden_layers": 6, "layer_types": kinds}}

    grown = tiny.llama(num_hidden_layers=6)
    found = trained(keys, weights_of(grown))
    assert found.names == inside(weights_of(grown), ".layers.2.", ".layers.5.")
    assert found.asks_inputs

    for more, message in (
        ({"llamapro_num_new_blocks": 3}, "no 3 groups"),
        ({"llamapro_num_groups": 1}, "that of the groups"),
    ):
        with pytest.raises(InputError, match=message):
            importer.fields({**keys, **more}, TASKS["causal-lm"], config)
    with pytest.raises(InputError, match="how many layers"):
        importer.fields(keys, TASKS["causal-lm"], QWEN3_VL)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, ("language_model", "lm_head")),
        ({"freeze_vit": False}, ("language_model", "lm_head", "patch", "pos_embed", "blocks")),
        ({"freeze_aligner": False}, ("language_model", "lm_head", "merger")),
        ({"freeze_llm": True, "freeze_aligner": False}, ("merger",)),
        ({"trainable_parameters": "model.visual.patch"}, ("language", "lm_head", "patch")),
        ({"trainable_parameters_regex": r"blocks\.1\."}, ("language", "lm_head", "blocks.1.")),
    ],
)
def test_what_ms_swift_freezes_of_a_model_that_sees(
    keys: dict[str, Any], words: Collection[str]
) -> None:
    assert trained({**SWIFT, **keys}, SEEING).names == inside(SEEING, *words)


def test_ms_swift_sends_gradients_to_inputs_where_it_checkpoints() -> None:
    assert trained(SWIFT, SEEING).asks_inputs
    assert not trained({**SWIFT, "gradient_checkpointing": False}, SEEING).asks_inputs
    assert trained(SWIFT, SEEING).holds == ("activation_checkpointing",)


@given(
    share=st.floats(0, 1),
    prefixes=st.lists(st.sampled_from(["model.layers.1", "lm_head", "model.", "wings"])),
    freed=st.lists(st.sampled_from(["model.layers.1.mlp", "model.norm"])),
)
def test_what_ms_swift_trains_is_what_is_not_frozen_or_is_freed(
    share: float, prefixes: list[str], freed: list[str]
) -> None:
    keys = {
        **SWIFT,
        "freeze_parameters_ratio": share,
        "freeze_parameters": prefixes,
        "trainable_parameters": freed,
    }
    try:
        names = set(trained(keys, LLAMA).names)
    except InputError:
        names = set()
    total = sum(LLAMA.sizes.values())
    for place, name in enumerate(LLAMA.sizes):
        before = sum(list(LLAMA.sizes.values())[: place + 1])
        is_first = before <= int(total * share)
        is_frozen = is_first or name.startswith(tuple(prefixes))
        assert (name in names) == (not is_frozen or name.startswith(tuple(freed)))


def test_shares_of_a_wrong_kind_are_told() -> None:
    for wrong in (2, "half", True):
        with pytest.raises(InputError, match="from 0 to 1"):
            trained({**SWIFT, "freeze_parameters_ratio": wrong}, LLAMA)


def test_a_model_that_does_not_say_its_layers_is_told() -> None:
    unknown = Weights(tiny.llama(), {"model_type": "llama"})
    with pytest.raises(InputError, match="how many layers"):
        trained({**LLAMA_FACTORY, "finetuning_type": "freeze"}, unknown)
    seeing = replace(tiny.llama(), config={**tiny.LLAMA})
    assert weights_of(seeing).blocks == 2
    assert SEEING.blocks == 2
