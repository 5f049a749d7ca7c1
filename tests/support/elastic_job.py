"""The job of the tests of elastic training: a user's own model, with draws of every kind."""

from pathlib import Path

from makespan.easyscale import ElasticTrainer

OWN = Path(__file__).with_name("own_job.py")
JOB = {
    "model": f"{OWN}:build_model", "optimizer": f"{OWN}:build_optimizer", "data": f"{OWN}:data_set",
    "loss": f"{OWN}:loss", "lr_scheduler": f"{OWN}:build_scheduler", "after_reduce": f"{OWN}:after_reduce",
    "n_logical_workers": 4, "micro_batch_size": 4, "n_loaders": 2, "seed": 7, "bucket_cap_bytes": 1 << 11,
}  # fmt: skip
BITS = ["step", "rank", "loss_hex", "parameter_sha", "optimizer_sha", "context_sha"]


class HashingTrainer(ElasticTrainer):
    """Asks for hashes of every mini-batch, which tests compare."""

    def run(self, *arguments, **options):
        return super().run(*arguments, **({"hash_every": 1} | options))


def trainer(run_dir, **changes):
    """Return a trainer of the job with some fields changed."""
    return HashingTrainer(run_dir=run_dir, **(JOB | changes))


def bits(result):
    """Return all that must be equal, by mini-batch and logical worker."""
    return result.steps[BITS].to_numpy().tolist()


def last_bits(result):
    """Return the losses of all logical workers, and parameters, optimizer and contexts at the end."""
    steps = result.steps.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"])
    last = steps[steps["step"] == steps["step"].max()]
    ends = {(row.parameter_sha, row.optimizer_sha) for row in last.itertuples()}
    return list(steps["loss_hex"]), ends, list(last["context_sha"])


def losses(steps):
    """Return the bits of all losses of a table, by mini-batch and logical worker."""
    return [float(loss).hex() for loss in steps.sort_values(["step", "rank"])["loss"]]
