"""DeepSeek-V3 on 256 H100: NeMo AutoModel with a pipeline, experts over 64 devices, and FSDP in bf16.

No row of this software is among those that factors were fitted to; torchtitan, PyTorch with FSDP2 too,
stands for it. Activations are computed again, as the benchmark's file says. In place of routing, its gate
sends each token to eight experts in a row, which two devices of one node hold, so that few tokens use the
network.
"""

from dataclasses import replace

from makespan.planning import Pricer, Training, parse_layout, read_machines, read_model, software

SOURCE = (
    "https://github.com/NVIDIA-NeMo/Automodel/blob/01926a5c443b7979463c73341bf64adf79de638e/"
    "docs/performance-summary.md, DGX-H100, 256 GPUs"
)
PUBLISHED = 1002  # tokens per second and GPU

model = read_model("deepseek-v3")
dense, mixture = model.layers
in_a_row = replace(mixture.ffn, n_groups=mixture.ffn.n_experts // 8, groups_per_token=1)
model = replace(model, layers=(dense, replace(mixture, ffn=in_a_row)))

training = Training(model, seq=4096, global_batch=512, precision="bf16")
cluster = read_machines("256xh100-80")
pricer = Pricer(training, cluster, software("torchtitan"))
predicted = pricer.price(parse_layout("pp4 ep64 vp8 fsdp mb1 recompute=full", cluster.n_gpus))

throughput = predicted.tokens_per_s_per_gpu
low, high = (throughput * predicted.step_s / step_s for step_s in (predicted.high_s, predicted.low_s))
print(f"predicted {throughput:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f}), MFU {predicted.mfu:.0%}")
print(f"published {PUBLISHED:,}, error {throughput / PUBLISHED - 1:+.0%}: {SOURCE}")
