"""Table 4 counts schedules as its rules say, in source that is not imported."""

import ast
import inspect

import pytest

from makespan.errors import MakespanError
from makespan.papers.slapo.table4 import Definition, ScheduleSources, Sources, schedule_lines, text_lines

PRIMITIVES = '''
raise RuntimeError("imported")

@register_primitive()
class Shard(Primitive):
    @classmethod
    def name(cls) -> str:
        """Return ``shard``."""
        return "shard"

@register_primitive()
class Sync(Primitive):
    @classmethod
    def name(cls) -> str:
        return "sync"

class Unregistered:
    def name(self):
        return "fuse"
'''
HELPERS = '''
def shard_mlp(sch, first, second):
    """Split two layers."""
    sch[first].shard(["weight", "bias"], axis=0)
    sch[second].shard("weight", axis=1)
    synced(sch[second])

def synced(node):
    node.sync("fwd_post", "all_reduce")

def of_family(sch, family):
    if family == "one":
        sch.shard("weight", axis=0)

def for_one_alone(sch):
    # not a line
    sch.fuse(1)
    sch.sync("bwd_post",
             "all_reduce")
'''
SCHEDULES = '''
import logging
from package.helpers import for_one_alone, of_family, shard_mlp as split

LOGGER = logging.getLogger(__name__)

def one(sch, cfg):
    """Schedule the first family.

    for and so on
    """
    layers = [sch[name] for name in ("a", "b")]
    for layer in layers:
        split(layer, "fc1", "fc2")
        LOGGER.info("split %s", layer)

        for_one_alone(layer)
    if cfg.ratio:
        pass
    return sch

def two(sch, cfg):
    split(sch, "fc1", "fc2")
    of_family(sch, "two")
    sch.shard("weight", 0); sch.shard("bias", 0)

SCHEDULES = {"one": one, "two": two}
'''


@pytest.fixture
def sources(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    texts = {"__init__": "", "primitives": PRIMITIVES, "helpers": HELPERS, "schedules": SCHEDULES}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    return Sources(tmp_path, ["package"])


@pytest.fixture
def counted(sources):
    schedules = sources.table("package.schedules", "SCHEDULES")
    return ScheduleSources(sources, schedules, ["package.schedules", "package.helpers"])


def test_primitives_are_what_is_registered_as_one(counted):
    assert counted.primitives == {"shard", "sync"}


def test_a_helper_of_two_families_is_a_line_and_what_one_alone_calls_counts_whole(counted):
    found = schedule_lines(counted, "one")
    # layers, split, for_one_alone and its two statements, if, return; no loop header, message or pass.
    assert found.helpers == 7
    assert (found.called, found.counted_whole) == (("shard_mlp", "synced"), ("for_one_alone",))
    assert found.expanded == 4  # two in shard_mlp, one in synced, one in for_one_alone
    assert found.listing == 5  # split, message, if, pass, return; the others contain "for"


def test_a_function_that_asks_for_the_family_is_no_helper(counted):
    found = schedule_lines(counted, "two")
    # split, of_family with its condition and one statement, two statements on one line.
    assert (found.helpers, found.counted_whole, found.expanded) == (6, ("of_family",), 6)


def test_names_are_followed_through_imports_and_no_module_is_imported(sources):
    found = sources.find("package.schedules", "split")
    assert found.place == "package.helpers:shard_mlp"
    assert sources.find("package.schedules", "logging") is None


def test_lines_of_text_are_those_with_code():
    text = inspect.cleandoc('''
        @decorated
        class Layer:
            """Says something.

            More of it.
            """

            # why
            size = 1

            def forward(self):
                """Double."""
                return 2  # a result
    ''')
    (node,) = ast.parse(text).body
    assert [text.splitlines()[number - 1].strip()[:6] for number in text_lines(node, text)] == [
        "@decor", "class ", "size =", "def fo", "return"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda top: Sources(top, ["package.absent"]), "no module package.absent"),
        (lambda top: Sources(top, ["package"]).table("package.schedules", "one"), "dictionary of functions"),
        (lambda top: Sources(top, ["package"]).table("package.helpers", "TABLE"), "expected 'key': name"),
        (
            lambda top: ScheduleSources(Sources(top, ["package.helpers"]), {}, []).primitives,
            "no class is decorated with register_primitive; searched package.helpers",
        ),
    ],
)
def test_source_of_another_form_is_told(sources, tmp_path, make, message):
    path = tmp_path / "package" / "helpers.py"
    path.write_text(path.read_text() + "\nTABLE = {'one': lambda sch: sch}\n")
    with pytest.raises(MakespanError, match=message):
        make(tmp_path)


def test_imports_in_a_circle_end(tmp_path):
    for here, there in (("first", "second"), ("second", "first")):
        (tmp_path / f"{here}.py").write_text(f"from {there} import name\n")
    with pytest.raises(MakespanError, match="circular imports of 'name'"):
        Sources(tmp_path, ["first", "second"]).find("first", "name")


def test_a_definition_knows_its_place():
    assert Definition("package.module", "name", ast.parse("name = 1").body[0]).place == "package.module:name"


@pytest.mark.parametrize(
    ("top", "written"),
    [
        ("", 'logging.getLogger(__name__).info("split %s", layer)'),
        ("", "logging.getLogger(__name__).info(layer)"),
        ("", "logging.getLogger(__name__).getChild(layer).info(layer)"),
        ("", "logging.info(layer)"),
        ("import logging as told", "told.warning(layer)"),
        ("from logging import getLogger, info", "info(layer)"),
        ("from logging import getLogger", "getLogger().debug(layer)"),
        ("from elsewhere import LOG", 'LOG.log(10, f"split {layer}")'),
        ("from elsewhere import LOG", 'LOG.info("split {}".format(layer))'),
        ("", "told = logging.getLogger(__name__)\n        told.info(layer)"),
    ],
)
def test_a_message_to_a_log_counts_for_nothing_however_it_is_written(tmp_path, top, written):
    def counted_with(name, schedules):
        package = tmp_path / name
        package.mkdir()
        texts = {"__init__": "", "primitives": PRIMITIVES, "helpers": HELPERS.replace("package", name)}
        for module, text in (texts | {"schedules": schedules.replace("package", name)}).items():
            (package / f"{module}.py").write_text(text)
        sources = Sources(tmp_path, [name])
        table = sources.table(f"{name}.schedules", "SCHEDULES")
        return schedule_lines(
            ScheduleSources(sources, table, [f"{name}.schedules", f"{name}.helpers"]), "one"
        )

    line = 'LOGGER.info("split %s", layer)'
    without = counted_with("plain", SCHEDULES.replace(line, "pass"))
    assert counted_with("told", f"{top}\n" + SCHEDULES.replace(line, written)).helpers == without.helpers
    for number, statement in enumerate(("layer.info(layer)", "layer = made(layer)", 'told.split("words")')):
        found = counted_with(f"counted{number}", SCHEDULES.replace(line, statement))
        assert found.helpers == 1 + without.helpers
