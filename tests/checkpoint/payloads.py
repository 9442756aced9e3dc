"""Pickles that do harm when an ordinary unpickler reads them, opcode by opcode."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

METADATA = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def text(value: str) -> bytes:
    """Pushes a string."""
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """Pushes what a module has under a name, which may have dots."""
    return text(module) + text(attribute) + pickle.STACK_GLOBAL


def whole(body: bytes) -> bytes:
    """A pickle of it."""
    return pickle.PROTO + b"\x04" + body + pickle.STOP


def called(function: bytes, *arguments: bytes) -> bytes:
    """Pushes what a function returns."""
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


# Each takes (module, name, argument) and has the function called with the argument, by another opcode.
HOW: dict[str, Callable[[str, str, bytes], bytes]] = {
    "reduce": lambda module, attribute, given: called(name(module, attribute), given),
    "global": lambda module, attribute, given: called(b"c" + f"{module}\n{attribute}\n".encode(), given),
    "instance": lambda module, attribute, given: pickle.MARK + given + b"i" + f"{module}\n{attribute}\n".encode(),
    "object": lambda module, attribute, given: pickle.MARK + name(module, attribute) + given + pickle.OBJ,
    "new": lambda module, attribute, given: name(module, attribute) + pickle.MARK + given + pickle.TUPLE + pickle.NEWOBJ,
    "memo": lambda module, attribute, given: name(module, attribute)
    + pickle.BINPUT + b"\x05" + pickle.POP + pickle.BINGET + b"\x05" + pickle.MARK + given + pickle.TUPLE + pickle.REDUCE,
}  # fmt: skip


def payloads(mark: str) -> Iterator[tuple[str, bytes]]:
    """(what it is, pickle); each would make the file `mark` if the pickle's names were found."""
    shell, code = text(f"touch {mark}"), text(f"open({mark!r}, 'w').close()")
    targets = [
        ("os", "system", shell),
        ("posix", "system", shell),
        ("builtins", "exec", code),
        ("builtins", "eval", code),
    ]
    targets += [
        ("subprocess", "getoutput", shell),
        ("pathlib", "os.system", shell),
        ("pathlib._local", "os.system", shell),
    ]
    targets += [(FILES, "os.system", shell), (METADATA, "os.system", shell), (FILES, "pickle.loads", shell)]
    targets += [
        ("torch", "serialization.os.system", shell),
        ("torch", "hub.os.system", shell),
        ("torch", "load", text(mark)),
    ]
    targets += [
        (FILES, "FileSystemWriter", text(mark)),
        ("pathlib", "Path.touch", called(name("pathlib", "Path"), text(mark))),
    ]
    targets += [
        ("pathlib", "io.open", text(mark)),
        ("torch.serialization", "os.system", shell),
        ("timeit", "timeit", code),
    ]
    for module, attribute, given in targets:
        yield f"{module}:{attribute}", whole(HOW["reduce"](module, attribute, given))
    for how, make in HOW.items():
        yield f"os.system by {how}", whole(make("os", "system", shell))
        yield f"pathlib's os.system by {how}", whole(make("pathlib", "os.system", shell))
    yield (
        "a member of a module's builtins",
        whole(called(called(name(FILES, "__builtins__.get"), text("eval")), text(f"open({mark!r}, 'w')"))),
    )
    yield (
        "an attribute of an allowed class",
        whole(called(called(name("builtins", "getattr"), name("torch", "Size"), text("__init__")))),
    )
    yield "getattr of a module", whole(called(name("builtins", "getattr"), name("os", "path"), text("os")))
    yield (
        "a name in the registry of extensions",
        whole(pickle.EXT1 + b"\x01" + pickle.MARK + shell + pickle.TUPLE + pickle.REDUCE),
    )
    yield "a persistent object", whole(shell + pickle.BINPERSID)
    layout = name("torch.serialization", "_get_layout")
    yield "a class that gets a state of its own", whole(
        name(METADATA, "Metadata") + pickle.NONE + pickle.EMPTY_DICT + text("__setstate__") + layout + pickle.SETITEM
        + pickle.TUPLE2 + pickle.BUILD + pickle.EMPTY_TUPLE + pickle.NEWOBJ + shell + pickle.BUILD
    )  # fmt: skip
    yield "a class that is given another attribute", whole(
        name(METADATA, "BytesStorageMetadata") + pickle.NONE + pickle.EMPTY_DICT + text("size") + text("x")
        + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD
    )  # fmt: skip


def broken() -> Iterator[tuple[str, bytes]]:
    """(what it is, pickle) of files that are none of DCP's, without any harm in them."""
    good = pickle.dumps(Metadata({"w": BytesStorageMetadata()}))
    yield "empty", b""
    yield "not a pickle", b"{}"
    yield "cut off", good[:-5]
    yield "another object", pickle.dumps({"w": 1})
    yield "no dictionary", pickle.dumps(Metadata(["w"]))  # type: ignore[arg-type]
    yield "another description", pickle.dumps(Metadata({"w": 3}))  # type: ignore[dict-item]
    yield "a long length", whole(pickle.BINBYTES8 + struct.pack("<Q", 2**60) + b"x")
    yield "deep", whole(pickle.EMPTY_LIST * 1 + (pickle.EMPTY_LIST * 100_000) + pickle.APPEND * 100_000)
    yield "nothing on the stack", whole(pickle.TUPLE2)


class AsPython3112(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Enumerations as Python 3.11.0 to 3.11.3 write them."""

    def reducer_override(self, item: Any) -> Any:
        """See `enum.Enum.__reduce_ex__` there."""
        return (getattr, (type(item), item.name)) if isinstance(item, Enum) else NotImplemented
