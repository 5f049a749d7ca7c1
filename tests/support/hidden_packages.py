"""An environment in which only some of the packages that are installed here can be imported."""

import os
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("only")
OF_PYTHON = ("pip", "setuptools", "wheel")


def with_requirements(texts):
    """Return names of the packages that requirements bring, with those that these need in turn."""
    known = {canonicalize_name(one.name): one for one in metadata.distributions()}
    found, left = {}, [Requirement(text) for text in texts]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found and wanted.extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | wanted.extras
        needed = known[name].requires if name in known else None
        for text in needed or ():
            one = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if one.marker is None or any(map(one.marker.evaluate, extras)):
                left.append(one)
    return set(found)


def run_set():
    """Return the names of the packages of requirements.txt and of torch, with what torch needs."""
    pins = re.findall(r"^[a-z].*==.*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return {pin.partition("==")[0] for pin in pins} | with_requirements(["torch"])


def hiding_all_but(names, *paths):
    """Return variables of a process that finds these packages, the given paths and nothing else.

    ``names`` are canonical. Modules that an installed package shares with a hidden one stay.
    """
    kept = {*names, *OF_PYTHON, "makespan"}
    modules = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not kept & {canonicalize_name(owner) for owner in owners}
    }
    own = {"HIDDEN_PACKAGES": " ".join(sorted(modules))}
    own["PYTHONPATH"] = os.pathsep.join(map(str, (FOLDER, *paths)))
    others = {name: text for name, text in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    return others | own
