"""The error that a user can cause, and words of errors."""


class UserError(ValueError):
    """A wrong setting, file or machine: the message names the key or the file, the value, and what helps.

    Commands print it as one line and exit with 1. Every other exception is a defect of the program, of a library or of
    the researcher's own code, and keeps its traceback.

    Args:
        lines: the message; more than one where a command lists what it found.
    """

    def __init__(self, *lines: str):
        super().__init__("\n".join(map(printable, lines)))


def first_line(error: Exception) -> str:
    """What an error of a library says first; its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def printable(line: str) -> str:
    r"""The line with line breaks and control characters as `\n` and `\x1b`: names of files may hold them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
