"""What every test runs under: no network, and tests of the GPU only where there is one."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
