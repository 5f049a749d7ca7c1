"""Reproduce and extend experiments on training large models on shared GPU clusters.

The package is layered; import the layer you need, for example ``makespan.plans`` or
``makespan.emulator``. This module imports nothing, so that starting a workflow stays quick.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
