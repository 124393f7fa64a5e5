"""Reading of pickles without running them: a machine of our own, in which no name of a file becomes a class.

A pickle is a program for a stack machine (Python's `pickletools` describes it). The harm of Python's own machine lies
in two instructions: one imports a name, the other calls what was imported. Here a name is looked up in a table of ours,
which has plain values and functions that only keep their arguments. A name outside the table is refused.
A pickle has no loops, so its size bounds the time. It bounds the memory too: a value takes some 20 times its bytes in
the file at most, and `MOST_CONTAINERS` limits lists and dicts, which take 60 bytes and more for one of the file.
"""

import re
import struct
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megapar.base.errors import CheckpointError

MOST_CONTAINERS = 1 << 26
"""Tuples, lists, dicts and objects in a pickle: an index of a million chunks has some 12 million."""
_LONGEST_NUMBER = 64  # bytes of an integer
_DEEPEST = 64  # lists in lists
MOST_VALUES = 1 << 20  # plain values in one object

_SMALL = (str, int, float, bool, type(None), bytes)


class PickleError(Exception):
    """A pickle that is cut, damaged, too large, or unlike what the writers of checkpoints write."""


class ForeignNameError(PickleError):
    """A name outside the table."""


class Left:
    """Stands in for an object that nobody needs. It takes any arguments and state, and keeps none of it."""

    __slots__ = ()


class Inert:
    """Stands in for an object whose state is read: `kind` is the name of its class without the module.

    `args` are what the class would have been called with, and `state` what its state would have been set to, mostly the
    dict of its fields.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...]):
        self.kind = kind
        self.args = args
        self.state: Any = None

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field, if the state is a dict of fields."""
        return self.state.get(field, default) if type(self.state) is dict else default


class Name:
    """A name of a pickle that may be called there: `make` gets the arguments and returns what the pickle gets."""

    __slots__ = ("make", "text")

    def __init__(self, text: str, make: Callable[[tuple[Any, ...]], Any]):
        self.text = text
        self.make = make


Table = Callable[[str], Any]
"""What a dotted name means: a Name, a plain value, or None if the name is outside the table."""


def left(text: str) -> Name:
    """The class `text`, whose objects are left out."""
    return Name(text, lambda _: Left())


def inert(text: str) -> Name:
    """The class `text`, whose objects keep their state."""
    kind = text.rpartition(".")[2]
    return Name(text, lambda args: Inert(kind, args))


def _first(args: tuple[Any, ...]) -> Any:
    return args[0] if args else ()


def _sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    """The arguments of torch.Size, unchecked: its only one is a tuple of integers."""
    sizes = args[0] if args else ()
    if type(sizes) is not tuple:
        raise PickleError("a torch.Size is made of something that is no tuple")
    return sizes


def _listed(args: tuple[Any, ...]) -> list[Any]:
    """A set, as the list of its members: so none of them is hashed."""
    if args and type(args[0]) not in (list, tuple):
        raise PickleError("a set is made of something that is no list")
    return list(args[0]) if args else []


def _encoded(args: tuple[Any, ...]) -> bytes:
    """The bytes that older protocols store as a text of Latin-1."""
    text, encoding = args
    if encoding not in ("latin1", "latin-1"):
        raise PickleError(f"holds bytes in the encoding {str(encoding)[:40]!r}")
    return bytes(text.encode("latin1"))


def _rebuilt(args: tuple[Any, ...]) -> Any:
    """An object that copyreg makes of a class, its first argument. The others are the class's arguments or a state."""
    if not args or type(args[0]) is not Name:
        raise PickleError("copyreg is called without a class")
    return args[0].make(args[1:])


DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PLAIN: Mapping[str, Any] = DTYPES | {
    "torch.Size": Name("torch.Size", _sizes),
    "torch.serialization._get_layout": Name("torch.serialization._get_layout", _first),
    "torch.device": Name("torch.device", _first),
    "collections.OrderedDict": Name("collections.OrderedDict", lambda _: {}),
    "collections.defaultdict": Name("collections.defaultdict", lambda _: {}),
    "builtins.set": Name("builtins.set", _listed),
    "builtins.frozenset": Name("builtins.frozenset", _listed),
    "builtins.list": Name("builtins.list", _listed),
    "builtins.dict": Name("builtins.dict", lambda _: {}),
    "argparse.Namespace": Name("argparse.Namespace", lambda _: Namespace()),
    "_codecs.encode": Name("_codecs.encode", _encoded),
    "copyreg._reconstructor": Name("copyreg._reconstructor", _rebuilt),
    "copyreg.__newobj__": Name("copyreg.__newobj__", _rebuilt),
}
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as protocols up to 2 spell them
_PATHS = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)Path")


def plain_names(text: str) -> Any:
    """The table of what is made of Python's and torch's small types: dtypes, sizes, containers, paths (left out)."""
    found = _PLAIN.get(text)
    if found is None and _PATHS.fullmatch(text):
        return left(text)
    return found


def unpickled(data: bytes, table: Table, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What the pickle `data` holds, with the names that `table` knows. Nothing is imported or called.

    Sets are lists, and an OrderedDict is a dict. `persistent` returns what a persistent id stands for.
    Raises ForeignNameError for a name outside the table, and PickleError for all else.
    """
    if sum(map(data.count, _CONTAINERS)) > MOST_CONTAINERS:  # an upper bound, for some of these bytes are operands
        raise PickleError(f"may hold more than {MOST_CONTAINERS:,} lists, dicts and objects")
    try:
        return _Machine(data, table, persistent).run()
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise PickleError(f"cut or damaged ({type(error).__name__})") from None


class _Machine:
    """The state of the stack machine. `marks` are the heights of the stack at each MARK."""

    def __init__(self, data: bytes, table: Table, persistent: Callable[[Any], Any] | None):
        self.data = data
        self.table = table
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Carry out the instructions up to STOP and return the last value of the stack.

        The instructions of which a large index consists are here, in the order of their number: a call for each of them
        would take most of the time. A number or text beyond the end needs no check: no STOP follows then.
        """
        data, stack, marks, memo, others = self.data, self.stack, self.marks, self.memo, _OTHERS
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x52 or code == 0x81:  # REDUCE, NEWOBJ
                args = stack.pop()
                stack[-1] = _called(stack[-1], args)
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code == 0x4D:  # BININT2
                stack.append(int.from_bytes(data[at : at + 2], "little"))
                at += 2
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                other = others.get(code)
                if other is None:
                    raise PickleError(f"has instruction {code:#04x}, which no writer of checkpoints uses")
                at = other(self, at)

    def marked(self) -> list[Any]:
        """Take what lies above the last mark off the stack."""
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def remember(self, index: int) -> None:
        """Keep the last value under a number. Writers count up, so a list suffices, and no number makes it large."""
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.memo[index] = self.stack[-1]

    def push_name(self, module: str, name: str) -> None:
        """Put what the table has for a name on the stack. Raises ForeignNameError if it has nothing."""
        text = f"{_RENAMED.get(module, module)}.{name}"
        found = self.table(text)
        if found is None:
            raise ForeignNameError(text[:200] if text.isprintable() else ascii(text[:200]))
        self.stack.append(found)


def _called(function: Any, args: Any) -> Any:
    """What calling a name of the table gives."""
    if type(function) is Name and type(args) is tuple:
        return function.make(args)
    raise PickleError("calls what is no name")


def _check_key(key: Any) -> None:
    """Refuse keys that take long to hash: nested tuples, and numbers chosen so that a dict finds them all equal."""
    kind = type(key)
    if kind is int and abs(key) >= (1 << 61) - 1:
        raise PickleError("has a dict with a key of more than 61 bits")
    if kind is tuple and all(type(part) in (*_SMALL, torch.dtype) for part in key):
        return
    if kind not in (*_SMALL, torch.dtype, Inert, Left):
        raise PickleError(f"has a dict with a key of type {kind.__name__}")


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is dict:
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str and type(key) is not Inert:
                _check_key(key)
            target[key] = items[i + 1]
    elif type(target) is not Left:
        raise PickleError("sets an item of what is no dict")


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is not Left:
        raise PickleError("appends to what is no list")


def _set_state(target: Any, state: Any) -> None:
    """Give an object its state. A dict's attributes, as those of a state dict of torch, are left out."""
    kind = type(target)
    if kind is Inert:
        target.state = state
    elif kind is Namespace:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise PickleError("has arguments without names")
        vars(target).update(state)
    elif kind not in (Left, dict):
        raise PickleError(f"sets the state of what is no object but a {kind.__name__}")


_Operation = Callable[[_Machine, int], int]  # gets the position after the instruction, and returns that of the next one


def _pushing(value: Callable[[], Any]) -> _Operation:
    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(value())
        return at

    return push


def _number(layout: str) -> _Operation:
    form = struct.Struct(layout)

    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(form.unpack_from(machine.data, at)[0])
        return at + form.size

    return push


def _sized(width: int, made: Callable[[bytes], Any]) -> _Operation:
    """An instruction with a length of `width` bytes, then bytes of which `made` makes the value."""

    def push(machine: _Machine, at: int) -> int:
        start = at + width
        stop = start + int.from_bytes(machine.data[at:start], "little")
        if stop > len(machine.data):
            raise PickleError("cut: a text goes beyond its end")
        machine.stack.append(made(machine.data[start:stop]))
        return stop

    return push


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    if len(data) > _LONGEST_NUMBER:
        raise PickleError(f"has an integer of {len(data):,} bytes")
    return int.from_bytes(data, "little", signed=True)


def _skipping(width: int) -> _Operation:
    return lambda _, at: at + width


def _putting(width: int) -> _Operation:
    def put(machine: _Machine, at: int) -> int:
        machine.remember(int.from_bytes(machine.data[at : at + width], "little"))
        return at + width

    return put


def _tuple_of_three(machine: _Machine, at: int) -> int:
    stack = machine.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    return at


def _marked_tuple(machine: _Machine, at: int) -> int:
    machine.stack.append(tuple(machine.marked()))
    return at


def _marked_set(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.marked())
    return at


def _append_one(machine: _Machine, at: int) -> int:
    value = machine.stack.pop()
    _append(machine.stack[-1], [value])
    return at


def _append_marked(machine: _Machine, at: int) -> int:
    items = machine.marked()
    _append(machine.stack[-1], items)
    return at


def _set_one(machine: _Machine, at: int) -> int:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _set_items(machine.stack[-1], [key, value])
    return at


def _set_marked(machine: _Machine, at: int) -> int:
    items = machine.marked()
    _set_items(machine.stack[-1], items)
    return at


def _build(machine: _Machine, at: int) -> int:
    state = machine.stack.pop()
    _set_state(machine.stack[-1], state)
    return at


def _new_with_keywords(machine: _Machine, at: int) -> int:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    if keywords != {} and type(made := _called(machine.stack[-1], args)) is not Left:
        raise PickleError(f"makes a {type(made).__name__} with keywords")
    machine.stack[-1] = _called(machine.stack[-1], args)
    return at


def _global(machine: _Machine, at: int) -> int:
    first = machine.data.index(b"\n", at, at + 1000)
    second = machine.data.index(b"\n", first + 1, first + 1000)
    machine.push_name(_text(machine.data[at:first]), _text(machine.data[first + 1 : second]))
    return second + 1


def _stack_global(machine: _Machine, at: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("has a name that is no text")
    machine.push_name(module, name)
    return at


def _persistent(machine: _Machine, at: int) -> int:
    if machine.persistent is None:
        raise PickleError("refers to a storage outside")
    machine.stack[-1] = machine.persistent(machine.stack[-1])
    return at


def _pop(machine: _Machine, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return at


def _pop_marked(machine: _Machine, at: int) -> int:
    machine.marked()
    return at


_OTHERS: Mapping[int, _Operation] = {
    0x80: _skipping(1),  # PROTO
    0x95: _skipping(8),  # FRAME
    ord("N"): _pushing(lambda: None),
    0x88: _pushing(lambda: True),
    0x89: _pushing(lambda: False),
    ord("]"): _pushing(list),
    0x8F: _pushing(list),  # EMPTY_SET
    ord("J"): _number("<i"),
    ord("G"): _number(">d"),
    0x8A: _sized(1, _long),
    0x8B: _sized(4, _long),
    0x8C: _sized(1, _text),
    ord("X"): _sized(4, _text),
    0x8D: _sized(8, _text),
    ord("U"): _sized(1, _text),  # texts of Python 2, and of torch's older writers
    ord("T"): _sized(4, _text),
    ord("C"): _sized(1, bytes),
    ord("B"): _sized(4, bytes),
    0x8E: _sized(8, bytes),
    0x96: _sized(8, bytes),  # BYTEARRAY8
    ord("q"): _putting(1),
    ord("r"): _putting(4),
    0x87: _tuple_of_three,
    ord("t"): _marked_tuple,
    0x91: _marked_set,  # FROZENSET
    ord("a"): _append_one,
    ord("e"): _append_marked,
    0x90: _append_marked,  # ADDITEMS
    ord("s"): _set_one,
    ord("u"): _set_marked,
    ord("b"): _build,
    0x92: _new_with_keywords,
    ord("c"): _global,
    0x93: _stack_global,
    ord("Q"): _persistent,
    ord("0"): _pop,
    ord("1"): _pop_marked,
}
_CONTAINERS = tuple(bytes([code]) for code in (0x29, *b"]}tRc", 0x81, 0x85, 0x86, 0x87, 0x8F, 0x91, 0x92, 0x93))


def plain(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A copy of `value` that consists of numbers, texts, None, lists and dicts. Tuples become lists.

    `convert` gets every object of another class and returns a plain value, or a Left, which is left out of its list or
    dict. Raises PickleError if lists lie too deep in each other, or the value is too large when written out.
    """
    count = 0

    def copied(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > _DEEPEST:
            raise PickleError(f"has lists or dicts more than {_DEEPEST} deep in each other")
        if count > MOST_VALUES:
            raise PickleError(f"has more than {MOST_VALUES:,} values")
        if isinstance(value, _SMALL):
            return value
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, dict):
            items = ((_plain_key(key), copied(item, depth + 1)) for key, item in value.items())
            return {
                key: item for key, item in items if not isinstance(key, (Inert, Left)) and not isinstance(item, Left)
            }
        if isinstance(value, (list, tuple)):
            return [item for item in (copied(item, depth + 1) for item in value) if not isinstance(item, Left)]
        return convert(value)

    return copied(value, 0)


def _plain_key(key: Any) -> Any:
    """A key with the names of dtypes instead of them."""
    if isinstance(key, tuple):
        return tuple(map(_plain_key, key))
    return str(key) if isinstance(key, torch.dtype) else key


def refused(path: object, error: PickleError) -> CheckpointError:
    """The error for people about a pickle in the file `path`."""
    if isinstance(error, ForeignNameError):
        return CheckpointError(f"{path}: refused, not unpickled: names {error}, which could run code")
    return CheckpointError(f"{path}: its pickle is refused: {error}")
