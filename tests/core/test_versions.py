from __future__ import annotations

import autofit
from autofit.core.versions import versions


def test_versions_name_what_a_result_depends_on() -> None:
    found = versions()
    assert found["autofit"] == autofit.__version__
    assert {"python", "torch", "transformers", "optuna"} <= found.keys()
