"""Tables as `status` prints them."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from dynamo_semkv.cli import text as t


def texts(*values: object) -> list[Text]:
    """Cells as text, not as markup: a name with brackets in it stays a name."""
    return [Text(t.clean(value)) for value in values]


def make_table(title: str, *columns: str) -> Table:
    """An empty table; a column named `>name` holds numbers, aligned right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
