"""Run a command, in one process or several, in forks of a process that has imported everything: 1 second instead of 6.

A drill runs in a folder of its own and writes to relative paths, so that two runs of it leave the same bytes.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import zipfile
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import torch

import dit

REPOSITORY = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HAPPENED = "<it happened>"  # printed when a disturbance begins
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
_CONTEXT = multiprocessing.get_context("forkserver")
# All commands, and the modules that they import late.
_IMPORTED = "train sample fid prepare_latents matplotlib.pyplot scipy.linalg timm.layers torch._dynamo"
_IMPORTED += " torch.distributed.nn.functional evaluations.classifiers extras.alignment"
_IMPORTED += " extras.lightningdit pytest"


@functools.cache
def start_server():
    """Start the process that imports everything, once. multiprocessing sets sys.path only after these imports."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), before])
    forkserver.set_forkserver_preload(_IMPORTED.split())
    forkserver.ensure_running()
    os.environ["PYTHONPATH"] = before


@dataclass
class Outcome:
    code: int | None  # the exit code, or minus the number of the signal that ended the process; None after a timeout
    output: str

    def happened(self):
        return HAPPENED in self.output

    def expect_code(self, *codes):
        assert self.code in codes and "Traceback (most recent" not in self.output, (self.code, self.output)

    def expect_one_line(self, *words):
        """Check that the command exited with 1 and one line of error, which contains all words."""
        self.expect_code(1)
        _, _, error = self.output.partition("error: ")
        assert error and "\n" not in error.strip() and all(word in error for word in words), self.output


class Command:
    """Run `<script> <arguments>` in its own process and session. `before` runs first, in that process.

    With `small`, DiT-XS/2 is so small that its checkpoints take 1 MB.
    """

    def __init__(self, folder, arguments, before=None, small=True, **environment):
        start_server()
        folder.mkdir(parents=True, exist_ok=True)
        self._reader, writer = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_become, args=(folder, writer, arguments, before, small, environment))
        self.process.start()
        writer.close()

    def finish(self, limit_sec=60):
        self.process.join(limit_sec)
        code = self.process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # processes that it left running, and itself after a timeout
        self.process.join()  # now its locks are free
        with open(self._reader.fileno(), "rb", closefd=False) as pipe:
            return Outcome(code, pipe.read().decode(errors="replace"))


def run(folder, arguments, before=None, **how):
    return Command(folder, arguments, before, **how).finish()


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def launch(folder, arguments, num_processes, before=None, limit_sec=60, **how):
    """Launch connected processes, as `accelerate launch` does. Returns their outcomes. `before` holds a function per rank."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    where |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    ranks = [
        Command(folder, arguments, (before or {}).get(rank), RANK=str(rank), LOCAL_RANK=str(rank), **where, **how)
        for rank in range(num_processes)
    ]
    return [process.finish(limit_sec) for process in ranks]


@contextlib.contextmanager
def as_program():
    """End the process after the `with` block, as Python ends a program."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            sys.stderr.write(f"{e.code}\n")
    except BaseException:  # noqa: BLE001 (Python does the same when a program ends)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(folder, writer, arguments, before, small, environment):
    with as_program():
        os.setsid()
        for signum in SIGNALS:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        os.dup2(writer.fileno(), 1)
        os.dup2(writer.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
        os.chdir(folder)
        os.environ |= {"ACCELERATE_USE_CPU": "true", **environment}
        torch.set_num_threads(1)
        if small:
            dit.BACKBONES["DiT-XS/2"] = (12, 24, 3, 2)
        if before is not None:
            before()
        script, *sys.argv[1:] = arguments
        sys.argv[0] = str(REPOSITORY / script)
        runpy.run_path(sys.argv[0], run_name="__main__")


# ----------------------------------------------------------------------------------------------------------------------
# For `before` of launchers: the Python processes that the command starts are forks, too, and import only the project anew.


def fork_children():
    """Fork where this process and its children would start `python <arguments>`."""
    from joblib.externals.loky.backend import fork_exec as loky
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as elastic

    subprocess.Popen = elastic.Popen = _Popen
    loky.fork_exec = _fork_worker


class _Popen(subprocess.Popen):
    def __init__(self, args, **how):
        if not isinstance(args, str) and args[0] == sys.executable:
            how["preexec_fn"] = functools.partial(_become_python, args[1:], how.get("env"))  # does not return
        super().__init__(args, **how)


def _fork_worker(command, keep_fds, env=None):
    """Do what joblib.externals.loky.backend.fork_exec does."""
    if pid := os.fork():
        return pid
    _become_python(command[1:], os.environ | (env or {}), keep_fds)


def _become_python(arguments, env, keep_fds=()):
    """Run `python <arguments>` in this new process, which shares memory with its parent, but no file that a new program loses."""
    with as_program():
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder itself
                if int(name) > 2 and int(name) not in keep_fds and not os.get_inheritable(int(name)):
                    os.dup2(null, int(name), inheritable=False)  # the number stays in use, because the parent's objects know it
        for signum in SIGNALS:
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        sys.stdin = open(0, closefd=False)
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        for name, module in list(sys.modules.items()):
            file = str(getattr(module, "__file__", None))
            if file.startswith(f"{REPOSITORY}{os.sep}") and "site-packages" not in file:
                del sys.modules[name]
        logging.root.handlers.clear()
        arguments = [argument for argument in arguments if argument != "-u"]
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")


# ----------------------------------------------------------------------------------------------------------------------
# Disturbances for `before`. They are sent to another process: functions of a module, or partials of them.


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def send(signum):
    os.kill(os.getpid(), signum)


def fail_with(number):
    raise OSError(number, os.strerror(number))


def act(action):
    os.write(2, f"{HAPPENED}\n".encode())
    action()


def at_operation(action, pattern):
    """Act before the first operation on files whose line ("rename run/a run/b") matches `pattern`.

    Operations change files below the working folder: opening to write, renaming, deleting, making folders, fsync.
    """
    here, is_done, fsync = os.getcwd(), False, os.fsync

    def hook(event, args):
        nonlocal is_done
        if event == "open":
            if not isinstance(args[0], str) or not isinstance(args[2], int) or not args[2] & _WRITES:
                return
            args = args[:1]
        elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync"):
            return
        paths = [os.path.relpath(os.path.join(here, arg), here) for arg in args[:2] if isinstance(arg, str)]
        line = re.sub(r"\.tmp_[0-9a-f]{16}_", ".tmp_", " ".join([event.removeprefix("os."), *paths]))
        if not is_done and not any(path.startswith("..") for path in paths) and re.search(pattern, line):
            is_done = True
            act(action)

    def fsync_and_tell(file):
        hook("os.fsync", (os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"),))
        fsync(file)

    sys.addaudithook(hook)
    os.fsync = fsync_and_tell


def at_call(action, name, number):
    """Act at the number-th call of a function, `module:Class.method`. From then on, each call takes half a second longer."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function, count = getattr(owner, attribute), 0

    @functools.wraps(function)
    def wrapped(*args, **settings):
        nonlocal count
        count += 1
        if count == number:
            act(action)
        if count >= number:
            time.sleep(0.5)
        return function(*args, **settings)

    setattr(owner, attribute, wrapped)


# ----------------------------------------------------------------------------------------------------------------------
# The files that a command leaves.

_TIMES = {"steps_per_sec", "images_per_sec", "evaluation_sec"}


def contents(folder):
    """Return {path: hash of the content} of all files in `folder`, without locks, times, starts.jsonl and bad_step_ files."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_file() or name.endswith((".lock", "starts.jsonl")) or "bad_step_" in name:
            continue
        blob = file.read_bytes()
        if file.suffix == ".npz":  # a zip holds the time of its creation
            with zipfile.ZipFile(file) as archive:
                blob = repr([(member, archive.read(member)) for member in archive.namelist()]).encode()
        elif file.suffix == ".jsonl":
            lines = [json.loads(line) for line in blob.splitlines()]
            blob = json.dumps([{key: value for key, value in line.items() if key not in _TIMES} for line in lines]).encode()
        found[name] = hashlib.blake2b(blob, digest_size=8).hexdigest()
    return found
