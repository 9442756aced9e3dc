"""Each launcher's variables lead to the same facts; half of them lead to an error, not to ranks that train alone."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.dist.host_info import ranks_here
from hf_dist.dist.launch import _LOCAL_SIZES, Launch, detect_launch
from hf_dist.errors import TopologyError
from tests.processes import run

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"}


def test_plain_python_is_rank_zero_of_one_and_leaves_the_environment_alone() -> None:
    env: dict[str, str] = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "HOSTNAME": "login"}
    before = dict(env)
    assert detect_launch(env) == Launch(0, 1, 0, "none")
    assert env == before


def test_torchrun() -> None:
    env = dict(TORCHRUN)
    assert detect_launch(env) == Launch(5, 8, 1, "torchrun")
    assert env == TORCHRUN


def test_accelerate_launch_sets_the_variables_of_torchrun() -> None:
    env = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2"}
    assert detect_launch(env) == Launch(5, 8, 1, "torchrun")


def test_openmpi_on_one_machine() -> None:
    env = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert detect_launch(env) == Launch(1, 4, 1, "mpirun")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "4", "1")
    assert env["MASTER_ADDR"] == "127.0.0.1" and env["MASTER_PORT"].isdigit()


def test_openmpi_on_several_machines_needs_an_address() -> None:
    env = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(TopologyError, match="MASTER_ADDR"):
        detect_launch(dict(env))
    env["MASTER_ADDR"] = "node1"
    assert detect_launch(env) == Launch(1, 4, 1, "mpirun")


def test_mpich() -> None:
    env = dict(MPICH)
    assert detect_launch(env) == Launch(2, 4, 2, "mpich")
    assert env["MASTER_ADDR"] == "127.0.0.1"


VALUES = st.sampled_from(
    ["0", "1", "2", "3", "4", "-1", "", " 2 ", "abc", "2.0", "٣", "9" * 30, "2(x2)", "1,1", "70000"]
)
KEYS = sorted({key for row in (TORCHRUN, OPENMPI, MPICH, SRUN) for key in row} | set(_LOCAL_SIZES.values()))


@given(st.dictionaries(st.sampled_from([*KEYS, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"]), VALUES))
def test_variables_of_any_kind_are_a_place_in_a_job_or_an_error_that_names_one_of_them(env: dict[str, str]) -> None:
    given = dict(env)
    try:
        launch = detect_launch(env)
    except TopologyError as error:
        assert any(key in str(error) for key in ("MASTER_ADDR", *given))
    else:
        assert 0 <= launch.rank < launch.world_size
        assert launch.local_rank >= 0


@pytest.mark.parametrize(
    ("nodes", "address"),
    [
        ("gpu[03-04]", "gpu03"),
        ("gpu[7,9-12]", "gpu7"),
        ("alpha,beta", "alpha"),
        ("solo", "solo"),
        ("a-b[1-2]", "a-b1"),
        ("rack[1-2]n[03,05]x,o", "rack1n03x"),
    ],
)
def test_srun_finds_the_first_machine(nodes: str, address: str) -> None:
    env = {**SRUN, "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "123456"}
    assert detect_launch(env) == Launch(3, 4, 1, "srun")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (address, str(29500 + 456))


def test_srun_with_the_pmi_plugin_is_still_srun() -> None:
    env = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}
    assert detect_launch(env) == Launch(3, 4, 1, "srun")
    assert env["MASTER_ADDR"] == "gpu03"


def test_mpirun_inside_a_slurm_step_is_mpirun() -> None:
    inside = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu03"}
    assert detect_launch({**inside, **MPICH}).launcher == "mpich"
    assert detect_launch({**inside, **OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).launcher == "mpirun"


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert detect_launch({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_ranks_of_one_job_agree_on_the_port() -> None:
    ports = set()
    for rank in "0123":
        env = {**SRUN, "SLURM_PROCID": rank, "SLURM_JOB_ID": "98765"}
        detect_launch(env)
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1


@pytest.mark.parametrize("env", [TORCHRUN, OPENMPI, MPICH, SRUN], ids=["torchrun", "mpirun", "mpich", "srun"])
def test_a_size_without_a_rank_is_an_error(env: dict[str, str]) -> None:
    rank = next(k for k in env if k.endswith("RANK") or k.endswith("PROCID"))
    with pytest.raises(TopologyError, match=rank):
        detect_launch({k: v for k, v in env.items() if k != rank})


def test_a_missing_local_rank_is_taken_from_the_rank() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert detect_launch(env).local_rank == 2


@pytest.mark.parametrize("env", [TORCHRUN, OPENMPI, MPICH, SRUN], ids=["torchrun", "mpirun", "mpich", "srun"])
def test_several_ranks_cannot_meet_at_port_0(env: dict[str, str]) -> None:
    place = {"MASTER_ADDR": "node7", "MASTER_PORT": "0"}
    with pytest.raises(TopologyError, match=r"^MASTER_PORT=0: the . ranks cannot meet at port 0. Set one free port"):
        detect_launch({**env, **place})
    alone = {key: "1" for key in env if key.endswith(("SIZE", "TASKS"))} | {
        key: "0" for key in env if key.endswith(("RANK", "RANKID", "PROCID"))
    }
    assert detect_launch({**env, **place, **alone}).world_size == 1, "which meets nobody"


# ---- ranks on one machine


@pytest.mark.parametrize(
    ("launcher", "said", "here"),
    [
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "4"}, "4"),
        (TORCHRUN, {}, None),
        (OPENMPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2"),
        (MPICH, {}, "4"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "2"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "3"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1"}, "1"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "2"}, "2"),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "8(x2)"}, "2"),
        (SRUN, {"SLURM_TASKS_PER_NODE": "8(x2)"}, None),  # of the allocation, whose step has fewer tasks
        (SRUN, {"SLURM_TASKS_PER_NODE": "2(x2)"}, "2"),
        (SRUN, {"SLURM_NTASKS_PER_NODE": "2"}, "2"),
        (SRUN, {}, None),
        ({**SRUN, "LOCAL_WORLD_SIZE": "1"}, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "1"),  # the user knows better
    ],
)
def test_ranks_on_this_machine(launcher: dict[str, str], said: dict[str, str], here: str | None) -> None:
    env = {**launcher, **said, "MASTER_ADDR": "node1"}
    detect_launch(env)
    assert env.get("LOCAL_WORLD_SIZE") == here


def test_where_no_launcher_says_how_many_ranks_a_machine_has_all_may_be_here() -> None:
    assert ranks_here({}) == 1
    assert ranks_here({"WORLD_SIZE": "8"}) == 8
    assert ranks_here({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == 4


DOORS = {
    "initialize": ("from hf_dist.dist.mesh import build_mesh", "build_mesh(device='cuda')"),
    "Trainer": ("from hf_dist.hf.args import DistTrainingArguments as A", "A('unused', dist_config={})"),
    "accelerate": ("from hf_dist.hf.accelerator import DistAccelerator as A", "A(dist_config={})"),
    "bench": ("from hf_dist.tools.bench import rank; import types", "rank.main('unused')"),
}
"""What is imported, before the machine has a GPU; what is called."""


@pytest.mark.parametrize("door", DOORS)
def test_a_gpu_has_queues_enough_before_cuda_starts(door: str) -> None:
    """CUDA reads their number once; `set_device` starts it, too. What would start it ends the process here."""
    imports, call = DOORS[door]
    script = f"""
import os
import torch._dynamo
{imports}

def start(*_, **__):
    print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"), flush=True)
    os._exit(0)

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = torch.cuda._lazy_init = torch.distributed.init_process_group = start
if "{door}" == "bench":
    rank.read_work = lambda path: (types.SimpleNamespace(device="cuda"), None)
{call}
"""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    left = {k: v for k, v in os.environ.items() if k not in ("CUDA_DEVICE_MAX_CONNECTIONS", "ACCELERATE_USE_CPU")}
    found = run([sys.executable, "-c", script], env=left | places, timeout=100)
    assert found.stdout == "32\n", found.stderr[-2000:]
