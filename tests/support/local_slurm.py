"""A Slurm cluster on this machine: real daemons on loopback, virtual nodes, GPUs that do not exist."""

import contextlib
import itertools
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAMS = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "squeue", "sbatch", "srun", "scancel"),
    "munge": ("munged",),
}
CLIENTS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
STOP_ORDER = ("slurmd", "slurmctld", "munged")  # each needs those after it
START_LIMIT_S, STOP_LIMIT_S = 3600, 600  # against what hangs


def program(name):
    """Return the path of a Slurm program; daemons may lie where a plain user does not search."""
    return shutil.which(name, path=SEARCHED)


def missing_packages():
    """Return the Debian packages of which a program is missing."""
    return [package for package, names in PROGRAMS.items() if not all(map(program, names))]


def free_ports(count):
    """Return ports on which nobody listens, and which the kernel gives to no connection by itself.

    The daemons bind them later; until then any connection of this machine could get a port from the
    kernel's range.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(min(10_000, first // 2), first))
    random.SystemRandom().shuffle(ports)  # other clusters may start at the same time
    return list(itertools.islice(filter(_is_free, ports), count))


def _is_free(port):
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


@dataclass
class LocalSlurm:
    """The daemons of one cluster and the directory that holds everything of it.

    The directory has a short path because that of a socket is limited, and others may enter it
    because the authentication daemon insists.
    """

    n_nodes: int = 2
    gpus: int = 8
    cpus: int = 16
    memory_mb: int = 64000
    partition: str = "a800"
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="slurm-")))
    daemons: dict = field(default_factory=dict)

    def __enter__(self):
        try:
            self._write_files()
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if "slurmctld" in self.daemons:
            self._empty_queue()
        for kind in STOP_ORDER:
            for name, process in self.daemons.items():
                if name.startswith(kind):
                    stop(process)
        self.daemons.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def nodes(self):
        """Names of the virtual nodes."""
        return [f"gpu{number:02d}" for number in range(1, self.n_nodes + 1)]

    @property
    def environment(self):
        """Variables under which the Slurm programs talk to this cluster."""
        own = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([str(self.root / "bin"), SEARCHED])
        return own | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": path}

    def call(self, *command):
        """Run a program on this cluster and return what it prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=3600, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def jobs(self):
        """Return the attributes of all jobs, finished ones too, as ``scontrol show job -d`` lists them."""
        listed = self.call("scontrol", "show", "job", "--details", "--oneliner")
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in listed.splitlines() if "JobId=" in line]

    def job(self, number):
        """Return the attributes of one job."""
        return next(job for job in self.jobs() if job["JobId"] == str(number))

    def allocation(
        self, command, folder, size=("--nodes=1", "--ntasks=2", "--cpus-per-task=1", "--mem=4000")
    ):
        """Run a shell command in an allocation; returns the number of the job and its output.

        The command finds the package of this checkout.
        """
        script, log = folder / "job.sh", folder / "job.log"
        script.write_text(f"#!/bin/sh\nPYTHONPATH={SOURCE} exec {command}\n")
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={log}", *size, str(script)],
            env=self.environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
        output = log.read_text() if log.exists() else ""
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout}{done.stderr}{output}")
        return re.search(r"\d+", done.stdout).group(), output

    # --- files ---------------------------------------------------------------------------

    def _write_files(self):
        self.root.chmod(0o755)
        for name in ("bin", "dev", "state", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        (self.root / "slurm.conf").write_text(self._configuration())
        (self.root / "gres.conf").write_text(self._devices())
        self._write_clients()

    def _configuration(self):
        host, user = socket.gethostname().split(".")[0], subprocess.getoutput("id -un")
        port, *node_ports = free_ports(self.n_nodes + 1)
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.root}/munge.socket",
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "StateSaveLocation": self.root / "state",
            "SlurmdSpoolDir": self.root / "spool/%n",
            "SlurmctldPidFile": self.root / "slurmctld.pid",
            "SlurmdPidFile": self.root / "slurmd.%n.pid",
            # No control groups, and no look at the hardware: nodes have what is declared below.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SlurmdParameters": "config_overrides",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0",
            "GresTypes": "gpu",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "MinJobAge": 3600,  # finished jobs are looked at later
            "KillWait": 3,
            # How long something takes says something about the machine, not about what is tested.
            "OverTimeLimit": "UNLIMITED",
            "BatchStartTimeout": 3600,
            "MessageTimeout": 100,
            "TCPTimeout": 60,
            "SlurmdTimeout": 0,
            "UnkillableStepTimeout": 3600,
            "MailProg": "/bin/true",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={self.cpus} "
            f"RealMemory={self.memory_mb} Gres=gpu:a800:{self.gpus} State=UNKNOWN"
            for node, node_port in zip(self.nodes, node_ports, strict=True)
        ]
        lines.append(f"PartitionName={self.partition} Nodes={','.join(self.nodes)} Default=YES State=UP")
        return "\n".join(lines) + "\n"

    def _devices(self):
        # A device has to be a character device, and its index is read off its name.
        for index in range(self.gpus):
            (self.root / f"dev/a800-{index}").symlink_to(os.devnull)
        files = f"{self.root}/dev/a800-[0-{self.gpus - 1}]"
        return "".join(f"NodeName={node} Name=gpu Type=a800 File={files}\n" for node in self.nodes)

    def _write_clients(self):
        # Slurm drops SLURM_CONF from the environment of the steps of a job, so the clients carry it.
        for name in CLIENTS:
            wrapper = self.root / "bin" / name
            settings = shlex.quote(f"{self.root}/slurm.conf")
            wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={settings} exec {program(name)} "$@"\n')
            wrapper.chmod(0o755)

    # --- daemons -------------------------------------------------------------------------

    def _start_all(self):
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"seed-file": "munged.seed", "log-file": "munged.log"}
        self._start(
            "munged", "--foreground", *(f"--{option}={self.root / name}" for option, name in files.items())
        )
        self._wait("munged", (self.root / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, name=f"slurmd-{node}")
        self._wait("slurmctld", self._nodes_are_idle)

    def _start(self, command, *arguments, name=None):
        name = name or command
        with (self.root / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [program(command), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, name, is_ready):
        deadline = time.monotonic() + START_LIMIT_S
        while not is_ready():
            dead = [each for each, process in self.daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                ends = {each: (self.root / f"{each}.out").read_text()[-2000:] for each in dead or [name]}
                raise RuntimeError(f"Slurm does not start: {ends}")
            time.sleep(0.1)

    def _nodes_are_idle(self):
        try:
            states = self.call("sinfo", "--noheader", "--Node", "--format=%t").split()
        except RuntimeError:
            return False
        return states == ["idle"] * self.n_nodes

    def _empty_queue(self):
        """Cancel what runs: the processes of a job outlive the daemon of its node."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.call("scancel", f"--partition={self.partition}")
            deadline = time.monotonic() + STOP_LIMIT_S
            while self.call("squeue", "--noheader", "--states=R,CG") and time.monotonic() < deadline:
                time.sleep(0.2)


def stop(process):
    """End a process that this module started."""
    process.terminate()
    try:
        process.wait(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    print(" ".join(missing_packages()))  # noqa: T201 - for the Makefile
