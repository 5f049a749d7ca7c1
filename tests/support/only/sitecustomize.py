"""Hide packages from every Python process that finds this folder in PYTHONPATH: those in HIDDEN_PACKAGES."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split())


class VisiblePathFinder(PathFinder):
    """A finder to which hidden packages are as if they were not installed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path[:] = [VisiblePathFinder if finder is PathFinder else finder for finder in sys.meta_path]
