"""Plain data with one part replaced or left out, as a hand or a script may leave a file."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.sampled_from([2.5, -0.5, 1e308]),
    st.text(max_size=4),
)
_ANYTHING = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=2),
    st.dictionaries(st.text(max_size=2), _SCALARS, max_size=2),
)


def _paths(data: Any, leave: str | None, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in (
        data
        if isinstance(data, dict)
        else range(min(len(data), 2))
        if isinstance(data, list)
        else ()
    ):
        if key != leave:
            yield (*path, key)
            yield from _paths(data[key], leave, (*path, key))


@st.composite
def mutations(draw: st.DrawFn, data: Any, *, leave: str | None = None) -> Any:
    """The data with any part of it, however deep, replaced or left out, but none under the key `leave`."""
    changed = copy.deepcopy(data)
    *path, last = draw(st.sampled_from(list(_paths(data, leave))))
    holder = changed
    for key in path:
        holder = holder[key]
    if draw(st.integers(0, 5)):
        holder[last] = draw(_ANYTHING)
    else:
        del holder[last]
    return changed
