"""What comes in from outside, at its oddest: values, texts and damaged bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

numbers = (
    st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from([0, -1, 2**31, 2**32, 2**63, 2**64, -(2**63)])
)
texts = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\x00", "\ud800", "a" * 2_000, "é😀", "-1", "NaN", "1e999", "None"]
)
leaves = st.none() | st.booleans() | numbers | texts | st.binary(max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=10,
)


def mappings(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the names, each with whatever it likes, and others beside them."""
    return st.dictionaries(st.sampled_from(names) | texts, values, max_size=len(names) + 2)


@st.composite
def damaged(draw: st.DrawFn, raw: bytes, *, changes: int = 4) -> bytes:
    """Some bytes of `raw` changed, and perhaps an end cut off or more behind it."""
    found = bytearray(raw)
    for _ in range(draw(st.integers(1, changes))):
        found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
    cut = bytes(found[: draw(st.integers(0, len(found)))]) if draw(st.booleans()) else bytes(found)
    return cut + (draw(st.binary(max_size=8)) if draw(st.booleans()) else b"")


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """One place of a plain tree with another value in it."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(tree)))
        return {**tree, key: draw(changed(tree[key]))}
    if isinstance(tree, list) and tree and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], draw(changed(tree[at])), *tree[at + 1 :]]
    return draw(values)


def is_short(error: Exception, limit: int, lines: int | None = None) -> None:
    """A refusal does not repeat what was sent at any length."""
    assert len(str(error)) < limit
    assert lines is None or str(error).count("\n") < lines


def keeps(secret: str, said: str) -> None:
    assert len(secret) < 4 or secret not in said
