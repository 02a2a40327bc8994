"""How an error is shown to the user: in one line."""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback

from cookbook.core.errors import CookbookError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a used-up quota."""


def one_line(error: BaseException) -> str:
    """The error in one line. One that is not a CookbookError is marked as unexpected."""
    text = " ".join(str(error).split())
    if isinstance(error, CookbookError):
        return text
    if isinstance(error, OSError) and error.errno in FULL:
        place = error.filename or tempfile.gettempdir()
        return f"{place}: cannot be written ({error.strerror}); free some space, then continue with resume=auto"
    return f"unexpected {type(error).__name__}: {text} (rerun with debug=true for the traceback)"


def print_error(error: BaseException, debug: bool = False) -> None:
    """Print the line on stderr; after the traceback where the user asked for it."""
    if debug:
        traceback.print_exception(error)
    print(f"error: {one_line(error)}", file=sys.stderr)
