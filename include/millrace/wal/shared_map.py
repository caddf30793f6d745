"""An immutable map in key order whose changed copies share all that did not change.

The channel state is made of these maps: a copy costs nothing, a change copies one path of a shallow tree, and a state
that somebody still holds never changes. Iteration is in key order, so it depends on neither history nor hashes. A node
caches a summary of its entries (:class:`Measure`), so a question about the whole map, such as its earliest deadline,
costs what has changed since it was last asked. Nodes that two maps share are skipped when the maps are compared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Final, Protocol, TypeVar

FAN_OUT: Final = 16
"""Most entries of a leaf, and most children of an inner node."""

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Measure(Protocol):
    """Summarises entries. All summaries of one map are made by one measure; `context` is compared by identity."""

    def of(self, key: Any, value: Any, context: Any) -> Any:
        """Return the summary of one entry."""
        ...

    def same(self, old: Any, new: Any) -> bool:
        """Return whether two values certainly have equal summaries, at little cost."""
        ...

    def join(self, summaries: list[Any]) -> Any:
        """Return the summary of entries with these summaries; the list may be empty."""
        ...


class _Node:
    """A leaf (no bounds; `items` is a dict in key order), or an inner node (`items` is a list of its children)."""

    __slots__ = ("bounds", "items", "size", "summary")

    def __init__(self, bounds: tuple[Any, ...] | None, items: Any, size: int) -> None:
        self.bounds = bounds
        """The first key of each child but the first."""
        self.items = items
        self.size = size
        self.summary: tuple[Measure, Any, Any] | None = None
        """Measure, context and summary."""

    def first(self) -> Any:
        node = self
        while node.bounds is not None:
            node = node.items[0]
        return next(iter(node.items))

    def leaves(self) -> Iterator[_Node]:
        if self.bounds is None:
            yield self
        else:
            for child in self.items:
                yield from child.leaves()


def _leaf(items: dict[Any, Any]) -> _Node:
    return _Node(None, items, len(items))


def _inner(children: list[_Node]) -> _Node:
    bounds = tuple([child.first() for child in children[1:]])
    return _Node(bounds, children, sum([child.size for child in children]))


_EMPTY: Final = _leaf({})


class SharedMap(Mapping[K, V]):
    """An immutable map of comparable keys. Equal maps may have different trees."""

    __slots__ = ("_root",)
    _root: _Node

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        """Make a map of `entries`."""
        given = dict(entries)
        keys = sorted(given)  # type: ignore[type-var]
        nodes = [
            _leaf({key: given[key] for key in keys[start : start + FAN_OUT]}) for start in range(0, len(keys), FAN_OUT)
        ]
        while len(nodes) > 1:
            nodes = [_inner(nodes[start : start + FAN_OUT]) for start in range(0, len(nodes), FAN_OUT)]
        self._root = nodes[0] if nodes else _EMPTY

    @classmethod
    def _of(cls, root: _Node) -> SharedMap[K, V]:
        made = cls.__new__(cls)
        made._root = root
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMap, (dict(self.items()),)

    # -- as a mapping --------------------------------------------------------------------------------------------------

    def __getitem__(self, key: K) -> V:
        node = self._root
        while node.bounds is not None:
            node = node.items[bisect_right(node.bounds, key)]
        found: V = node.items[key]
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        node = self._root
        while node.bounds is not None:
            node = node.items[bisect_right(node.bounds, key)]
        return node.items.get(key, default)

    def __contains__(self, key: object) -> bool:
        node = self._root
        while node.bounds is not None:
            node = node.items[bisect_right(node.bounds, key)]
        return key in node.items

    def __len__(self) -> int:
        return self._root.size

    def __iter__(self) -> Iterator[K]:
        for leaf in self._root.leaves():
            yield from leaf.items

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def __repr__(self) -> str:
        return f"SharedMap({dict(self.items())!r})"

    # -- changed copies ------------------------------------------------------------------------------------------------

    def set(self, key: K, value: V) -> SharedMap[K, V]:
        """Return a copy with `value` at `key`."""
        made = _put(self._root, key, value)
        return self._of(made[0] if len(made) == 1 else _inner(made))

    def without(self, key: K) -> SharedMap[K, V]:
        """Return a copy without `key`. Raises KeyError if it is not there."""
        if key not in self:
            raise KeyError(key)
        root = _dropped(self._root, key)
        while root is not None and root.bounds is not None and len(root.items) == 1:
            root = root.items[0]
        return self._of(root or _EMPTY)

    # -- questions -----------------------------------------------------------------------------------------------------

    def summary(self, measure: Measure, context: Any) -> Any:
        """Return the summary of all entries. Costs what changed since it was last asked with this `context`."""
        return _summary(self._root, measure, context)

    def where(self, measure: Measure, context: Any, accepts: Callable[[Any], bool]) -> Iterator[tuple[K, V]]:
        """Yield the entries whose summary `accepts`, in key order.

        Parts whose summary it does not accept are skipped: so a summary that joins accepted ones must be accepted.
        """
        pending = [self._root]
        while pending:
            node = pending.pop()
            if not accepts(_summary(node, measure, context)):
                continue
            if node.bounds is not None:
                pending.extend(reversed(node.items))
                continue
            for key, value in node.items.items():
                if accepts(measure.of(key, value, context)):
                    yield key, value

    def between(self, low: K, high: K) -> Iterator[tuple[K, V]]:
        """Yield the entries with low <= key < high, in key order. Costs the entries that it yields."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            if node.bounds is not None:
                first, last = bisect_right(node.bounds, low), bisect_left(node.bounds, high)
                pending.extend(reversed(node.items[first : last + 1]))
                continue
            for key, value in node.items.items():
                if low <= key < high:
                    yield key, value

    def changed_keys(self, since: SharedMap[K, V]) -> list[K]:
        """Return the keys whose values are other objects than in `since`, or that one of both lacks, in order.

        Costs what changed if this map was made from `since`.
        """
        found: set[K] = set()
        for old, new in _differing(since._root, self._root):
            found.update(key for key, value in new.items() if old.get(key, old) is not value)
            found.update(key for key in old if key not in new)
        return sorted(found)  # type: ignore[type-var]


class _Items(ItemsView[K, V]):
    """Entries in key order."""

    _mapping: SharedMap[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        for leaf in self._mapping._root.leaves():
            yield from leaf.items.items()


class _Values(ValuesView[V]):
    """Values in key order."""

    _mapping: SharedMap[Any, V]

    def __iter__(self) -> Iterator[V]:
        for leaf in self._mapping._root.leaves():
            yield from leaf.items.values()


def _summary(node: _Node, measure: Measure, context: Any) -> Any:
    cached = node.summary
    if cached is not None and cached[0] is measure and cached[1] is context:
        return cached[2]
    if node.bounds is None:
        parts = [measure.of(key, value, context) for key, value in node.items.items()]
    else:
        parts = [_summary(child, measure, context) for child in node.items]
    joined = measure.join(parts)
    node.summary = (measure, context, joined)
    return joined


def _put(node: _Node, key: Any, value: Any) -> list[_Node]:
    """Return the node with the entry: one node, or the two that it is split into."""
    if node.bounds is not None:
        place = bisect_right(node.bounds, key)
        child = node.items[place]
        made = _put(child, key, value)
        children = node.items.copy()
        if len(made) == 1:
            children[place] = made[0]
            # The key that a new first entry brings is no bound: it is less than all keys beyond its node's bound.
            after = _Node(node.bounds, children, node.size + made[0].size - child.size)
            if child.summary is not None and made[0].summary == child.summary:
                after.summary = node.summary
            return [after]
        children[place : place + 1] = made
        if len(children) <= FAN_OUT:
            return [_inner(children)]
        return [_inner(children[: FAN_OUT // 2]), _inner(children[FAN_OUT // 2 :])]
    items = node.items.copy()
    known = items.get(key, items)
    items[key] = value
    if known is not items:
        after = _leaf(items)
        cached = node.summary
        if cached is not None:
            measure, context, _ = cached
            if measure.same(known, value) or measure.of(key, known, context) == measure.of(key, value, context):
                after.summary = cached
        return [after]
    keys = sorted(items)
    if len(keys) <= FAN_OUT:
        return [_leaf({each: items[each] for each in keys})]
    # Keys often ascend: a full last leaf stays full, and the new key begins the next one.
    middle = FAN_OUT if key == keys[-1] else len(keys) // 2
    return [_leaf({each: items[each] for each in part}) for part in (keys[:middle], keys[middle:])]


def _dropped(node: _Node, key: Any) -> _Node | None:
    """Return the node without the entry; None if nothing is left."""
    if node.bounds is None:
        items = node.items.copy()
        del items[key]
        return _leaf(items) if items else None
    place = bisect_right(node.bounds, key)
    children = node.items.copy()
    made = _dropped(children[place], key)
    if made is None:
        del children[place]
        return _inner(children) if children else None
    children[place] = made
    for left in (place - 1, place):
        if 0 <= left < len(children) - 1:
            one, other = children[left], children[left + 1]
            if len(one.items) + len(other.items) <= FAN_OUT // 2:
                joined = _leaf(one.items | other.items) if one.bounds is None else _inner(one.items + other.items)
                children[left : left + 2] = [joined]
                break
    return _inner(children)


def _differing(old: _Node, new: _Node) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Yield parts of two trees that may differ, as dicts of their entries."""
    if old is new:
        return
    if old.bounds is not None and old.bounds == new.bounds:
        for one, other in zip(old.items, new.items, strict=True):
            yield from _differing(one, other)
        return
    # The trees differ in form: compare what is not in leaves that both have.
    before, after = list(old.leaves()), list(new.leaves())
    shared = {id(leaf) for leaf in before} & {id(leaf) for leaf in after}
    yield tuple(  # type: ignore[misc]
        {key: value for leaf in leaves if id(leaf) not in shared for key, value in leaf.items.items()}
        for leaves in (before, after)
    )
