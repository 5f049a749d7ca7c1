"""Temporary."""

from collections.abc import Iterator, Sequence

from makespan.papers.oobleck.planning import PipelineTemplate

__all__ = ["distribute", "enumerate_plans", "iteration_time_s"]


def enumerate_plans(sizes: Sequence[int], n_nodes: int, f: int) -> Iterator[tuple[int, ...]]:
    def go(i: int, left: int) -> Iterator[tuple[int, ...]]:
        if i == len(sizes):
            if left == 0:
                yield ()
            return
        for k in range(left // sizes[i] + 1):
            for rest in go(i + 1, left - k * sizes[i]):
                yield (k, *rest)

    return (one for one in go(0, n_nodes) if sum(one) > f)


def distribute(templates: Sequence[PipelineTemplate], n_microbatches: int) -> tuple[int, ...]:
    taus = [one.time_s / one.n_stages for one in templates]
    shares = [1] * len(templates)
    for _ in range(n_microbatches - len(templates)):
        j = min(range(len(templates)), key=lambda k: (taus[k] * (shares[k] + 1), k))
        shares[j] += 1
    return tuple(shares)


def iteration_time_s(templates: Sequence[PipelineTemplate], shares: Sequence[int]) -> float:
    return max(
        sum(s.latency_s for s in t.stages) + (b - 1) * max(s.latency_s for s in t.stages)
        for t, b in zip(templates, shares, strict=True)
    )
