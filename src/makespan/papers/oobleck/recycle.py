"""ReCycle (SOSP 2024) and dropped replicas beside Oobleck, Varuna and Bamboo: schedules and simulations.

**What is known of the paper.** Only its abstract (arXiv 2405.14009) was at hand: the techniques, and
throughput of up to 1.46 times that of Oobleck and 1.64 times that of Bamboo. Its models, clusters and
failures are not known here, so that a difference from these figures says nothing about its measurements.

**Question.** How fast is ReCycle under the costs that this project has for Oobleck, Varuna and Bamboo?

**Systems.** Costs of the three are those of Oobleck's artifact, with all defects of its simulators repaired.
ReCycle and dropped replicas run at Oobleck's printed throughput on all nodes; iteration times of
`makespan.oobleck.rerouting` scale it by the live workers, and never above it. Both use as few stages as hold
the model (two at least, a divisor of the nodes), which leaves the most peers. A loss costs them the running
step and Oobleck's time to regroup; taking in a node costs a regrouping; a stage without a live worker costs
Varuna's restart and the steps since the last of its checkpoints, whose writing is free. Passes are those of
`layer_times` on one A40 per node, microbatches those of the throughput from times of layers. Half of a
backward pass is taken for weights. A worker holds as many microbatches as its memory has room for. Transfers
take no time, as in the throughput from times of layers; each stage waits for the exchange of one layer.

**Losses.** Two kinds, each with ten seeds. *Fixed distances* are Oobleck's: half of 30 nodes go one by one
and never return. *Repaired* losses come at random with a mean of 6 h, 2 h or 30 min in the whole cluster, and
each node is back after an hour; 40 of them. Ratios are taken per seed, and their mean has a 95 % interval.

**Schedules.** Equal stages, 2, 5 and 10 of them on 30 nodes, with one, two, four and eight times as many
microbatches per pipeline, with all workers and without one in the middle, for each technique, with room for
the activations of 1F1B and for twice as many.

**Expected before the first run.** (Of the schedules a few had been seen while the scheduler was written.)

1. The largest lead over Oobleck is below 1.24, so that the statement of 1.46 within 15 % fails. Oobleck
   spreads a loss over all nodes, while in ReCycle the peers of one stage carry it, and these models run many
   more microbatches than stages, which leaves few bubbles to fill.
2. The largest lead over Bamboo is far above 1.64, so that this statement within 15 % fails, too. Bamboo's
   printed throughput is less than a third of Oobleck's.
3. ReCycle is ahead of dropped replicas for every model and kind of losses.
4. ReCycle is behind Oobleck by at most 10 % for models of two stages under repaired losses.
5. In schedules of equal stages, a lost worker costs nothing with all techniques and room for twice the
   activations wherever the work of its peers fits into an iteration of 1F1B.
6. With a lost worker, schedules with all techniques are shorter than those of re-routing alone, always.
"""
