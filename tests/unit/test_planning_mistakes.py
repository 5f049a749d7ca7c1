"""Mistakes in files and options of plan, size and validate-public: one line each, before any long work."""

import json
import shlex

import pytest
from click.testing import CliRunner
from public_rows import write_rows

from makespan.cli import main, plan as commands
from makespan.planning.rows import COLUMNS

MODEL = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
RUN = "plan llama3-8b 8xh100-80 --seq 4096 --batch 64 "
CLUSTER = [
    # Text of a cluster file of eight H100, and the message.
    ("network_gbit_per_s = 400", "unknown field 'network_gbit_per_s'"),
    ("network_gb_per_s = 50e9", "network_gb_per_s is 50000000000.0; expected a positive number up to 10,000"),
    ("memory_gib = 85_899_345_920", "memory_gib is 85899345920; expected a positive number up to 10,000"),
    ('memory_gib = "80GB"', "memory_gib is '80GB'; expected a number"),
    ("memory_gib = true", "memory_gib is True; expected a number"),
    ("link_latency_s = 4", "link_latency_s is 4; expected a number from 0 to 0.1"),
    ("link_latency_us = 4", "unknown field 'link_latency_us'"),
    ("usd_per_gpu_hour = -2", "usd_per_gpu_hour is -2; expected a number from 0"),
    ("gpus_per_node = 4.5", "gpus_per_node is 4.5; expected a whole number >= 1"),
    ("gpus_per_node = 0", "gpus_per_node is 0; expected a whole number >= 1"),
    ('peak_tflop_per_s = "989"', "peak_tflop_per_s is '989'; expected a table"),
    ("peak_tflop_per_s = { bf16 = -1 }", "peak_tflop_per_s of bf16 is -1; expected a positive number"),
    ("peak_tflop_per_s = { bf16 = 989e12 }", "peak_tflop_per_s of bf16 is 989000000000000.0; expected"),
    ('peak_tflop_per_s = { bf16 = "fast" }', "peak_tflop_per_s of bf16 is 'fast'; expected"),
    ("peak_tflop_per_s = { fp32 = 60 }", "unknown precision of device 'h100-80' 'bf16'; expected fp32"),
    ("products = { bf16 = 0.8 }", "products of bf16 are 0.8; expected a share of the peak"),
    ("products = { bf16 = [80, 110] }", "products of bf16 are 80, 110; expected a share of the peak"),
    ("attention = { second = [0.5, 450] }", "attention lacks first, third"),
    (
        "attention = { first = [0, 5], second = [0.4, 5], third = [0.4, 5] }",
        "attention of first are 0, 5; expected a share",
    ),
    ("source = 3", "source is 3; expected text"),
    ("n_gpus = 16", "ours.toml: cannot be read as a cluster: Cannot overwrite a value"),
]
MEASURED = [
    # Rows below n_gpus, layout, step_s, and the message.
    ("8,fsdp mb1,2500ms", "row 1, column 'step_s': found '2500ms'; expected a number above 0"),
    ("8,fsdp mb1,1700", "row 1: a step of 1700 s is 0.094 % of the peak of 8 GPUs; expected 0.1 to 100 %"),
    ("8,fsdp mb1,0.001", "% of the peak of 8 GPUs; expected 0.1 to 100 %, and seconds per step"),
    ("8,fsdp mb1,2.5\n8,fsdp mb1,25", "row 2: 25 s, but row 1 has 2.5 s for the same run"),
    ("", "has no row; expected measured steps"),
    ("8,,2", "row 1, column 'layout': found ''; expected words such as tp4 pp2 mb1"),
    (
        "999999999999,fsdp mb1,2",
        "row 1: cluster '999999999999xh100-80': n_gpus is 999,999,999,999; expected at",
    ),
    ("8,tp2 dp8 mb1,2", "row 1: layout 'tp2 dp8 mb1': dp 8 x tp x pp x cp 2 = 16, not 8"),
    ("8,zero3 fsdp mb1,2", "row 1: layout 'zero3 fsdp mb1': 'fsdp' says again what another word says"),
]
OPTIONS = [
    ("plan llama3-8b 0xh100-80", "n_gpus is 0; expected a whole number >= 1"),
    ("plan llama3-8b 200000xh100-80", "n_gpus is 200,000; expected at most 131,072"),
    (RUN + "--layout ''", "--layout is empty; expected words such as"),
    (RUN + "--layout mb0", "micro_batch is 0; expected a whole number >= 1"),
    (RUN + "--layout mb3", "a batch of 64 samples is not a multiple of 24"),
    (RUN + "--layout 'cp8 tp4'", "8 GPUs are not a multiple of tp x pp x cp = 32"),
    ("plan llama3-8b 64xh100-80 --layout tp64", "tensor parallelism over 64 does not divide 32 heads"),
    ("plan llama3-8b 64xh100-80 --layout pp64 --batch 64", "64 stages of 1 chunks for 32 layers"),
    ("plan llama3-8b 64xh100-80 --layout cp64 --seq 32", "over 64 does not divide samples of 32 tokens"),
    ("plan mixtral-8x7b 12xh100-80 --layout ep3 --batch 24", "does not divide 8 experts"),
    ("plan llama3-8b 8xh100-80 --seq 8k", "'--seq': '8k'; expected a whole number"),
    ("plan llama3-8b 8xh100-80 --batch -4", "'--batch': '-4'; expected a whole number"),
    ("plan llama3-8b 8xh100-80 --precision int8", "'--precision': 'int8' is not one of"),
    ("plan llama3-8b 8xh100-80 --stack megatron-bridg", "'--stack': 'megatron-bridg' is not one of"),
    ("plan . 8xh100-80", "the folder has no config.json"),
    ("size llama3-8b --tokens 15T", "'--tokens': '15T'; expected a number above 0"),
    ("size llama3-8b --tokens nan", "'--tokens': 'nan'; expected a number above 0"),
    ("size llama3-8b --tokens 1e9 --deadline -3", "'--deadline': '-3'; expected a number above 0"),
    ("size llama3-8b --tokens 1e9 --budget 0 --price 2", "'--budget': '0'; expected a number above 0"),
    ("size llama3-8b --tokens 1e9 --device h200x", "'--device': 'h200x' is not one of"),
    ("size llama3-8b", "Missing option '--tokens'"),
]
PUBLIC = [
    # Changed cells of rows that all have the same mistake, and the message.
    ({"n_gpus": "eight"}, "n_gpus is 'eight', not a number"),
    ({"n_gpus": "16"}, "dp 8 x tp 1 x pp 1 x cp 1 is not 16 GPUs"),
    ({"tp": ""}, "tp is not stated"),
    ({"pp": "64", "dp": "", "n_gpus": "64"}, "64 stages for 32 layers"),
    ({"heads": "33"}, "hidden 4096 is not a multiple of 33 heads"),
    ({"iteration_time_s": "", "tokens_per_s_per_gpu": ""}, "no time, throughput or FLOP rate is stated"),
    ({"iteration_time_s": "0.01"}, "of the peak, more than 80%"),
    ({"iteration_time_s": "-3"}, "a step of -3 s"),
    ({"recompute": "some"}, "recompute is 'some'; expected none, full"),
    ({"gpu": "H900"}, "device 'H900' is not in the catalogue"),
    (
        {"source": "mine"},
        "no stack is known for source 'mine'; state one of the catalogue in a column 'stack'",
    ),
    ({"stack": "megatronn"}, "unknown stack 'megatronn'"),
    ({"global_batch": "1.5"}, "global_batch is '1.5', not a whole number >= 1"),
    ({"seq": "nan"}, "seq is 'nan', not a finite number"),
]
DEEPSEEK = {
    "model_type": "deepseek_v3", "n_routed_experts": 16, "num_experts_per_tok": 6, "kv_lora_rank": 64,
    "moe_intermediate_size": 64, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_work(monkeypatch, tmp_path):
    """Work in an empty folder, and fail where a command goes on to search, to size or to judge."""
    monkeypatch.chdir(tmp_path)
    for name in ("plan", "size_clusters", "judge"):
        monkeypatch.setattr(commands, name, lambda *_, name=name, **__: pytest.fail(f"{name} is called"))


def check(command, said):
    """Run a command that must end with one line that has some words, and with exit status 2."""
    done = CliRunner().invoke(main, shlex.split(command))
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ") and said in line


def test_there_are_thirty_mistakes_at_least():
    assert len(CLUSTER) + len(MEASURED) + len(OPTIONS) + len(PUBLIC) >= 30


@pytest.mark.parametrize(("line", "said"), CLUSTER, ids=[line for line, _ in CLUSTER])
def test_a_mistake_in_a_cluster_is_one_line(tmp_path, line, said):
    (tmp_path / "ours.toml").write_text(f'device = "h100-80"\nn_gpus = 8\n{line}\n')
    check("plan llama3-8b ours.toml --layout fsdp", said)


@pytest.mark.parametrize(("rows", "said"), MEASURED, ids=range(len(MEASURED)))
def test_a_mistake_in_measured_steps_is_one_line(tmp_path, rows, said):
    (tmp_path / "rows.csv").write_text(f"n_gpus,layout,step_s\n{rows}\n".replace("\n\n", "\n"))
    check(RUN + "--measured rows.csv", said)


@pytest.mark.parametrize(("command", "said"), OPTIONS, ids=[command for command, _ in OPTIONS])
def test_a_mistake_in_options_is_one_line(command, said):
    check(command, said)


@pytest.mark.parametrize(("cells", "said"), PUBLIC, ids=range(len(PUBLIC)))
def test_a_mistake_in_every_row_of_a_table_is_one_line(tmp_path, cells, said):
    write_rows(tmp_path / "rows.csv", **cells)
    check("validate-public rows.csv", said)


def test_tables_that_cannot_be_judged_are_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR", raising=False)
    check("validate-public", "no tables are given; expected CSV files")
    check("validate-public --published-dir .", "public-rows: no such folder; expected the 13 tables")
    check("validate-public rows.csv --published-dir .", "is read only if no tables are given, got rows.csv")
    check("validate-public nowhere.csv", "nowhere.csv")
    check("validate-public .", "has no CSV file; expected tables of measured rows")
    (tmp_path / "rows.csv").write_text(",".join(COLUMNS) + "\n")
    check("validate-public rows.csv", "rows.csv: no rows")
    check("validate-public rows.csv rows.csv", "rows.csv: is given twice")
    (tmp_path / "rows.csv").write_text("source,model\na,b\n")
    check("validate-public rows.csv", "rows.csv: lacks the columns address")
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00\x00\x80")
    check("validate-public rows.csv", "rows.csv: cannot be read as a table of measured rows")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 500}, "the hidden size 500 is not a multiple of 8 attention heads"),
        ({"vocab_size": "1k"}, "field 'vocab_size': found '1k'; expected a whole number"),
        ({"num_hidden_layers": 0}, "field 'num_hidden_layers': found 0; expected a whole number"),
        ({"model_type": "mixtral", "num_local_experts": 0, "num_experts_per_tok": 2}, "'num_local_experts'"),
        (
            DEEPSEEK | {"n_group": 3, "topk_group": 2},
            "2 of 3 groups per token; expected no more than there are",
        ),
        (DEEPSEEK | {"n_group": 4, "topk_group": 8}, "8 of 4 groups per token"),
        (DEEPSEEK | {"n_group": 8, "topk_group": 1}, "6 per token, but there are 2 in 1 of 8 groups"),
        (DEEPSEEK | {"n_group": 0}, "field 'n_group': found 0"),
    ],
)
@pytest.mark.parametrize("command", ["plan model.json 8xh100-80", "size model.json --tokens 1e9"])
def test_a_mistake_in_a_model_is_one_line(tmp_path, command, fields, said):
    (tmp_path / "model.json").write_text(json.dumps(MODEL | fields))
    check(command, said)
