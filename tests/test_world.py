"""How ranks find each other: what torchrun and srun say in the environment."""

import pytest

from megabatch.distributed.world import Launch, device_index, first_host, launched

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu04,login1",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_a_task_of_srun_is_a_rank_of_its_step():
    assert launched(SLURM) == Launch("tcp://gpu04:10863", rank=5, size=6, local_rank=1)


def test_all_tasks_of_a_job_meet_at_one_place():
    of_job = {name: value for name, value in SLURM.items() if "STEP" not in name}
    launches = [launched({**of_job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}) for rank in range(8)]
    assert {launch.url for launch in launches} == {"tcp://gpu03:10861"}
    assert [launch.rank for launch in launches] == list(range(8))
    assert {launch.size for launch in launches} == {8}


def test_steps_of_a_job_do_not_meet():
    assert launched(SLURM).url != launched({**SLURM, "SLURM_STEP_ID": "3"}).url


def test_the_place_that_is_given_wins():
    given = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert launched(given).url == "tcp://10.0.0.1:4000"


def test_ranks_of_torchrun_that_srun_started_are_torchruns():
    assert launched({**SLURM, **TORCHRUN}) == Launch("env://", rank=3, size=4, local_rank=1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        # A batch script that starts one process, though its job has eight tasks.
        {**{name: value for name, value in SLURM.items() if "STEP" not in name}, "ENVIRONMENT": "BATCH"},
        # A shell of salloc.
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "gpu[03-04]"},
    ],
)
def test_a_process_that_is_alone_is_no_rank(variables):
    assert launched(variables) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("node[01-04,07]", "node01"),
        ("node[07,01-04],login1", "node07"),
        ("a1,b[2-3]", "a1"),
        ("rack[2-3]node[09-10]", "rack2node09"),
        ("gpu-a[1-2]-ib", "gpu-a1-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees():
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0
    with pytest.raises(ValueError, match="got 4 GPUs and local rank 4"):
        device_index(4, 4)
