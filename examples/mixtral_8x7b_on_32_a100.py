"""Mixtral 8x7B on 32 A100: Megatron-LM with tensor and pipeline parallelism, 32,768 tokens per sample.

The source compares another vendor's chips with a "Reference" that it does not name; A100 with 80 GB are
assumed. Its script drops tokens beyond a capacity of 1.1, and tensor parallelism cuts its experts. Neither
is modelled: memory is counted as if each device held all experts of its stage.
"""

from makespan.planning import Pricer, Training, parse_layout, read_machines, read_model, software

SOURCE = (
    "https://gitee.com/ascend/ModelLink, examples/mixtral/README_en.md, 4 nodes and 32 chips with tp8 pp4, "
    "and pretrain_mixtral_8x7b_ptd.sh"
)
PUBLISHED = 610  # tokens per second and GPU

training = Training(read_model("mixtral-8x7b"), seq=32768, global_batch=8, precision="bf16")
cluster = read_machines("32xa100-80")
pricer = Pricer(training, cluster, software("nemo"))
predicted = pricer.price(parse_layout("tp8 pp4 zero0 mb1 recompute=full", cluster.n_gpus))

throughput = predicted.tokens_per_s_per_gpu
low, high = (throughput * predicted.step_s / step_s for step_s in (predicted.high_s, predicted.low_s))
print(f"predicted {throughput:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), MFU {predicted.mfu:.0%}")
print(f"published {PUBLISHED:,}, error {throughput / PUBLISHED - 1:+.0%}: {SOURCE}")
