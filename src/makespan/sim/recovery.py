"""Recovery from failures: what a job loses when it loses devices, and how long it takes to go on.

Every default has a source: the simulators released with Morphling and Oobleck, or a measurement that a paper
prints. Training is continuous here, as everywhere in the simulator: a checkpoint may fall into a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, unknown_name

RecoveryKind = Literal["restart", "elastic", "resilient"]
RECOVERY_KINDS: tuple[RecoveryKind, ...] = get_args(RecoveryKind)
"""Kinds of recovery, see `Recovery`."""
CHECKPOINT_INTERVAL_S = 1800.0
"""Training between checkpoints [s]; a choice, half an hour."""
CHECKPOINT_S = 50.0
"""Time to write a checkpoint [s]: Varuna on GPT-3 2.7B (Oobleck SOSP'23 artifact)."""
PAUSES_S: Mapping[str, float] = {"elastic": 78.0, "resilient": 6.0}
"""Time until a job goes on without a checkpoint [s]: a change of devices (Morphling, section 8: a delay of
78 s), and a regrouping of pipelines (Oobleck SOSP'23 artifact: 6 s for GPT-3 2.7B)."""
_ROUNDING = 1e-9  # of an interval: a checkpoint that is due at this instant counts as written


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery of a job from the loss of devices.

    The state of a job is in the memory of its devices. A copy of it, a checkpoint, is written after every
    ``checkpoint_interval_s`` of training, which takes ``checkpoint_s``, and with every change that a policy
    decides, which takes no time besides the restart delay. A job whose state is lost returns to its last
    checkpoint, or to its start if there is none.

    Parameters
    ----------
    kind
        ``restart``: an interrupted job returns to its last checkpoint and waits for devices. ``elastic``: the
        devices that are left keep the state. If the next decision of the policy gives the job devices, more
        or fewer, it loses the running step and pauses; otherwise it returns to its checkpoint.
        ``resilient``: the job goes on at once with the devices that are left, in the fastest configuration
        that the catalogue has for them, after a pause and without the running step, as Oobleck's pipelines
        do. It survives the loss of ``f`` nodes before it has recovered, and returns to its checkpoint after
        more. If no configuration fits, it waits like an elastic job.
    checkpoint_interval_s, checkpoint_s
        Training between checkpoints [s], above 0, or None for no checkpoints but those of changes; time that
        a checkpoint takes [s], None for `CHECKPOINT_S`.
    restart_s
        Time without progress when a job starts again from a checkpoint after an interruption [s]; None for
        the restart delay of the scenario.
    pause_s
        Time without progress when a job goes on without its checkpoint [s]; None for that of `PAUSES_S`.
    f
        Nodes that a resilient job may lose before it has recovered, 1 or more; None for 1.

    Raises
    ------
    InputError
        A value is out of range, or has no effect: the cost of checkpoints that are never written, a pause of
        a job that always restarts, or ``f`` of a job that is not resilient.
    """

    kind: RecoveryKind = "restart"
    checkpoint_interval_s: float | None = CHECKPOINT_INTERVAL_S
    checkpoint_s: float | None = None
    restart_s: float | None = None
    pause_s: float | None = None
    f: int | None = None

    def __post_init__(self) -> None:
        """Check ranges and contradictions."""
        check_fields(self, "recovery")
        if self.kind not in RECOVERY_KINDS:
            raise unknown_name("kind of recovery", str(self.kind), RECOVERY_KINDS)
        every_s = self.checkpoint_interval_s
        if every_s is not None and not (math.isfinite(every_s) and every_s > 0):
            raise InputError(
                f"recovery: checkpoint_interval_s is {every_s!r}; expected a finite time in s above 0, or "
                "None for no periodic checkpoints"
            )
        for name in ("checkpoint_s", "restart_s", "pause_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(
                    f"recovery: {name} is {value!r}; expected a finite time in s, 0 or more, or None"
                )
        if self.f is not None and self.f < 1:
            raise InputError(
                f"recovery: f is {self.f!r}; expected a whole number of nodes, 1 or more, or None"
            )
        if every_s is None and self.checkpoint_s is not None:
            raise InputError(
                f"recovery: checkpoint_s is {self.checkpoint_s!r} but checkpoint_interval_s is None, so that "
                "no checkpoint is written; leave checkpoint_s out"
            )
        if self.kind == "restart" and self.pause_s is not None:
            raise InputError(
                f"recovery: pause_s is {self.pause_s!r} but kind 'restart' always returns to a checkpoint; "
                "use restart_s, or kind 'elastic' or 'resilient'"
            )
        if self.kind != "resilient" and self.f is not None:
            raise InputError(f"recovery: f is {self.f!r} but kind is {self.kind!r}; use kind 'resilient'")

    @property
    def written_s(self) -> float:
        """Time that a checkpoint takes [s]."""
        return CHECKPOINT_S if self.checkpoint_s is None else self.checkpoint_s

    @property
    def paused_s(self) -> float:
        """Time without progress when a job goes on without its checkpoint [s]."""
        return PAUSES_S.get(self.kind, 0.0) if self.pause_s is None else self.pause_s

    @property
    def survives(self) -> float:
        """Nodes that a job may lose before it has recovered and still keep its state."""
        if self.kind == "restart":
            return 0
        return math.inf if self.kind == "elastic" else (self.f or 1)

    @property
    def stalls(self) -> bool:
        """Whether checkpoints take time."""
        return self.checkpoint_interval_s is not None and self.written_s > 0

    def trained_s(self, elapsed_s: float) -> float:
        """Return the training in a time since the job became ready [s], without the time for checkpoints."""
        every_s = self.checkpoint_interval_s
        if every_s is None or elapsed_s <= 0:
            return elapsed_s
        n_written = self.n_checkpoints(elapsed_s)
        since_s = max(elapsed_s - n_written * (every_s + self.written_s), 0.0)
        return n_written * every_s + min(since_s, every_s)

    def elapsed_s(self, trained_s: float) -> float:
        """Return the time in which a job trains for so long [s]; it ends without a last checkpoint."""
        every_s = self.checkpoint_interval_s
        if every_s is None or trained_s <= 0:
            return trained_s
        return trained_s + max(math.ceil(trained_s / every_s - _ROUNDING) - 1, 0) * self.written_s

    def n_checkpoints(self, elapsed_s: float) -> int:
        """Return the checkpoints that are complete after a time since the job became ready [s]."""
        every_s = self.checkpoint_interval_s
        if every_s is None or elapsed_s <= 0:
            return 0
        return math.floor(elapsed_s / (every_s + self.written_s) + _ROUNDING)


@typed
def expected_goodput(recovery: Recovery, mtbf_s: float, restart_s: float) -> float:
    """Return the share of its time that a job with restarts from checkpoints trains usefully [1].

    Failures are a Poisson process, and may also hit a restart or a checkpoint. An interval of training then
    takes ``M * exp(R / M) * (exp((T + C) / M) - 1)`` on average, with the mean time ``M`` between failures,
    the restart ``R``, the interval ``T`` and the checkpoint ``C`` (Daly, Future Generation Computer Systems
    22, 2006). Devices are there at once: time in a queue is no part of it. The share is that of a long job;
    it is 0 without periodic checkpoints.

    Parameters
    ----------
    recovery
        Interval and cost of checkpoints; its kind does not count.
    mtbf_s, restart_s
        Mean time between failures of the job, infinite if there are none, and time of a restart [s].
    """
    if not (mtbf_s > 0 and 0 <= restart_s < math.inf):
        raise InputError(
            f"mtbf_s is {mtbf_s!r} and restart_s {restart_s!r}; expected times in s, above 0, and finite "
            "and 0 or more"
        )
    every_s = recovery.checkpoint_interval_s
    if every_s is None:
        return 1.0 if math.isinf(mtbf_s) else 0.0
    cycle_s = every_s + recovery.written_s
    if math.isinf(mtbf_s):
        return every_s / cycle_s
    exponent = (restart_s + cycle_s) / mtbf_s
    if exponent > 700:  # beyond what a float holds; the share is 0 to any digit shown
        return 0.0
    return every_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(cycle_s / mtbf_s))
