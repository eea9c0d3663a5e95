"""PageTable: the three forms of page reports, and that a misread one never yields a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_connector.engine_api.pages import NO_PAGE, PageTable


def test_flat_list_of_one_group() -> None:
    table = PageTable((0,))
    table.extend([5, 6], [])
    table.extend([7], None)
    assert [table.at(ordinal) for ordinal in range(4)] == [(5,), (6,), (7,), None]
    assert len(table) == 3


@pytest.mark.parametrize("grouped", [[[1, 2], [3, 4]], {0: [1, 2], 1: [3, 4]}, {1: [3, 4], 0: [1, 2]}])
def test_lists_and_dicts_by_group(grouped: object) -> None:
    table = PageTable((0, 1))
    table.extend([], grouped)  # type: ignore[arg-type]
    assert table.at(1) == (2, 4)


def test_grouped_form_wins_and_the_flat_copy_is_not_counted_twice() -> None:
    table = PageTable((0,))
    table.extend([5, 6], [[5, 6]])
    assert len(table) == 2


def test_blocks_without_a_page_keep_their_place() -> None:
    table = PageTable((0, 1))
    table.extend([], [[1, 2, 3], [-1, -7, 9]])
    assert [table.at(ordinal) for ordinal in range(3)] == [(1, NO_PAGE), (2, NO_PAGE), (3, 9)]


def test_group_that_lags_behind_hides_the_block() -> None:
    table = PageTable((0, 1))
    table.extend([], {0: [1, 2]})
    assert table.at(0) is None
    table.extend([], {1: [3]})
    assert (table.at(0), table.at(1)) == ((1, 3), None)


def test_empty_reports_change_nothing() -> None:
    table = PageTable((0, 1))
    for nothing in ([], [[], []], {}, {0: []}, None):
        table.extend([], nothing)  # type: ignore[arg-type]
    assert len(table) == 0
    assert not table.broken


@pytest.mark.parametrize(("flat", "grouped"), [([1], []), ([], [[1], [2], [3]]), ([], {7: [1]})])
def test_report_that_does_not_fit_the_groups_yields_no_page_ever(flat: list[int], grouped: object) -> None:
    table = PageTable((0, 1))
    table.extend([], [[1], [2]])
    table.extend(flat, grouped)  # type: ignore[arg-type]
    table.extend([], [[3], [4]])
    assert table.broken
    assert table.at(0) is None
    assert len(table) == 0


@given(st.lists(st.lists(st.integers(-3, 40), max_size=5), max_size=6))
def test_deltas_add_up_to_the_whole_list(deltas: list[list[int]]) -> None:
    table = PageTable((0,))
    for delta in deltas:
        table.extend(delta, [delta])
    whole = [slot for delta in deltas for slot in delta]
    assert [table.at(ordinal) for ordinal in range(len(whole))] == [(max(slot, NO_PAGE),) for slot in whole]
