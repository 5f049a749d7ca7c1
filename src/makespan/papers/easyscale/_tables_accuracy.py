"""Schemas of what training keeps: bits of Fig. 9, and the accuracy of other elastic schemes."""

from makespan.tables import table_schema

__all__ = ["ACCURACY_CELLS", "ACCURACY_SCHEMAS", "FIG9", "FIG9_SUMMARY", "GAP", "GAP_CURVES", "GAP_SPREAD"]

_MODEL = ("model", "text", "", "stand-in, by the name of the model whose part it plays")
_SETTING = ("setting", "text", "", "determinism level")
_STAGE = ("stage", "int", "1", "part of the run with one mapping, from 0")
_REFERENCE = (
    *("reference", "text", ""),
    "stock training: ddp-homo, or under D2 ddp-heter; hooked where a hook adds up instead of gloo",
)
_SCHEME = ("scheme", "text", "", "what follows from the number of devices: linear, adaptive, easyscale")
_DEVICES = ("devices", "int", "1", "processes that train")
_CLASS = ("class", "text", "", "class of the held-out samples, or all")

FIG9 = table_schema(
    "easyscale_fig9",
    *(_MODEL, _SETTING, _STAGE),
    ("step", "int", "1", "mini-batches done, from 1"),
    ("loss", "float", "1", "loss of the last logical worker"),
    ("loss_hex", "text", "", "the same with all bits, as a hexadecimal number"),
    ("ref_loss", "float", "1", "loss of the last rank of the reference"),
    ("diff", "float", "1", "loss minus that of the reference"),
    ("param_sha", "text", "", "hash of the parameters after the step"),
    ("ref_param_sha", "text", "", "hash of those of the reference"),
    ("opt_sha", "text", "", "hash of the state of the optimizer"),
    ("ref_opt_sha", "text", "", "hash of that of the reference"),
    ("context_sha", "text", "", "hash of buffers and random states of all logical workers, by rank"),
    ("ref_context_sha", "text", "", "hash of those of the ranks of the reference"),
    _REFERENCE,
    ("equal", "bool", "", "whether the loss has the bits of the reference and all hashes are the same"),
)
FIG9_SUMMARY = table_schema(
    "easyscale_fig9_summary",
    *(_MODEL, _SETTING, _STAGE),
    ("mapping", "text", "", "virtual ranks by process"),
    ("devices", "text", "", "kernel set that each process runs"),
    _REFERENCE,
    ("steps", "int", "1", "mini-batches of the stage"),
    ("different_steps", "int", "1", "those with other bits than the reference"),
    ("max_abs_diff", "float", "1", "largest difference of the losses"),
    ("published_max_abs_diff", "float", "1", "largest difference in the paper's curve", True),
)
GAP = table_schema(
    "easyscale_gap",
    *(_SCHEME, _DEVICES),
    ("seed", "int", "1", "seed of weights, order of samples and random states; the task is the same"),
    ("batch_size", "int", "samples", "samples of an optimizer step"),
    ("learning_rate", "float", "1", "learning rate at the start"),
    _CLASS,
    ("samples", "int", "1", "held-out samples of that class"),
    ("accuracy_pct", "float", "%", "share of them that the trained model gets right"),
    ("param_sha", "text", "", "hash of the trained parameters"),
)
GAP_SPREAD = table_schema(
    "easyscale_gap_spread",
    *(_SCHEME, _CLASS),
    ("spread_pct", "float", "%", "largest minus smallest accuracy over devices, mean over seeds"),
    ("max_spread_pct", "float", "%", "the same, largest over seeds"),
    ("seed_spread_pct", "float", "%", "largest minus smallest accuracy over seeds, mean over devices"),
    ("published_spread_pct", "float", "%", "spread over devices in the paper", True),
)
GAP_CURVES = table_schema(
    "easyscale_gap_curves",
    *(_SCHEME, _DEVICES),
    ("gamma", "float", "1", "what the learning rate is multiplied by when it decays"),
    ("epoch", "int", "1", "epochs done"),
    ("learning_rate", "float", "1", "learning rate in the epoch"),
    ("loss", "float", "1", "mean loss of the epoch"),
    ("param_sha", "text", "", "hash of the parameters after it"),
)
ACCURACY_SCHEMAS = (FIG9, FIG9_SUMMARY, GAP, GAP_SPREAD, GAP_CURVES)

ACCURACY_CELLS = {
    "fig9": (
        *(_MODEL, _SETTING, _STAGE),
        ("published_max_abs_diff", "float", "1", "largest difference to plain data parallelism"),
    ),
    "gap": (
        *(_SCHEME, ("class", "text", "", "all, or worst for the one that spreads most")),
        ("published_spread_pct", "float", "%", "spread of the accuracy over numbers of GPUs"),
    ),
}
