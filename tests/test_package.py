"""What `import autofit` gives."""

import importlib
import pickle

import cloudpickle
import pytest

import autofit


@pytest.mark.parametrize(
    "pickled", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"]
)
def test_functions_that_name_the_package_can_be_sent_to_probes(pickled: object) -> None:
    assert callable(pickled)
    assert pickle.loads(pickled(autofit)) is autofit


def test_functions_are_not_hidden_by_the_rooms_of_their_names() -> None:
    for name in ("search", "estimate", "export"):
        importlib.import_module(f"autofit.{name}")
        assert callable(getattr(autofit, name))


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(autofit, name) is not None for name in autofit.__all__)
    assert set(autofit.__all__) <= set(dir(autofit))
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        autofit.serch  # noqa: B018
