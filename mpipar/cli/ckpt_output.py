"""What the ckpt commands print: text from strangers, made harmless."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns where the output is no terminal
_WIDE = 1000


def plain(text: object) -> str:
    """The text with an escape for each character that a terminal would obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)
    )


def megabytes(size: int) -> str:
    """Bytes in words."""
    return f"{size / 1e6:,.1f} MB"


def console() -> Console:
    """Standard output for tables; nothing in a text is markup."""
    from rich.console import Console

    # A terminal that cannot show a character gets its code, not a traceback.
    sys.stdout.reconfigure(errors="backslashreplace")
    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, markup=False, emoji=False, width=width)
