"""Fragments of several knobs become one."""

from autofit.export.fragments import Fragments


def test_fragments_of_several_knobs_come_together() -> None:
    one = Fragments(imports=("a",), held="one", forward=("autocast",))
    two = Fragments(imports=("b",), forward=("context",), stepped_in_backward=True)
    both = one.joined(two)
    assert both.imports == ("a", "b")
    assert (both.held, both.forward) == ("one", ("autocast", "context"))
    assert both.stepped_in_backward
