"""Call a command, and print only the message of a user error."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator

from common.errors import UserError
from common.progress import log_to_stderr

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's environment variable, which all commands read


def run_and_print_errors(action: Callable[[], object]) -> None:
    """Call `action`. Print only the message of a UserError, and exit with code 1.

    The message is one line, or a line for each of several problems. HYDRA_FULL_ERROR=1 prints the traceback, too.
    """
    prepare_streams()
    if not any(word.startswith(("-i", "--info")) for word in sys.argv[1:]):  # Hydra logs this text to stdout itself
        log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start background jobs with SIGINT ignored
    try:
        with exit_on_broken_pipe():
            action()
            disconnect_processes()
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run the same command again, which resumes or starts over\n")
        sys.exit(128 + signal.SIGINT)
    except UserError as error:
        if wants_tracebacks():
            raise
        rank = os.environ.get("RANK")
        sys.exit(f"error{'' if rank is None else f' (process {rank})'}: {error}")


def wants_tracebacks() -> bool:
    """Return whether user errors keep their traceback."""
    return os.environ.get(FULL_ERRORS) == "1"


def prepare_streams() -> None:
    """Make stdout and stderr accept any text, also if the shell closed them or if the locale lacks letters."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it (2>&-)
            setattr(sys, stream, open(os.devnull, "w"))
        getattr(sys, stream).reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
    """End the process quietly, as the system ends other programs, if the reader of stdout ends (`| head`)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def disconnect_processes() -> None:
    """Disconnect from the other processes, if a command has connected to them."""
    if processes := sys.modules.get("runtime.processes"):  # importing it takes seconds
        processes.destroy_process_groups()
