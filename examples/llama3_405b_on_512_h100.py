"""Llama 3.1 405B on 512 H100: torchtitan with data, tensor and pipeline parallelism in fp8.

The cards are H100 with 96 GB that are capped at 500 W. The source states a local batch of 32; eight
micro-batches of four samples agree with its memory.
"""

from makespan.planning import Pricer, Training, parse_layout, read_machines, read_model, software

SOURCE = (
    "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/"
    "benchmarks/llama3_h100_202412_torchtitan.md, Table 5, interleaved"
)
PUBLISHED = 128  # tokens per second and GPU

training = Training(read_model("llama3.1-405b"), seq=8192, global_batch=256, precision="fp8")
cluster = read_machines("512xh100-96")
pricer = Pricer(training, cluster, software("torchtitan-async"))
predicted = pricer.price(parse_layout("tp8 pp8 vp2 fsdp mb4 recompute=full ends", cluster.n_gpus))

throughput = predicted.tokens_per_s_per_gpu
low, high = (throughput * predicted.step_s / step_s for step_s in (predicted.high_s, predicted.low_s))
print(f"predicted {throughput:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), MFU {predicted.mfu:.0%}")
print(f"published {PUBLISHED:,}, error {throughput / PUBLISHED - 1:+.0%}: {SOURCE}")
