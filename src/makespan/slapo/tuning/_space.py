"""What a schedule may choose: symbols with candidates, where those of one may depend on others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from makespan.errors import InputError, MakespanError

__all__ = ["Point", "Polygon", "Space", "Symbol", "UnfixedSymbolError", "Value"]

Value = int | float | str | bool
Point = Mapping[str, Value]
"""One value a symbol, by name."""


class UnfixedSymbolError(MakespanError, ValueError):
    """The value of a symbol is asked for before it has one."""


class Symbol:
    """Something to choose: its candidates, or its value once that is fixed.

    Every comparison of a symbol that has no value yet is false, so that branches of a declaration which
    depend on it are taken only once it has one.
    """

    def __init__(self, name: str, candidates: Sequence[Value], fixed: Value | None = None) -> None:
        self.name = name
        self.candidates = tuple(candidates)
        self._value = fixed

    def __repr__(self) -> str:
        return f"Symbol({self.name!r}, {self._value if self.is_fixed else list(self.candidates)})"

    @property
    def is_fixed(self) -> bool:
        """Whether it has a value."""
        return self._value is not None

    @property
    def value(self) -> Value:
        """Its value; raises `UnfixedSymbolError`, a `ValueError`, while there is none."""
        if self._value is None:
            raise UnfixedSymbolError(
                f"symbol {self.name!r} has no value yet; accepted: comparisons, which are false until then"
            )
        return self._value

    def _compared(self, other: object, operation: str) -> bool:
        against = other._value if isinstance(other, Symbol) else other
        if self._value is None or against is None:
            return False
        return bool(getattr(self._value, operation)(against))

    def __eq__(self, other: object) -> bool:
        return self._compared(other, "__eq__")

    def __ne__(self, other: object) -> bool:
        return self._compared(other, "__ne__")

    def __lt__(self, other: object) -> bool:
        return self._compared(other, "__lt__")

    def __le__(self, other: object) -> bool:
        return self._compared(other, "__le__")

    def __gt__(self, other: object) -> bool:
        return self._compared(other, "__gt__")

    def __ge__(self, other: object) -> bool:
        return self._compared(other, "__ge__")

    __hash__ = object.__hash__


class Space:
    """All points that a declaration allows.

    Parameters
    ----------
    declare
        Creates symbols and constraints in the space that it is given. It is called again whenever one more
        symbol has a value, so that the candidates of later symbols may depend on earlier ones. Without it
        symbols are created in the space itself and span a grid.

    Notes
    -----
    The space need not be a rectangle: branches of the declaration, `constrain` and `Polygon` cut it.
    """

    def __init__(self, declare: Callable[["Space"], object] | None = None) -> None:
        self._declare = declare
        self._fixed: Point = {}
        self._symbols: dict[str, Symbol] = {}
        self._conditions: list[Callable[[Point], bool]] = []

    def create_symbol(self, name: str, values: Iterable[Any]) -> Symbol:
        """Return a symbol with these candidates; one that has a value already stays as it is.

        Raises
        ------
        InputError
            A candidate occurs twice, or is no number, text or truth value.
        """
        candidates = [getattr(value, "item", lambda value=value: value)() for value in values]
        wrong = [value for value in candidates if not isinstance(value, Value)]
        if wrong or len(set(candidates)) != len(candidates):
            raise InputError(
                f"symbol {name!r}: found candidates {candidates}; accepted: numbers, texts and truth values, "
                "each once"
            )
        self._symbols[name] = Symbol(name, candidates, self._fixed.get(name))
        return self._symbols[name]

    def constrain(self, condition: Callable[[Point], bool]) -> None:
        """Keep only points for which a condition holds."""
        self._conditions.append(condition)

    def enumerate(self) -> list[Point]:
        """Return all points, in the order in which symbols and candidates are declared.

        Raises
        ------
        InputError
            A symbol that has a value is no longer declared once another one has one.
        """
        return list(self._points({}))

    def __len__(self) -> int:
        return len(self.enumerate())

    def _at(self, fixed: Point) -> "Space":
        """Return the space as it is declared with some symbols fixed."""
        scope = Space()
        scope._fixed = fixed
        if self._declare is not None:
            self._declare(scope)
        else:
            for symbol in self._symbols.values():
                scope.create_symbol(symbol.name, symbol.candidates)
            scope._conditions = self._conditions
        lost = sorted(set(fixed) - set(scope._symbols))
        if lost:
            raise InputError(
                f"symbol {lost[0]!r} is not declared where {dict(fixed)}; accepted: a declaration that keeps "
                "symbols that have values"
            )
        return scope

    def _points(self, fixed: Point) -> Iterator[Point]:
        scope = self._at(fixed)
        free = next((symbol for symbol in scope._symbols.values() if not symbol.is_fixed), None)
        if free is not None:
            for value in free.candidates:
                yield from self._points({**fixed, free.name: value})
        elif fixed and all(condition(fixed) for condition in scope._conditions):
            yield fixed


@dataclass(frozen=True, slots=True)
class Polygon:
    """A region of two symbols, its border included.

    Parameters
    ----------
    x, y
        Names of the symbols.
    vertices
        Corners (x, y), in order. Numbers are taken as they are written in decimals, so that a point on a
        slanted edge is inside although floats are rounded.
    """

    x: str
    y: str
    vertices: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.vertices) < 3:
            raise InputError(f"found a polygon of {len(self.vertices)} vertices; accepted: three or more")

    def __call__(self, point: Point) -> bool:
        """Whether a point of the space is inside or on the border."""
        x, y = (Fraction(str(point[name])) for name in (self.x, self.y))
        corners = [(Fraction(str(one)), Fraction(str(other))) for one, other in self.vertices]
        is_inside = False
        for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
            side = (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1)
            if side == 0 and min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2):
                return True
            if (y1 > y) != (y2 > y) and (side > 0) == (y2 > y1):
                is_inside = not is_inside
        return is_inside
