"""Which process hosts which logical workers."""

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from makespan.errors import InputError

__all__ = ["RankMapping"]

_PATTERN = re.compile(r"\d+(,\d+)*(/\d+(,\d+)*)*")


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Virtual ranks that each process hosts, in the order in which it runs them.

    ``str()`` and `parse` use one notation, in which ``/`` separates processes: ``0,1/2/3``.

    Parameters
    ----------
    hosted
        Virtual ranks by process; each of 0 to N - 1 stands there once and no process is empty, else an
        `InputError` says what is wrong.
    """

    hosted: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check that every logical worker has one host, and every process something to do."""
        ranks = [rank for ranks in self.hosted for rank in ranks]
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            accepted = f"each of 0 to {max(len(ranks), 1) - 1} once"
            raise InputError(f"mapping {self}: found virtual ranks {sorted(ranks)}; accepted: {accepted}")
        if () in self.hosted:
            found = f"process {self.hosted.index(())} hosts no logical worker"
            raise InputError(f"mapping {self}: {found}; accepted: at most {len(ranks)} processes, none empty")

    def __str__(self) -> str:
        """Notation of the mapping."""
        return "/".join(",".join(map(str, ranks)) for ranks in self.hosted)

    @property
    def n_logical_workers(self) -> int:
        """Number of logical workers, N."""
        return sum(map(len, self.hosted))

    @property
    def n_processes(self) -> int:
        """Number of processes, M."""
        return len(self.hosted)

    def host(self, rank: int) -> int:
        """Process that hosts a virtual rank."""
        return next(number for number, ranks in enumerate(self.hosted) if rank in ranks)

    def by_position(self) -> "RankMapping":
        """Renumber logical workers by their physical places instead of their virtual ranks."""
        ends = accumulate(map(len, self.hosted), initial=0)
        return RankMapping(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))

    @classmethod
    def parse(cls, text: str) -> "RankMapping":
        """Read the notation; an `InputError` says what is accepted."""
        if not _PATTERN.fullmatch(text):
            raise InputError(f"mapping {text!r}; accepted: ranks by process, for example 0,1/2/3")
        return cls(tuple(tuple(map(int, ranks.split(","))) for ranks in text.split("/")))

    @classmethod
    def even(cls, n_logical_workers: int, n_processes: int) -> "RankMapping":
        """Ranks in ascending order over processes, none with more than one above any other."""
        if not 1 <= n_processes <= n_logical_workers:
            found = f"{n_processes} processes for {n_logical_workers} logical workers"
            raise InputError(f"{found}; accepted: 1 to {n_logical_workers} processes")
        share, more = divmod(n_logical_workers, n_processes)
        ends = accumulate((share + (process < more) for process in range(n_processes)), initial=0)
        return cls(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))
