"""Llama 3 8B on 8 H100: torchtitan with FSDP in bf16.

The cards are H100 with 96 GB that are capped at 500 W.
"""

from makespan.planning import Pricer, Training, parse_layout, read_machines, read_model, software

SOURCE = (
    "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/"
    "benchmarks/llama3_h100_202412_torchtitan.md, Table 1, compiled"
)
PUBLISHED = 6667  # tokens per second and GPU

training = Training(read_model("llama3-8b"), seq=8192, global_batch=16, precision="bf16")
cluster = read_machines("8xh100-96")
pricer = Pricer(training, cluster, software("torchtitan"))
predicted = pricer.price(parse_layout("fsdp mb2 recompute=operators", cluster.n_gpus))

throughput = predicted.tokens_per_s_per_gpu
low, high = (throughput * predicted.step_s / step_s for step_s in (predicted.high_s, predicted.low_s))
print(f"predicted {throughput:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), MFU {predicted.mfu:.0%}")
print(f"published {PUBLISHED:,}, error {throughput / PUBLISHED - 1:+.0%}: {SOURCE}")
