"""peft: adapter_config.json, which `PeftConfig.from_pretrained(DIRECTORY)` reads, and a README
beside it. JSON has no comments, and peft warns of unknown keys: the README holds the header."""

import json

from autofit.core.quoting import markdown_code
from autofit.core.tasks import task_named
from autofit.export import several_devices
from autofit.export.shared_keys import kinds_of_adapter, lora_alpha, lora_dropout, values
from autofit.export.tool import HUGGING_FACE, Tool, ToolKeys

_NO_ADAPTERS = "peft is about adapters, and this config trains all weights."
_ELSEWHERE = "an adapter's config says nothing of it; the code that trains has to"

TOOL = Tool(
    title="peft",
    versions=("0.21.2",),
    caches_casts=False,
    run='get_peft_model(model, PeftConfig.from_pretrained("peft"))',
    tasks=HUGGING_FACE,
    expert_targets="target_parameters",
    refuse=lambda source: None if source.config.lora_rank else _NO_ADAPTERS,
    fixed=lambda request: {
        "peft_type": "LORA",
        "task_type": task_named(request.source.task).peft_type,
        "base_model_name_or_path": request.source.weights,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": list(request.source.heads) or None,
    },
    file="peft/adapter_config.json",
    files=lambda source, keys, header, file: {
        file: json.dumps(dict(keys), indent=2) + "\n",
        "peft/README.md": markdown_code("\n".join(header)) + "\n",
    },
    without=_ELSEWHERE,
    without_may_not_fit=False,
    knobs={
        **several_devices.sentence(lambda request: _ELSEWHERE),
        **values(lora_rank="r"),
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        **kinds_of_adapter(),
        "lora_targets": lambda request: ToolKeys(
            {"target_modules": request.source.layers("all-linear")}
        ),
    },
)
