"""What a policy is, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from makespan.errors import MakespanError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue

if TYPE_CHECKING:
    from makespan.sim._view import ClusterView

__all__ = ["Decision", "InfeasibleDecision", "Policy", "StalledError"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall change.

    Parameters
    ----------
    changes
        From job to its new allocation, or None to take all devices away. A job that is absent, or
        whose allocation is the one that it has, goes on and pays nothing; any other running job pays
        the restart delay. All changes are made at once, so jobs may swap devices.
    wake_up_s
        Ask again at this time [s] even if nothing happens before; None for no such wish. With rounds,
        at the first round not before it.
    """

    changes: Mapping[str, Allocation | None] = field(default_factory=dict)
    wake_up_s: float | None = None


class Policy(Protocol):
    """A scheduling policy: an immutable object with typed fields and one pure function.

    The engine calls `initial_state` once and then `decide` whenever it asks, handing back the state
    that the previous call returned. A policy holds nothing else between calls, reads the view and
    never writes to it, and draws no random numbers but from a generator in its state.
    """

    @property
    def name(self) -> str:
        """Key in the registry and in tables: lower case words joined by ``-``."""
        ...

    @property
    def title(self) -> str:
        """Name in figures."""
        ...

    @property
    def interval_s(self) -> float | None:
        """Length of a round [s]; None to be asked after every arrival, completion and node event."""
        ...

    @property
    def is_clairvoyant(self) -> bool:
        """Whether the policy reads `JobView.steps_left`; the view refuses it to all others."""
        ...

    @property
    def honours_guarantees(self) -> bool:
        """Whether the engine holds it to this: no guaranteed job is suspended or slower than requested."""
        ...

    @property
    def references(self) -> tuple[str, ...]:
        """Literature that the policy implements."""
        ...

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Any:
        """Return what the policy remembers before the first decision; None if nothing."""
        ...

    def decide(self, view: "ClusterView", state: Any) -> tuple[Decision, Any]:
        """Return what shall change now, and what to remember until the next call.

        Parameters
        ----------
        view
            The cluster at this moment; valid during the call only.
        state
            What the previous call returned.
        """
        ...


class InfeasibleDecision(MakespanError):
    """A policy decided what cannot be done; nothing of the decision was applied.

    Parameters
    ----------
    message
        What is wrong, with policy, time and job.
    view
        The cluster as the policy saw it.
    """

    def __init__(self, message: str, view: "ClusterView") -> None:
        super().__init__(message)
        self.view = view


class StalledError(MakespanError):
    """Jobs wait, nothing runs and nothing will happen any more: the policy left them behind."""
