"""A table of published rows that the model of steps itself has made, off by a factor per source."""

import dataclasses

from makespan.planning import Layout, Pricer, Training, read_machines, read_model, software
from makespan.planning.rows import COLUMNS


def write_rows(path, precisions=("bf16",), **cells):
    """Write six rows of Llama 3 8B for two sources and every precision, with some cells changed."""
    pricer = Pricer(
        Training(read_model("llama3-8b"), 8192, 128), read_machines("8xh100-80"), software("torchtitan")
    )
    lines = [",".join((*COLUMNS, *(name for name in cells if name not in COLUMNS)))]
    for precision in precisions:
        for source, factor in (("torchtitan", 1.1), ("fms-fsdp", 0.9)):
            for batch in (16, 32, 64, 128, 256, 512):
                training = dataclasses.replace(pricer.training, global_batch=batch)
                one = dataclasses.replace(pricer, training=training).price(Layout(dp=8, zero=3))
                row = dict.fromkeys(COLUMNS, "") | {
                    "source": source, "model": "m", "family": "llama", "layers": 32, "hidden": 4096,
                    "ffn": 14336, "heads": 32, "kv_heads": 8, "gated": 1, "vocab": 128256, "tied": 0,
                    "seq": 8192,
                    "gpu": "H100-SXM-80", "n_gpus": 8, "gpus_per_node": 8, "dp": 8, "tp": 1, "pp": 1,
                    "zero_stage": 3, "micro_batch": 1, "global_batch": batch, "recompute": "none",
                    "precision": precision, "iteration_time_s": factor * one.step_s,
                }  # fmt: skip
                lines.append(",".join(map(str, (row | cells).values())))
    path.write_text("\n".join(lines) + "\n")
