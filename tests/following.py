"""Searches of tests that ask nothing of what annotates an answer."""

import pytest

_ANNOTATOR = "autofit.tuning.annotations.Annotator"


def unfollowed(patch: pytest.MonkeyPatch) -> None:
    """The best configs are followed neither through a step nor on other numbers of devices, which takes longer than to
    find them."""
    patch.setattr(f"{_ANNOTATOR}.timelines", lambda *_: {})
    patch.setattr(f"{_ANNOTATOR}.on_devices", lambda *_: ())
