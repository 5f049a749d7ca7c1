"""The register of data sets: what is verified, fetched, and said when it fails."""

import hashlib
import io
import urllib.error
from contextlib import closing
from pathlib import Path

import pytest

from makespan.errors import (
    ChecksumError,
    MissingDataError,
    OfflineError,
    TraceError,
    UnknownNameError,
)
from makespan.throughput import Dataset, fetch, find_dataset, locate, read_register, verify

ROOT = Path(__file__).parents[2]
CONTENT = b"exec_plan,placement,iter_time\nga,1,0.5\n"
HEADER = "name,path,version,licence,size_bytes,sha256,repository,commit,upstream_path,url,note\n"


@pytest.fixture
def entry():
    return Dataset(
        name="toy-throughput",
        path="toy/throughput/bert/placements.csv",
        version="abc",
        licence="Apache-2.0",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        repository="someone/something",
        commit="abcdef0123",
        upstream_path="simulator/traces/bert/placements.csv",
        url="https://example.org/{repository}/{commit}/{upstream_path}",
        note="",
    )


class Server:
    """Stands for the network; counts what was asked."""

    def __init__(self, content=CONTENT, error=None):
        self.content, self.error, self.asked = content, error, []

    def __call__(self, address):
        self.asked.append(address)
        if self.error is not None:
            raise self.error
        return closing(io.BytesIO(self.content))


def test_committed_register_is_complete_and_well_formed():
    register = read_register(ROOT / "src" / "makespan" / "throughput" / "presets" / "datasets.csv")
    morphling = [e for e in register if e.path.startswith("morphling/throughput/")]
    assert len(morphling) == 9
    assert all(e.licence == "Apache-2.0" for e in morphling)
    for e in register:
        assert len(e.commit) == 40
        assert e.address.startswith("https://") or e.note
        assert "{" not in e.address


def test_committed_register_matches_the_published_directory(published_dir):
    for e in read_register(ROOT / "src" / "makespan" / "throughput" / "presets" / "datasets.csv"):
        path = verify(e, published_dir)
        assert path.stat().st_size == e.size_bytes


def test_fetch_writes_the_checked_file_and_asks_once(entry, tmp_path):
    server = Server()
    path = fetch(entry, tmp_path, server)
    assert path == tmp_path / entry.path
    assert path.read_bytes() == CONTENT
    assert fetch(entry, tmp_path, server) == path
    assert server.asked == [
        "https://example.org/someone/something/abcdef0123/simulator/traces/bert/placements.csv"
    ]


def test_offline_fetch_is_one_clear_error_and_leaves_nothing(entry, tmp_path):
    for error in [urllib.error.URLError("no route"), TimeoutError("slow"), ConnectionResetError("gone")]:
        with pytest.raises(OfflineError, match=r"toy-throughput.*MAKESPAN_PUBLISHED_DIR"):
            fetch(entry, tmp_path, Server(error=error))
        assert not list(tmp_path.rglob("*.csv"))


def test_wrong_content_is_refused_and_leaves_nothing(entry, tmp_path):
    with pytest.raises(ChecksumError, match=f"registered: {entry.sha256}"):
        fetch(entry, tmp_path, Server(content=CONTENT + b"ga,2,0.3\n"))
    assert not list(tmp_path.rglob("*"))


def test_default_opener_refuses_other_schemes(entry, tmp_path):
    from dataclasses import replace

    plain = replace(entry, url="file:///{repository}")
    with pytest.raises(OfflineError, match=r"only https"):
        fetch(plain, tmp_path)


def test_data_set_without_address_says_where_to_put_it(entry, tmp_path):
    from dataclasses import replace

    with pytest.raises(MissingDataError, match=r"extracted by hand.*put it at"):
        fetch(replace(entry, url="", note="extracted by hand"), tmp_path, Server())


@pytest.mark.parametrize("place", ["path", "upstream_path"])
def test_both_layouts_are_found(entry, tmp_path, place):
    target = tmp_path / getattr(entry, place)
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert locate(entry, tmp_path) == target
    assert verify(entry, tmp_path) == target


def test_missing_file_names_both_layouts(entry, tmp_path):
    with pytest.raises(MissingDataError) as caught:
        verify(entry, tmp_path)
    assert entry.path in str(caught.value) and entry.upstream_path in str(caught.value)


def test_changed_file_is_found_out(entry, tmp_path):
    target = tmp_path / entry.path
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT.replace(b"0.5", b"0.4"))
    with pytest.raises(ChecksumError, match=r"delete the file"):
        verify(entry, tmp_path)


def test_a_file_of_another_size_is_not_read(entry, tmp_path, monkeypatch):
    target = tmp_path / entry.path
    target.parent.mkdir(parents=True)
    with target.open("wb") as stream:
        stream.truncate(1 << 30)
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ChecksumError, match=rf"has 1073741824 bytes; registered: {len(CONTENT)} bytes"):
        verify(entry, tmp_path)


def test_converted_line_ends_are_recognised(entry, tmp_path):
    target = tmp_path / entry.path
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT.replace(b"\n", b"\r\n"))
    with pytest.raises(ChecksumError, match=r"line ends"):
        verify(entry, tmp_path)


def test_unknown_name_lists_the_known(entry):
    assert find_dataset([entry], "toy-throughput") is entry
    with pytest.raises(UnknownNameError, match=r"Did you mean 'toy-throughput'"):
        find_dataset([entry], "toy-thruput")


GOOD = "a,a.csv,v,l,10," + "0" * 64 + ",o/r,c,u,https://x/{commit},\n"


def test_malformed_register_names_row_and_column(tmp_path):
    for text, message in [
        ("name,path\na,b\n", "lacks column"),
        (HEADER + GOOD + GOOD, "more than once"),
        (HEADER + GOOD.replace(",10,", ",ten,"), "row 1, column 'size_bytes'"),
        (HEADER + GOOD.replace("0" * 64, "xyz"), "row 1, column 'sha256'"),
        (HEADER + GOOD.replace("a.csv", "../a.csv"), "row 1, column 'path'"),
    ]:
        path = tmp_path / "datasets.csv"
        path.write_text(text)
        with pytest.raises(TraceError, match=message):
            read_register(path)


def test_missing_register(tmp_path):
    with pytest.raises(MissingDataError, match=r"no such file; expected a register"):
        read_register(tmp_path / "none.csv")
