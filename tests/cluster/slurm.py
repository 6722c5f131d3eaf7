"""A Slurm of two nodes on one machine, started for some tests and gone after them.

Each node has a name and a slurmd of its own; jobs run as on any cluster. All processes
are in namespaces that end with the first of them, all files are in one folder.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import PATH, lacking
from launcher import environment, members

_NAMESPACES = ("unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child",
               "--mount-proc")  # fmt: skip
_UP = 60.0

# A job of "urgent" takes the nodes from one of "idle", which goes back into the queue.
# Two devices that every machine has stand for the GPUs of a node.
_CONF = """
ClusterName=mpipar
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmUser=root
SlurmdUser=root
# A requeued job starts when its old credential has run out.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000 Gres=gpu:2
NodeName=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=idle Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
"""
_GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
_DAEMONS = """
cd {folder}
# Segments of jobs that are killed go with it.
mount -t tmpfs shm /dev/shm
echo "127.0.0.1 localhost n1 n2" >hosts
mount --bind hosts /etc/hosts
hostname localhost
munged --foreground --force --num-threads=1 --socket=munge.socket \\
    --key-file=munge.key --seed-file=munge.seed --pid-file=munge.pid \\
    --log-file=munge.log &
slurmctld -D &
for node in n1 n2; do
    unshare --uts bash -c "hostname $node; exec slurmd -D -N $node" &
done
wait
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up: nodes n1 and n2, each with 4 CPUs and 2 GPUs.

    env  of its commands and jobs
    """

    folder: Path
    env: dict[str, str]

    def run(
        self, *words: object, cwd: Path | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess:
        """Run a command such as srun to its end; stdout and stderr come together."""
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def submit(self, *words: object, cwd: Path) -> str:
        """Queue a job: options of sbatch, script, its words; return its number."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def tasks(self, job: str) -> list[dict[str, str]]:
        """What Slurm says of a job, such as JobState; of each task in an array."""
        text = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        lines = [line.split() for line in text.splitlines() if line.strip()]
        return [dict(w.split("=", 1) for w in line if "=" in w) for line in lines]

    def wait(self, job: str, timeout: float = 240, **facts: str) -> dict[str, str]:
        """Return what Slurm says of a job, once it says these facts."""
        until = time.monotonic() + timeout
        while not facts.items() <= (found := self.tasks(job)[0]).items():
            over = found["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
            assert not over and time.monotonic() < until, self.output(found)
            time.sleep(0.1)
        return found

    @staticmethod
    def output(found: dict[str, str]) -> str:
        """What a job has written, and what Slurm says of it."""
        file = Path(found["StdOut"])
        return f"{found}\n{file.read_text() if file.exists() else ''}"


def obstacle() -> str | None:
    """Why there can be no Slurm here; None where it can be tried."""
    tools = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "mount")
    if reason := lacking("two nodes of Slurm", tools):
        return reason
    env = os.environ | {"PATH": PATH}
    command = [*_NAMESPACES, "mount", "-t", "tmpfs", "shm", "/dev/shm"]
    tried = subprocess.run(command, env=env, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def slurm(**env: str | None) -> Iterator[Slurm]:
    """Starts Slurm, and takes it down again with all its jobs.

    env      variables to change in its jobs
    Raises   OSError, with the daemons' last words, where it does not come up
    """
    with tempfile.TemporaryDirectory(prefix="mpipar-slurm-") as name:
        folder = Path(name)
        _write_files(folder)
        outer = [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "SRUN"))]
        env = {**dict.fromkeys(outer), "SLURM_CONF": f"{folder}/slurm.conf",
               "PATH": PATH, **env}  # fmt: skip
        made = Slurm(folder, environment(folder, **env))
        with (folder / "daemons.log").open("w") as log:
            daemons = subprocess.Popen(
                [*_NAMESPACES, "bash", str(folder / "daemons")],
                env=made.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_for_nodes(made)
            yield made
        finally:
            daemons.kill()
            daemons.wait()
            until = time.monotonic() + 10
            while members(folder) and time.monotonic() < until:
                time.sleep(0.02)


def _write_files(folder: Path) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, ports=ports))
    (folder / "gres.conf").write_text(_GPUS)
    (folder / "daemons").write_text(_DAEMONS.format(folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    for file in (folder, folder / "munge.key"):
        file.chmod(0o700)
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()


def _wait_for_nodes(made: Slurm) -> None:
    """Return once both nodes are idle."""
    until = time.monotonic() + _UP
    while made.run("sinfo", "-h", "-p", "idle", "-o", "%D %t").stdout != "2 idle\n":
        if time.monotonic() > until:
            log = (made.folder / "daemons.log").read_text()
            raise OSError(f"Slurm does not come up; its last words: {log[-2000:]}")
        time.sleep(0.1)
