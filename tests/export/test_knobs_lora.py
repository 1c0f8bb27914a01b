"""Which layers a script puts adapters beside is told by their class, and some models have another one."""

import re
from pathlib import Path

import transformers

from autofit.export.knobs.lora import TRANSPOSED


def test_no_other_model_has_transposed_layers() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"import .*\bConv1D\b", path.read_text(encoding="utf-8"))
    }
    assert found == {kind.replace("openai-gpt", "openai") for kind in TRANSPOSED}
