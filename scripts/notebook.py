"""Run the cells of the tutorial notebook in order and write what they show into it.

    python scripts/notebook.py

A test runs the cells, too, and compares what they show with what the notebook has.
"""

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from makespan.files import write_text

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tutorial" / "notebook.ipynb"


def lines_of(text: str) -> list[str]:
    """Return a text as notebooks store it."""
    return text.splitlines(keepends=True)


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its code cells, which run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        count += 1
        outputs = _outputs("".join(cell["source"]), names, count)
        cells.append(cell | {"execution_count": count, "outputs": outputs})
    return notebook | {"cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell; return what it printed and, if it ends with an expression, how its value shows itself."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"cell {count}", "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines_of(text)})
    if value is not None:
        # Objects show themselves as HTML; their text may name wall clock times.
        shown = {"text/plain": [f"<{type(value).__module__.split('.')[0]} {type(value).__name__}>"]}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = lines_of(value._repr_html_())
        else:
            shown["text/plain"] = lines_of(repr(value))
        result = {"data": shown, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append(result)
    return outputs


def main() -> None:
    """Write the notebook anew."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    write_text(json.dumps(executed(notebook), indent=1, ensure_ascii=False) + "\n", NOTEBOOK)


if __name__ == "__main__":
    sys.exit(main())
