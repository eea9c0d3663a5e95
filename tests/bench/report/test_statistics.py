"""Medians, paired ratios, growth laws."""

from __future__ import annotations

import math

import pytest

from dynamo_semkv.bench.report.statistics import Figure, growth, law, paired, quantile


def test_a_figure_is_a_median_with_its_spread() -> None:
    figure = Figure("s", (0.3, 0.1, 0.2), "lower")
    assert (figure.median, figure.low, figure.high) == (0.2, 0.1, 0.3)
    assert Figure.from_plain(figure.plain()) == figure


@pytest.mark.parametrize("values", [(), (math.nan,), (1.0, math.inf)])
def test_a_figure_without_a_number_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="values"):
        Figure("s", values)


def test_a_ratio_is_taken_repeat_by_repeat() -> None:
    """Medians of both would say 1.0 here: the machine was twice as slow in one repeat, for both alike."""
    ours, theirs = Figure("s", (1.0, 2.0, 4.0), "lower"), Figure("s", (2.0, 4.0, 2.0))
    assert paired(ours, theirs) == Figure("ratio", (0.5, 0.5, 2.0), "lower")
    with pytest.raises(ValueError, match="no pairs"):
        paired(ours, Figure("s", (1.0,)))
    with pytest.raises(ValueError, match="no pairs"):
        paired(ours, Figure("s", (1.0, 0.0, 1.0)))


def test_quantiles_lie_between_the_nearest_values() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="none"):
        quantile([], 0.5)


@pytest.mark.parametrize(
    ("exponent", "words"), [(0.0, "does not grow"), (0.2, "logarithm"), (1.0, "in proportion"), (2.0, "faster")]
)
def test_the_law_of_a_power_is_found_and_said(exponent: float, words: str) -> None:
    xs = [1.0, 10.0, 100.0]
    found = growth(xs, [5 * x**exponent for x in xs])
    assert found == pytest.approx(exponent)
    assert words in law(found)


def test_one_point_has_no_law() -> None:
    assert growth([3.0, 3.0], [1.0, 2.0]) is None
    assert law(None) == "too few points to tell"
