"""The page of errors: every message on it occurs, and every class is listed."""

import re
import shlex

import pytest
from click.testing import CliRunner
from pages import ROOT

from makespan.cli import main

PAGE = (ROOT / "docs/reference/errors.md").read_text()
MESSAGES = re.findall(r"^#### `(.+)`$", PAGE, re.MULTILINE)
HEADER = "job_id,submit_time_s,workload,n_gpus,n_cpus,plan,steps,is_guaranteed,tenant,duration_s\n"
FILES = {
    "cell.csv": HEADER + "one,0,bert,zero,32,ga,500,false,nlp,\n",
    "columns.csv": "job_id,workload\none,bert\n",
    "broken.py": "a = 1\nb = a / 0\n",
    "key.yaml": "throughput:\n  sorces: [measured]\n",
}
COMMANDS = {
    "unknown policy 'NAME'; expected": "simulate --policy morphlin",
    "unknown workload or file 'NAME'; expected": "simulate --workload bases",
    "unknown cluster 'NAME'; expected": "simulate --cluster a100",
    "unknown model or workload 'NAME'; expected": "explain lama7 244 8888",
    "FILE: no such file; expected": "simulate --workload none.csv",
    "DIRECTORY is not in a checkout of makespan": "config",
    "the configuration is not accepted: BLOCK.KEY: unknown key": "config {tmp_path}/key.yaml --root {root}",
    "FILE: lacks column(s)": "simulate --workload columns.csv",
    "FILE: row ROW, column 'COLUMN': found": "simulate --workload cell.csv",
    "data set 'NAME' is not in": "simulate --source published --published-dir .",
    "source measured: expected a directory": "simulate --source measured",
    "execution plan 'PLAN' cannot be read; expected": "explain llama7 24 8888",
    "execution plan 'PLAN' needs": "explain llama7 244 88",
    "FILE, line LINE:": "simulate --policy ./broken.py",
    "no job waited for longer than a round": "compare --policies fifo,sjf --workload naive",
    "mapping MAPPING has N logical workers; expected": "easyscale run resnet50 --steps 2 --mapping 0,1,2",
    "n_nodes is N; expected": "oobleck run gpt --iterations 1 --nodes 1",
    "apply_schedule: OPTION is": "slapo show bert --set attn=fast",
    "plan: WORD cannot be realised by a schedule": "slapo show bert --plan 'tp4 ep2'",
    "MODEL: context parallelism cannot be placed": "slapo show bert --plan cp2",
    "MODEL: sequence parallelism cannot be placed": "slapo show bert --plan tp3",
    "process RANK of N failed:": "slapo verify bert --processes 3",
}
TRAINS = ("easyscale", "oobleck", "slapo")


def pattern_of(message):
    """Return the expression for a message in which words in capital letters stand for anything."""
    return re.sub(r"(?<![A-Za-z])[A-Z]+(?![a-z])", ".+?", re.escape(message))


def test_every_message_of_the_page_is_tried():
    assert sorted(MESSAGES) == sorted(COMMANDS) and len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.xdist_group("training")
def test_a_message_of_the_page_occurs_with_these_first_words(message, tmp_path, monkeypatch):
    arguments = shlex.split(COMMANDS[message].format(tmp_path=tmp_path, root=ROOT))
    if arguments[0] in TRAINS:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKESPAN_PUBLISHED_DIR", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(main, arguments)
    is_warning = message.startswith("no job waited")
    assert (done.exit_code == 0) == is_warning, done.output
    start = "^Warning: " if is_warning else "^Error: "
    assert re.search(start + pattern_of(message), re.sub(r":\n +", ": ", done.output), re.MULTILINE), (
        done.output
    )


def test_a_capital_word_stands_for_anything_and_other_words_for_themselves():
    assert re.match(pattern_of("FILE, line LINE:"), "a.py, line 3: b")
    assert not re.match(pattern_of("unknown policy 'NAME'; expected"), "unknown cluster 'a'; expected")
