"""The schemas of live scheduling: what was measured, beside what was simulated."""

from makespan.tables._schema import Column, TableSchema

__all__ = ["LIVE", "LIVE_JOBS"]

LIVE = TableSchema(
    "live",
    (
        Column("policy", "text", "", "name of the policy"),
        Column("jobs", "int", "1", "jobs that finished"),
        Column("live_avg_jct_s", "float", "s", "mean completion time of the live run"),
        Column("simulated_avg_jct_s", "float", "s", "mean completion time of the simulation"),
        Column("jct_difference_pct", "float", "%", "simulated over live mean completion time, less 100"),
        Column("live_makespan_s", "float", "s", "last finish minus first submission, live"),
        Column("simulated_makespan_s", "float", "s", "last finish minus first submission, simulated"),
        Column("makespan_difference_pct", "float", "%", "simulated over live makespan, less 100"),
        Column("restart_delay_s", "float", "s", "restart delay as profiled; used to simulate"),
        Column("live_restart_delay_s", "float", "s", "mean of the live run: time held without steps", True),
        Column("n_restarts", "int", "1", "restarts after first starts, live"),
        Column("simulated_n_restarts", "int", "1", "restarts after first starts, simulated"),
        Column("live_gpu_allocation_ratio", "float", "1", "slot time held over slot time present, live"),
        Column("profile_drift_pct", "float", "%", "mean change of step times, profile after over before"),
    ),
)

LIVE_JOBS = TableSchema(
    "live_jobs",
    (
        Column("policy", "text", "", "name of the policy"),
        Column("job_id", "text", "", "job"),
        Column("workload", "text", "", "key of the workload"),
        Column("steps", "int", "1", "optimiser steps"),
        Column("submit_time_s", "float", "s", "submission"),
        Column("live_first_start_s", "float", "s", "first time with slots, live"),
        Column("simulated_first_start_s", "float", "s", "first time with slots, simulated"),
        Column("live_jct_s", "float", "s", "completion time, live"),
        Column("simulated_jct_s", "float", "s", "completion time, simulated"),
        Column("n_restarts", "int", "1", "restarts after the first start, live"),
        Column("simulated_n_restarts", "int", "1", "restarts after the first start, simulated"),
        Column("final_loss", "float", "1", "loss of the last step", True),
    ),
)
