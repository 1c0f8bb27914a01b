"""What of a model is trained where not all of it is: no knob, but what is learnt."""

from autofit.core.quoting import python_string
from autofit.export.fragments import Case, Fragments
from autofit.export.template import import_from


def trained_parts(case: Case) -> Fragments:
    """Freezes all other parts, before anything else changes the model."""
    if not case.parts or case.lora:
        return Fragments()

    names = "".join(f"    {python_string(part)},\n" for part in case.parts)
    lines = (
        'trained = tuple(f"{part}." for part in TRAINED)',
        "for name, parameter in model.named_parameters():",
        '    parameter.requires_grad_(f"{name}.".startswith(trained))',
    )

    return Fragments(constants=(f"TRAINED = (  # all else stays as it is\n{names})",), adapt=lines)


def rounding(case: Case) -> Fragments:
    """Linear layers that round as quantised inference will; their weights are saved as they are."""
    if case.rounds is None:
        return Fragments()

    weight = f"group_size={case.rounds.group_size}"
    config = "weight_config=weight"
    imported = ["Int4WeightFakeQuantizeConfig"]
    lines = []
    if case.rounds.of_inputs:
        weight += ", activation_dtype=torch.bfloat16"
        config += ", activation_config=inputs"
        imported.append("IntxFakeQuantizeConfig")
        given = 'dtype=torch.int8, granularity="per_token", is_symmetric=False'
        lines.append(f"inputs = IntxFakeQuantizeConfig({given})")

    lines.append(f"weight = Int4WeightFakeQuantizeConfig({weight})")
    rounding = f"quantize_(model, QATConfig({config})"
    if case.rounds.of_head:
        lines.append(f"{rounding})  # for quantised inference")
    else:
        lines.append("head = model.get_output_embeddings()  # whose weight the loss reads as it is")
        rounds = "isinstance(layer, torch.nn.Linear) and layer is not head"
        lines.append(f"{rounding}, lambda layer, name: {rounds})")

    return Fragments(
        imports=(
            "from torchao.quantization import quantize_",
            "from torchao.quantization.qat import QATConfig",
            import_from("torchao.quantization.qat.fake_quantize_config", *imported),
        ),
        adapt=tuple(lines),
    )


def gradients_of_inputs(case: Case) -> Fragments:
    """How far gradients flow back, after checkpointing, for which transformers asks for those of
    what the embeddings give."""
    if case.asks_inputs:
        return Fragments(adapt=("model.enable_input_require_grads()  # as it was measured",))
    if not case.parts or case.lora or case.config.activation_checkpointing == "none":
        return Fragments()

    return Fragments(
        adapt=(
            'if hasattr(model, "_require_grads_hook"):',
            "    model.disable_input_require_grads()  # nothing before the first trained part",
        )
    )
