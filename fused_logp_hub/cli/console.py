"""Where the commands write: colours and bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH = 120


def make_console(stderr: bool = False) -> Console:
    """A console that takes text literally: messages hold brackets, which are markup to rich."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PLAIN_WIDTH
    return console


def make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)  # the first says what a line is about
    return table


def print_error(message: str) -> None:
    make_console(stderr=True).print(f"error: {message}", style="red", soft_wrap=True)
