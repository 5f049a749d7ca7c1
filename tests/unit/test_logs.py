"""Log files of workflow jobs."""

import logging
import subprocess
import sys

import pytest

from makespan.errors import MissingDataError
from makespan.logs import logged_to


def test_messages_of_the_block_are_in_the_file_and_later_ones_are_not(tmp_path):
    path = tmp_path / "job.log"
    logger = logging.getLogger("makespan.test")
    with logged_to(path):
        logger.info("inside %d", 1)
    logger.warning("outside")
    text = path.read_text()
    assert "INFO makespan.test: inside 1" in text
    assert "outside" not in text


def test_an_expected_error_ends_the_job_with_its_message_and_no_traceback(tmp_path):
    path = tmp_path / "job.log"
    with pytest.raises(SystemExit) as caught, logged_to(path):
        raise MissingDataError("a.csv: no such file")
    assert caught.value.code == "MissingDataError: a.csv: no such file"
    assert path.read_text().endswith("ERROR root: MissingDataError: a.csv: no such file\n")


def test_an_unexpected_error_passes_through_and_is_in_the_file(tmp_path):
    path = tmp_path / "job.log"
    with pytest.raises(ZeroDivisionError), logged_to(path):
        raise ZeroDivisionError
    assert "Traceback" in path.read_text()


def test_the_level_of_the_root_logger_comes_back(tmp_path):
    before = logging.getLogger().level
    with logged_to(tmp_path / "job.log"):
        assert logging.getLogger().level == logging.INFO
    assert logging.getLogger().level == before


JOB = """
import ctypes, os, sys
from makespan.logs import logged_to
with logged_to(sys.argv[1]):
    os.write(1, b"native line\\n")
    ctypes.CDLL(None).printf(b"line that C keeps until the end\\n")
    print("said by Python")
"""


def test_what_native_code_prints_is_in_the_file_and_not_on_the_output_of_the_workflow(tmp_path):
    path = tmp_path / "job.log"
    done = subprocess.run([sys.executable, "-c", JOB, path], capture_output=True, text=True, check=True)
    assert done.stdout == "said by Python\n"
    assert not done.stderr
    assert {"native line", "line that C keeps until the end"} <= set(path.read_text().splitlines())
