"""Two processes: one may work alone for longer than the timeout of an exchange. The other waits, but not forever."""

import json
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from forked import Command, free_port

from common.errors import UserError
from runtime import machine, processes
from sampling import evaluator

SCRIPT = """
import json, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from common.errors import UserError
from runtime import processes
from training import stop as stop_module
folder, what, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = f"file://{folder}/store"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))  # to find each other
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
processes.init_gloo_group(2, timedelta(seconds=5 if what == "barrier" else 60))

def slow(is_here):
    if is_here:
        time.sleep(3)

def fail():
    raise UserError("refused")

found = []
if what == "wait":
    found.append(processes.on_main(lambda: slow(True) or rank))
    slow(rank == 1)
    found.append([part.tolist() for part in processes.gather_on_main(torch.tensor([rank, 7]))])
    slow(rank == 0)
    processes.barrier()
    kept = processes.keep_on_main(lambda: open(f"{folder}/kept", "w"))  # no other process can receive an open file
    found.append(kept.name.endswith("kept") if rank == 0 else kept)
    try:
        processes.on_main(fail)
    except UserError as e:
        found.append(str(e))
    mine = [(item, rank) for item in processes.own_share(5)]
    found.append(processes.gather_lists(mine))
    processes.destroy_process_groups()
else:
    stop_module.STOP_TIMEOUT = timedelta(seconds=6)
    stop = stop_module.StopSignal()
    stop.poll()
    if rank == 1:
        time.sleep(14)
        sys.exit()
    try:
        stop.poll() if what == "stop" else processes.barrier()
    except (UserError, RuntimeError) as e:
        found.append(str(e))
with open(f"{folder}/{rank}.json", "w") as f:
    json.dump(found, f)
"""


def test_processes_that_accelerate_does_not_use_are_refused(monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(processes.dist, name, lambda value=value: value)
    with pytest.raises(UserError, match="its 2 processes; .* set ACCELERATE_USE_CPU=true"):
        processes.init_gloo_group(1, timedelta(hours=1))


@pytest.mark.parametrize(
    ("rank", "port", "words"),
    [("0", None, ".*1/2 clients joined"), ("1", None, ".*timed out"), ("0", "abc", "invalid literal")],
)
def test_a_process_with_the_variables_of_a_launcher_that_has_ended_says_what_it_waits_for(rank, port, words, tmp_path):
    script = "from datetime import timedelta\nfrom cli.print_errors import run_and_print_errors\nfrom runtime import machine\n"
    script += "run_and_print_errors(lambda: machine.start_accelerator(1, timeout=timedelta(seconds=4)))\n"
    (tmp_path / "script.py").write_text(script)
    port = port or free_port()
    variables = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    outcome = Command(tmp_path, [str(tmp_path / "script.py")], **variables).finish()
    assert outcome.code == 1 and "Traceback" not in outcome.output, outcome.output
    *_, error = outcome.output.strip().splitlines()
    waiting = f"process {rank} waits for all WORLD_SIZE=2 processes at localhost:{port}"
    assert re.match(rf"error \(process {rank}\): {waiting}: {words}.*; to start without a launcher, unset WORLD_SIZE", error), (
        error
    )
    if port != "abc":  # rank 0 says so within seconds, other ranks only after 30 seconds
        assert (f"{waiting}, for at most 0 minutes" in outcome.output) == (rank == "0")


def test_an_error_of_connected_processes_is_not_about_the_connection(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(machine.torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="^bf16 is not supported$") as raised, machine.reporting_connection(timedelta(minutes=1)):
        raise ValueError("bf16 is not supported")
    assert not isinstance(raised.value, UserError)


@pytest.fixture
def run(tmp_path):
    """Fixture: run(what) returns what each process found."""

    def both(what):
        folder = tmp_path / what
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        arguments = [str(folder / "script.py"), str(folder), what]
        processes = [Command(folder, [*arguments, str(rank)], LOCAL_RANK=str(rank)) for rank in (0, 1)]
        for process in processes:
            process.finish().expect_code(0)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]

    return both


def test_processes_wait_for_one_that_works_alone_for_longer_than_the_timeout_of_an_exchange(run):
    main, other = run("wait")
    assert main[0] == other[0] == 0 and main[3] == other[3] == "refused"
    assert main[2] is True and other[2] is None
    assert (main[1], other[1]) == ([[0, 7], [1, 7]], [])
    assert main[4] == other[4] == [[0, 0], [1, 0], [2, 1], [3, 1], [4, 1]]


def test_the_other_processes_get_an_error_of_the_main_process_in_the_cache_of_a_reference(monkeypatch, tmp_path):
    def refuse(*_):
        raise UserError("the cache is refused")

    sent = []
    monkeypatch.setattr(processes, "_group", object())
    monkeypatch.setattr(processes.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(processes.dist, "broadcast_object_list", lambda result, **_: sent.append(result))
    monkeypatch.setattr(evaluator, "read_cache", refuse)
    with pytest.raises(UserError, match="the cache is refused"):
        detector, reference = SimpleNamespace(name="digits"), SimpleNamespace(statistics={})
        evaluator.Evaluator(SimpleNamespace(is_main_process=True), [detector], reference, 8, tmp_path)
    assert [str(error) for _, error in sent] == ["the cache is refused"]


def test_the_wait_for_a_process_that_hangs_ends_with_an_error(run):
    ((at_a_stop,),) = run("stop")
    assert at_a_stop.startswith("another process has ended, or has not answered for 0.1 minutes; run the same command to resume")
    ((alone,),) = run("barrier")
    assert "Rank 1 failed to pass monitoredBarrier in 5000 ms" in alone
