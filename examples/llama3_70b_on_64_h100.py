"""Llama 3 70B on 64 H100: Megatron Bridge with an interleaved pipeline in fp8.

The source does not state what is recomputed; nothing is, here.
"""

from makespan.planning import Pricer, Training, parse_layout, read_machines, read_model, software

SOURCE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df03b8355b03192d88d70f1709fedf51a/"
    "docs/performance-summary-archive.md, container 26.04.01"
)
PUBLISHED = 1664  # tokens per second and GPU

training = Training(read_model("llama3-70b"), seq=8192, global_batch=256, precision="fp8")
cluster = read_machines("64xh100-80")
pricer = Pricer(training, cluster, software("megatron-bridge"))
predicted = pricer.price(parse_layout("tp4 pp8 vp5 zero1 mb1", cluster.n_gpus))

throughput = predicted.tokens_per_s_per_gpu
low, high = (throughput * predicted.step_s / step_s for step_s in (predicted.high_s, predicted.low_s))
print(f"predicted {throughput:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), MFU {predicted.mfu:.0%}")
print(f"published {PUBLISHED:,}, error {throughput / PUBLISHED - 1:+.0%}: {SOURCE}")
