"""Which layers are split, and what is left of them on a device; what is learned of it is in
training/test_tensor_and_context_ranks.py."""

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from autofit.core.errors import RefusedError
from autofit.training.build import build
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload

Divided = dict[str, tuple[tuple[str, ...], float]]


def divided(knobs: dict[str, Any], changes: dict[str, Any], world: int) -> Divided:
    """By weight: the dimensions of the mesh over which it is divided, and how much of it is here."""
    setup = build(llama_workload(**changes), knobs, replace(CPU, devices=world))
    found: Divided = {}
    for name, weight in setup.model.named_parameters():
        if isinstance(weight, DTensor):
            names = weight.device_mesh.mesh_dim_names or ()
            along = [
                name
                for name, each in zip(names, weight.placements, strict=True)
                if not each.is_replicate()
            ]
            found[name] = tuple(along), weight.to_local().numel() / weight.numel()
        else:
            found[name] = (), 1.0
    setup.close()
    return found


def several() -> list[Divided]:
    split: dict[str, Any] = {"tensor_parallel": 2}
    tied, odd = {"tie_word_embeddings": True}, {"vocab_size": 65}
    return [
        divided(split | {"loss": loss}, each, 2)
        for loss in ("standard", "chunked")
        for each in ({}, tied, odd)
    ]


def test_layers_and_ends_are_halved_and_norms_are_whole() -> None:
    plain, tied, odd, chunked, tied_chunked, _ = on_ranks(2, several)[0]
    half, whole = (("tensor",), 0.5), ((), 1.0)
    for found in (plain, tied, odd, chunked, tied_chunked):
        for name, how in found.items():
            if ".layers." in name:
                assert how == (whole if "norm" in name else half), name
    ends = [
        (found["model.embed_tokens.weight"], found.get("lm_head.weight"))
        for found in (plain, tied, odd)
    ]
    assert ends == [(half, half), (half, None), (half, whole)], (
        "a vocabulary of 65 cannot be halved"
    )
    assert chunked["lm_head.weight"] == whole, "the loss multiplies by it itself"
    assert tied_chunked["model.embed_tokens.weight"] == whole


def quantised() -> str:
    """A model that was given with layers whose weights are packed."""
    from bitsandbytes.nn import Linear4bit

    workload = llama_workload()
    model = workload.model()
    model.model.layers[0].self_attn.q_proj = Linear4bit(32, 32, bias=False)
    try:
        build(workload, {"tensor_parallel": 2}, replace(CPU, devices=2), model=model)
    except RefusedError as refused:
        return str(refused)
    return "built"


def test_packed_weights_are_not_split() -> None:
    for answer in on_ranks(2, quantised):
        assert (
            "the plan of LlamaForCausalLM asks for colwise of a Linear4bit; use tensor_parallel 1"
            in answer
        )


def test_what_is_left_is_divided_by_fsdp() -> None:
    found = on_ranks(4, divided, {"tensor_parallel": 2}, {}, 4)[0]
    assert found["model.layers.0.self_attn.q_proj.weight"] == (("shard", "tensor"), 0.25)
    assert found["model.layers.0.mlp.down_proj.weight"] == (("shard", "tensor"), 0.25)
    assert found["model.norm.weight"] == (("shard",), 0.5)
