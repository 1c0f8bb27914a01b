"""Synthetic batches have the shapes, labels and repeatability that the rest of autofit counts on."""

import cloudpickle
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.models.tasks.images import RandomImages
from autofit.models.tasks.text import KEEPS_APART, ClassLabels, RandomTokens

FACTORIES = {
    "causal-lm": RandomTokens("causal-lm", 16, 50),
    "masked-lm": RandomTokens("masked-lm", 16, 50, pad_token_id=0),
    "sequence-classification": RandomTokens(
        "sequence-classification", 16, 50, labels=ClassLabels(3)
    ),
    "image-classification": RandomImages(3, 8, 12, ClassLabels(5)),
}
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)


@every_factory
def test_dimension_0_is_the_sample(factory) -> None:
    assert {len(tensor) for tensor in factory(5).values()} == {5}


@every_factory
def test_the_same_n_gives_the_same_batch_also_after_a_journey(factory) -> None:
    torch.manual_seed(1)
    first = factory(3)
    torch.manual_seed(2)
    again = cloudpickle.loads(cloudpickle.dumps(factory))(3)
    assert all(torch.equal(first[key], again[key]) for key in first)


@every_factory
def test_batches_are_made_without_touching_the_callers_random_state(factory) -> None:
    before = torch.get_rng_state()
    factory(2)
    assert torch.equal(before, torch.get_rng_state())


@every_factory
def test_batches_can_be_made_of_fake_tensors_and_under_another_default_device(factory) -> None:
    real = factory(2)
    with FakeTensorMode():
        fake = factory(2)
    assert {key: tensor.shape for key, tensor in fake.items()} == {
        key: tensor.shape for key, tensor in real.items()
    }
    with torch.device("meta"):
        assert {tensor.device.type for tensor in factory(2).values()} == {"cpu"}


def test_causal_labels_are_the_ids_in_a_tensor_of_their_own() -> None:
    batch = FACTORIES["causal-lm"](4)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (4, 16)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


@given(n=st.integers(1, 6), length=st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_every_masked_sample_has_something_to_predict(n: int, length: int) -> None:
    batch = RandomTokens("masked-lm", length, 50)(n)
    valid = batch["labels"] != -100
    assert valid.any(dim=1).all()
    assert torch.equal(batch["labels"][valid], batch["input_ids"][valid])


def test_about_15_percent_of_tokens_are_masked() -> None:
    labels = RandomTokens("masked-lm", 500, 50)(20)["labels"]
    assert 0.13 < (labels != -100).float().mean() < 0.17


@given(vocabulary=st.integers(2, 20), data=st.data())
@settings(deadline=None, max_examples=25)
def test_ids_cover_the_vocabulary_but_the_padding(vocabulary: int, data: st.DataObject) -> None:
    padding = data.draw(st.integers(0, vocabulary - 1))
    ids = RandomTokens("causal-lm", 1000, vocabulary, padding)(1)["input_ids"]
    assert set(ids.flatten().tolist()) == set(range(vocabulary)) - {padding}


@pytest.mark.parametrize(
    ("labels", "shape", "dtype"),
    [
        (ClassLabels(4), (3,), torch.int64),
        (ClassLabels(4, "multi_label_classification"), (3, 4), torch.float32),
        (ClassLabels(1, "regression"), (3,), torch.float32),
        (ClassLabels(4, "regression"), (3, 4), torch.float32),
    ],
)
def test_labels_have_the_form_of_the_problem(
    labels: ClassLabels, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = labels(3, torch.Generator().manual_seed(0))
    assert (tuple(made.shape), made.dtype) == (shape, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(KEEPS_APART))
def test_where_positions_start_again_a_model_sees_nothing_before(kind: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    config = transformers.AutoConfig.for_model(
        kind, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else None
    ids = torch.randint(3, 64, (2, 24))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).repeat(2, 1)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 10:]
        alone = model(input_ids=ids[:, 10:], use_cache=False).logits
        unpacked = model(input_ids=ids, use_cache=False).logits[:, 10:]
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-4)
    assert (unpacked - alone).abs().max() > 0.01
