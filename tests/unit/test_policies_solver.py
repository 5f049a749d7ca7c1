"""The solver's own lines do not reach the output, and everything else does."""

import ctypes
import os
import sys
import threading

import pytest
from scipy.optimize import Bounds

from makespan.policies import _solver
from makespan.policies._solver import quiet_output, solve


def chatter(text):
    """Write by a system call, and as compiled code with a buffer of its own."""
    os.write(1, f"{text}\n".encode())
    ctypes.CDLL(None).printf(f"{text}\n".encode())


def test_only_what_is_written_inside_is_lost(capfd):
    chatter("before")
    with quiet_output():
        chatter("inside")
    chatter("after")
    ctypes.CDLL(None).fflush(None)
    out = capfd.readouterr().out
    assert out.count("before") == out.count("after") == 2
    assert "inside" not in out


def test_output_comes_back_after_an_error(capfd):
    with pytest.raises(ValueError, match="broken"), quiet_output():
        raise ValueError("broken")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_text_that_waits_in_a_buffer_is_kept(capfd):
    sys.stdout.write("waiting")
    with quiet_output():
        pass
    sys.stdout.flush()
    assert capfd.readouterr().out == "waiting"


def test_a_chatty_solver_is_silent_and_its_answer_arrives(capfd, monkeypatch):
    def chatty(costs, **options):
        ctypes.CDLL(None).printf(b"HighsMipSolverData::transform\n")
        return costs, options

    monkeypatch.setattr(_solver, "milp", chatty)
    assert solve([1.0], bounds=2) == ([1.0], {"bounds": 2})
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""


def test_the_real_solver_is_called():
    solution = solve([-1.0, -1.0], integrality=[1, 1], bounds=Bounds(0, [2.5, 3.5]))
    assert solution.x.tolist() == [2.0, 3.0]


def test_threads_take_turns_and_restore_the_output(capfd):
    def work():
        for _ in range(20):
            with quiet_output():
                os.write(1, b"inside\n")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_a_process_without_standard_output_is_left_alone(monkeypatch):
    def refuse(_):
        raise OSError("closed")

    monkeypatch.setattr(_solver.os, "dup", refuse)
    with quiet_output():
        done = True
    assert done
