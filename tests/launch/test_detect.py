"""Which cluster an environment describes: tables as the schedulers really set them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dsjax.errors import ConfigError
from dsjax.launch.distributed import detect, expand_nodes

ROOT = Path(__file__).parents[2]
EXPLICIT = {"DSJAX_COORDINATOR": "host-a:1234", "DSJAX_NUM_PROCESSES": "4", "DSJAX_PROCESS_ID": "2"}

# srun --nodes 2 --ntasks 4 --gpus-per-node 4, task 3 (on the second node).
SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_JOBID": "123456", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
    "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip

# mpirun -np 4 of Open MPI 4 over two hosts, rank 1.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip

JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "DSJAX_NUM_PROCESSES": "4",
    "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers", "HOSTNAME": "train-workers-0-1-x7x9z",
}  # fmt: skip


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_an_empty_environment_is_one_process():
    assert detect({}) is None


def test_explicit():
    cluster = detect(EXPLICIT)
    assert (cluster.coordinator, cluster.num_processes, cluster.process_id) == ("host-a:1234", 4, 2)
    assert cluster.local_device_ids is None
    assert detect({**EXPLICIT, "DSJAX_LOCAL_DEVICE_IDS": "2,3"}).local_device_ids == (2, 3)


def test_explicit_wins_over_the_scheduler():
    assert detect({**SLURM, **OPEN_MPI, **JOBSET, **EXPLICIT}).coordinator == "host-a:1234"


@pytest.mark.parametrize(
    ("address", "full"),
    [
        ("host", "host:61217"),
        ("10.0.0.1:9", "10.0.0.1:9"),
        ("[fe80::1]:9", "[fe80::1]:9"),
        ("fe80::1", "[fe80::1]:61217"),
    ],
)
def test_addresses(address, full):
    assert detect({**EXPLICIT, "DSJAX_COORDINATOR": address}).coordinator == full


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"DSJAX_PROCESS_ID": ""}, "DSJAX_PROCESS_ID not set"),
        ({"DSJAX_NUM_PROCESSES": ""}, "DSJAX_NUM_PROCESSES not set"),
        ({"DSJAX_COORDINATOR": ""}, "DSJAX_COORDINATOR not set"),
        ({"DSJAX_PROCESS_ID": "", "DSJAX_NUM_PROCESSES": ""}, "set all three"),
        ({"DSJAX_PROCESS_ID": "4"}, "DSJAX_PROCESS_ID is 4 and DSJAX_NUM_PROCESSES 4"),
        ({"DSJAX_PROCESS_ID": "-1"}, "takes a number, got '-1'"),
        ({"DSJAX_NUM_PROCESSES": "two"}, "takes a number, got 'two'"),
        ({"DSJAX_LOCAL_DEVICE_IDS": "0,x"}, "DSJAX_LOCAL_DEVICE_IDS"),
        ({"DSJAX_COORDINATOR": "host:99999"}, "HOST:PORT"),
        ({"DSJAX_COORDINATOR": "host:"}, "HOST:PORT"),
    ],
)
def test_explicit_settings_that_are_not_whole_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        detect({**EXPLICIT, **change})


def test_one_explicit_process_is_alone():
    assert detect({**EXPLICIT, "DSJAX_NUM_PROCESSES": "1", "DSJAX_PROCESS_ID": "0"}) is None


def test_a_slurm_step():
    cluster = detect(SLURM)
    host, port = cluster.coordinator.split(":")
    assert host == "gpu07" and 61440 <= int(port) < 65536
    assert (cluster.num_processes, cluster.process_id, cluster.local_device_ids) == (4, 3, (2, 3))


def test_every_task_of_a_step_finds_the_same_address_and_steps_differ():
    tasks = [
        {**SLURM, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 2), "SLURM_NODEID": str(i // 2)}
        for i in range(4)
    ]
    assert len({detect(task).coordinator for task in tasks}) == 1
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).coordinator != detect(SLURM).coordinator


@pytest.mark.parametrize(
    ("change", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),  # bound by srun --gpus-per-task: it is the only one seen
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}, None),  # alone on its node
    ],
)
def test_a_task_takes_its_share_of_the_gpus(change, devices):
    assert detect({**SLURM, **change}).local_device_ids == devices


@pytest.mark.parametrize(
    "environ",
    [
        # sbatch's script itself, and a shell of salloc: an allocation, no step.
        {name: value for name, value in SLURM.items() if "STEP" not in name},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a[1-2]"},
        # srun --pty bash inside an allocation of four tasks: a step of one.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        without(SLURM, "SLURM_PROCID"),
        without(SLURM, "SLURM_JOB_ID"),
        {**SLURM, "SLURM_PROCID": "9"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        # What torchrun and MPI's process managers leave behind is not ours.
        {"MASTER_ADDR": "x", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "4", "PMIX_RANK": "1"},
        # A pod, and one of many independent pods of an indexed job.
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},
        {**JOBSET, "DSJAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"},
    ],
)  # fmt: skip
def test_less_than_a_cluster_is_one_process(environ):
    assert detect(environ) is None


def test_a_coordinator_can_be_named_for_any_source():
    for environ in (SLURM, OPEN_MPI, JOBSET):
        assert detect({**environ, "DSJAX_COORDINATOR": "ib0-host"}).coordinator == "ib0-host:61217"


def test_open_mpi_4():
    cluster = detect(OPEN_MPI)
    assert cluster.coordinator.startswith("10.96.0.1:")
    assert (cluster.num_processes, cluster.process_id, cluster.local_device_ids) == (4, 1, (1,))
    six = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:858,2620::2]:43370"}
    assert detect(six).coordinator.startswith("[fe80::b9b:858]:")


def test_open_mpi_on_one_host_needs_no_address():
    environ = {
        **without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "a@1",
    }
    cluster = detect(environ)
    assert cluster.coordinator.startswith("127.0.0.1:")
    assert detect({**environ, "PMIX_NAMESPACE": "b@1"}).coordinator != cluster.coordinator


def test_open_mpi_5_over_hosts_is_asked_for_the_address():
    with pytest.raises(ConfigError, match="mpirun -x DSJAX_COORDINATOR"):
        detect(without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"))


def test_a_jobset():
    cluster = detect(JOBSET)
    assert cluster.coordinator == "train-workers-0-0.train:61217"
    assert (cluster.num_processes, cluster.process_id) == (4, 1)


def test_an_indexed_job():
    environ = {
        **without(JOBSET, "JOBSET_NAME", "REPLICATED_JOB_NAME"),
        "DSJAX_COORDINATOR": "train-0.train:5000",
    }
    assert detect(environ).coordinator == "train-0.train:5000"
    with pytest.raises(ConfigError, match="DSJAX_COORDINATOR"):
        detect(without(environ, "DSJAX_COORDINATOR"))
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX"):
        detect({**environ, "JOB_COMPLETION_INDEX": "7"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node001", ["node001"]),
        ("a,b", ["a", "b"]),
        ("host[01-03,7]", ["host01", "host02", "host03", "host7"]),
        ("n[009-011],login", ["n009", "n010", "n011", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu-[8-10]-ib.cluster", ["gpu-8-ib.cluster", "gpu-9-ib.cluster", "gpu-10-ib.cluster"]),
        ("a[1-2],b[3]", ["a1", "a2", "b3"]),
        ("", []),
    ],
)
def test_node_lists(text, hosts):
    assert expand_nodes(text) == hosts


@pytest.mark.parametrize("name", ["jobset", "indexed-job"])
def test_the_kubernetes_files_describe_a_cluster(name):
    documents = list(yaml.safe_load_all((ROOT / "configs" / "cluster" / f"{name}.yaml").read_text()))
    job = documents[-1]["spec"]
    labels = {"jobset-name": documents[-1]["metadata"]["name"]}
    if name == "jobset":
        (replicated,) = job["replicatedJobs"]
        labels["replicatedjob-name"] = replicated["name"]
        job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environ = {"JOB_COMPLETION_INDEX": "1"}
    for variable in container["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        environ[variable["name"]] = labels[path.split("/")[-1].rstrip("']")] if path else variable["value"]
    cluster = detect(environ)
    assert cluster.num_processes == job["parallelism"] == job["completions"] and cluster.process_id == 1
    hosts = {"jobset": "dsjax-workers-0-0.dsjax", "indexed-job": "dsjax-0.dsjax"}
    assert cluster.coordinator == f"{hosts[name]}:61217"
