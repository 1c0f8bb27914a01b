"""A file that is named as tensors or an archive holds no rows, also where it is cut short."""

from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions
from tests.tiny import llama_workload


@pytest.mark.parametrize("name", ["model.pt", "data.NPZ", "weights.safetensors", "all.zip"])
@pytest.mark.parametrize("content", [b"PK", b"a few words\n", b""])
def test_it_is_not_trained_on_as_text(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is named as one of \.\w+, which holds no rows"):
        file_loader(llama_workload(), path, tokenizer=None, options=DataOptions())
