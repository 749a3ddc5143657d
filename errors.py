"""The error that a user can cause."""


class UserError(ValueError):
    """A wrong setting, file or machine: the message names the key or the file, the value, and what helps.

    Commands print it as one line and exit with 1. Every other exception is a defect of the program, of a library or of
    the researcher's own code, and keeps its traceback.
    """
