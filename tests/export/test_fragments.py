"""Fragments of several knobs become one."""

from autofit.export.fragments import Fragments


def test_fragments_of_several_knobs_come_together() -> None:
    one = Fragments(imports=("a",), settings={"dtype": "x"}, held="one", forward=("autocast",))
    two = Fragments(imports=("b",), settings={"attn": "y"}, forward=("context",), stepped_in_backward=True)
    both = one.joined(two)
    assert both.imports == ("a", "b")
    assert both.settings == {"dtype": "x", "attn": "y"}
    assert (both.held, both.forward) == ("one", ("autocast", "context"))
    assert both.stepped_in_backward
