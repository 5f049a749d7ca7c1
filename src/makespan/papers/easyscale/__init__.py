"""EasyScale (SC 2023): training that gives the same bits on any number of devices, and its scheduler.

Built so far is what one process of a job does, in `makespan.papers.easyscale.runtime`; the paper is not yet
among `makespan.papers.PAPERS`.
"""

__all__: list[str] = []
