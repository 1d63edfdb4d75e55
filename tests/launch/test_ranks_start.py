"""A process finds its rank in the variables of torchrun or srun, and the end of a worker becomes
the end of the run."""

import errno
import pickle
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from builders.runs import config_of
from torch.distributed import TCPStore

from pgtoolkit.assembly.early_stop import stop_signals_recorded
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError, Interrupted, StorageError
from pgtoolkit.launch import worker
from pgtoolkit.launch.ranks import _conclude, loopback_store
from pgtoolkit.ranks.environment import Rank, first_host, joined
from pgtoolkit.runs.records import read_status

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Unset the variables of launchers; return a function that sets some of them."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_a_process_that_no_launcher_started_has_no_rank(environment):
    assert joined() is None
    environment(WORLD_SIZE="1", RANK="0")
    assert joined() is None
    environment(SLURM_PROCID="0", SLURM_NTASKS="4")  # the script of a batch job, before srun
    assert joined() is None


def test_a_process_of_torchrun_has_the_rank_and_the_address_of_its_variables(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="head", MASTER_PORT="1234")
    assert joined() == Rank(number=5, world_size=8, local=1, address="head", port=1234)


def test_a_process_of_srun_has_its_rank_and_the_address_of_the_first_node(environment):
    environment(
        SLURM_PROCID="5",
        SLURM_STEP_NUM_TASKS="8",
        SLURM_LOCALID="1",
        SLURM_STEP_NODELIST="gpu[03-04]",
    )
    environment(SLURM_JOB_ID="77", SLURM_STEP_ID="2")
    assert joined() == Rank(number=5, world_size=8, local=1, address="gpu03", port=20541)
    environment(MASTER_ADDR="head", MASTER_PORT="9")
    assert (joined().address, joined().port) == ("head", 9)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE=x needs a whole number >= 0 (got x)"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 needs a rank below WORLD_SIZE=2 (got 2)"),
    ],
)
def test_a_rank_that_is_no_number_or_too_large_is_refused(environment, variables, message):
    environment(**variables)
    with pytest.raises(ConfigError, match=re.escape(message)):
        joined()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,7],login", "gpu03"),
        ("login,gpu[1-2]", "login"),
        ("a-b[9]", "a-b9"),
        ("n1", "n1"),
    ],
)
def test_the_first_node_of_a_list_of_slurm_is_its_first_name_and_number(nodes, first):
    assert first_host(nodes) == first


def run_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> tuple[int, worker.Training]:
    """Run a worker in which training raises an error; return its exit status, and its task."""

    def train(training: worker.Training, rank: Rank) -> None:
        raise error

    monkeypatch.setattr(worker, "train_as_rank", train)
    monkeypatch.setattr("sys.argv", ["pgtk"])
    training = worker.Training(None, tmp_path / "run", argv=["pgtk"])
    (tmp_path / "job").write_bytes(pickle.dumps(training))
    return worker.main(tmp_path), training


def test_ctrl_c_while_workers_start_interrupts_the_run(environment, monkeypatch, tmp_path):
    environment(RANK="0", WORLD_SIZE="2")
    status, training = run_worker(monkeypatch, tmp_path, KeyboardInterrupt())
    assert status == 130
    assert list(tmp_path.glob("rank-*")) == []
    processes = {0: SimpleNamespace(returncode=130), 1: SimpleNamespace(returncode=-signal.SIGINT)}
    recorded = stop_signals_recorded(plain_config(config_of("seed=1")), training.run_dir, [])
    message = r"stopped as asked \(SIGINT\); the run is interrupted at step 0. Continue with:"
    with pytest.raises(Interrupted, match=message), recorded:
        _conclude(tmp_path, processes, [signal.SIGINT], [], training)
    assert read_status(training.run_dir)["reason"] == "SIGINT"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_in_a_worker_is_the_error_of_the_run(environment, monkeypatch, tmp_path, rank):
    environment(RANK=str(rank), WORLD_SIZE="2")
    full = OSError(errno.ENOSPC, "No space left on device", "outputs/x")
    status, training = run_worker(monkeypatch, tmp_path, full)
    assert status == 6
    message = "outputs/x cannot be read or written: No space left on device"
    if rank == 1:
        message = f"rank 1: {message}"
    advice = r"\. Make room on its disk: df -h \S+ shows how much is free\."
    with pytest.raises(StorageError, match=f"^{message}{advice}$"):
        _conclude(tmp_path, {rank: SimpleNamespace(returncode=6)}, [], [], training)


def test_the_store_of_local_workers_is_reached_from_this_machine_alone():
    store = loopback_store()
    store.set("key", "value")
    assert TCPStore("127.0.0.1", store.port, is_master=False).get("key") == b"value"
    # Of two jobs at a time, each has its own.
    other_store = loopback_store()
    other_client = TCPStore("127.0.0.1", other_store.port, is_master=False)
    assert not other_client.check(["key"])
    others = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    for address in others or pytest.skip("this machine has no interface but loopback"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=5)
