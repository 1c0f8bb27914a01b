"""Environment: what the user has set stays."""

from autofit.core.environment import SETTINGS, set_defaults


def test_only_what_is_not_set_is_set() -> None:
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    set_defaults(environment)
    assert environment == {**SETTINGS, "OMP_WAIT_POLICY": "ACTIVE"}
