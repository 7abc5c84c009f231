"""Changes of one file, each drawn from a seed: of its bytes, or of a number, list or name where its format has one."""

from __future__ import annotations

import gzip
import json
import math
import os
import sqlite3
import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

from disco_hlo.hlo import proto

NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 255, 4096, 10**6, 10**9, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**60, 2**62,
    2**63 - 1, -(2**63), 2**64, 10**30,
)  # fmt: skip
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-300, 1e9, 1e18, 1e19, 1e200, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "", "x", "0", "add", "tuple", "while", "fusion", "cpu", "gpu", "g0", "n1", "b0.done", "\u0000", "é" * 5000,
)  # fmt: skip
Mutation = Callable[[Random, bytes], bytes]


# Bytes --------------------------------------------------------------------------------------------


def of_bytes(random: Random, data: bytes) -> bytes:
    """Bits flipped, a piece cut out, doubled, cleared or put elsewhere, or the end missing."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        if not changed:
            return bytes(changed)
        start = random.randrange(len(changed))
        end = min(len(changed), start + random.choice((1, 2, 4, 16, 256)))
        draw = random.randrange(6)
        if draw == 0:
            changed[start] ^= 1 << random.randrange(8)
        elif draw == 1:
            del changed[start:end]
        elif draw == 2:
            changed[start:start] = changed[start:end]
        elif draw == 3:
            changed[start:end] = bytes(end - start)
        elif draw == 4:
            changed[start:end] = random.randbytes(end - start)
        elif random.random() < 0.3:
            del changed[start:]
    return bytes(changed)


def _odd(random: Random, value: Any) -> Any:
    """Another value in the place of one: mostly of its type, out of range or of another one's."""
    draw = random.random()
    if isinstance(value, bool):
        return not value if draw < 0.5 else random.choice((0, 1, None, "true"))
    if isinstance(value, int) and draw < 0.8:
        return random.choice((*NUMBERS, value + 1, value - 1, -value, 2 * value))
    if isinstance(value, float) and draw < 0.8:
        return random.choice((*FLOATS, -value, value * 1e9))
    if isinstance(value, str) and draw < 0.6:
        return random.choice((*TEXTS, value + "0", value[:-1]))
    return random.choice((None, True, *NUMBERS, *FLOATS, *TEXTS, [], {}, [value], {"x": value}))


# JSON ---------------------------------------------------------------------------------------------


def of_json(random: Random, data: bytes) -> bytes:
    """One to three values of a JSON text changed."""
    body = json.loads(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        body = _json_changed(random, body)
    return json.dumps(body).encode()


def _json_changed(random: Random, value: Any) -> Any:
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.05:
        return _odd(random, value)
    if isinstance(value, list):
        return _list_changed(random, value)
    name = random.choice([*value])
    draw = random.random()
    changed = dict(value)
    if draw < 0.06:
        del changed[name]
    elif draw < 0.1:
        changed[random.choice(TEXTS)] = changed[name]
    else:
        changed[name] = _json_changed(random, changed[name])
    return changed


def _list_changed(random: Random, value: list[Any]) -> list[Any]:
    place, draw, changed = random.randrange(len(value)), random.random(), list(value)
    if draw < 0.08:
        del changed[place]
    elif draw < 0.16:
        changed.insert(random.randrange(len(changed)), changed[place])
    elif draw < 0.24:
        other = random.randrange(len(value))
        changed[place], changed[other] = changed[other], changed[place]
    elif draw < 0.28:
        del changed[place:]
    elif draw < 0.32:
        changed *= 2
    else:
        changed[place] = _json_changed(random, changed[place])
    return changed


# Modules ------------------------------------------------------------------------------------------

_DEEPER = 0.85


def of_module(random: Random, data: bytes) -> bytes:
    """One to three fields of an HLO module changed."""
    module = proto.parse(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _message_changed(random, module)
    return proto.serialize(module)


def _message_changed(random: Random, message: Any) -> None:
    fields = message.ListFields()
    if not fields:
        return None
    # The instructions are most of a module, and what is left of it is what else is to be changed.
    field, value = random.choice(fields)
    if field.name == "schedule":
        return _schedule_changed(random, value)
    is_list = not isinstance(value, (int, float, str, bytes)) and not hasattr(value, "ListFields")
    if not is_list:
        if hasattr(value, "ListFields"):
            return _message_changed(random, value)
        return _set(random, message, field.name, value)
    if hasattr(value, "add"):
        if random.random() < _DEEPER:
            return _message_changed(random, random.choice(value))
        return _messages_changed(random, value)
    return _numbers_changed(random, value)


def _set(random: Random, message: Any, name: str, value: Any) -> None:
    odd = _odd(random, value)
    if name in ("opcode", "fusion_kind") and random.random() < 0.8:
        odd = random.choice(
            ("add", "tuple", "while", "fusion", "call", "dot", "reduce", "parameter", "constant", "all-reduce", "slice",
             "bitcast", "get-tuple-element", "concatenate", "custom-call", "dynamic-update-slice", "scatter",
             "transpose", "copy", "conditional", "convolution", "all-reduce-start", "kLoop",
             "kInput", "kCustom", "nothing")
        )  # fmt: skip
    if isinstance(value, bytes) and random.random() < 0.8:
        odd = of_bytes(random, value)
    try:
        setattr(message, name, odd)
    except (TypeError, ValueError):  # the schema has no such value there
        message.ClearField(name)


def _messages_changed(random: Random, values: Any) -> None:
    place, draw = random.randrange(len(values)), random.random()
    if draw < 0.3:
        del values[place]
    elif draw < 0.6:
        values.add().CopyFrom(values[place])
    else:
        copied = type(values[place])()
        copied.CopyFrom(values[place])
        values[place].CopyFrom(values[random.randrange(len(values))])
        if draw < 0.8:
            values[random.randrange(len(values))].CopyFrom(copied)


def _numbers_changed(random: Random, values: Any) -> None:
    place, draw = random.randrange(len(values)), random.random()
    if draw < 0.15:
        del values[place]
        return
    if draw < 0.3:
        values.append(values[place])
        return
    odd = values[random.randrange(len(values))] if draw < 0.45 else _odd(random, values[place])
    try:
        values[place] = odd
    except (TypeError, ValueError):
        del values[place:]


def _schedule_changed(random: Random, schedule: Any) -> None:
    number = random.choice([*schedule.sequences])
    if random.random() < 0.2:
        del schedule.sequences[number]
    else:
        _numbers_changed(random, schedule.sequences[number].instruction_ids)


# Weights ------------------------------------------------------------------------------------------


def of_weights(random: Random, data: bytes) -> bytes:
    """The head of a safetensors file changed, ours inside it, or a number of a tensor."""
    length = int.from_bytes(data[:8], "little")
    head, tensors = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    draw = random.random()
    if draw < 0.6:
        own = json.loads(head["__metadata__"]["disco_hlo"])
        part = random.choice(("architecture", "device", "architecture", "device", "about", ""))
        own = {**own, part: _json_changed(random, own[part])} if part else _json_changed(random, own)
        head["__metadata__"]["disco_hlo"] = json.dumps(own)
    elif draw < 0.85:
        head = _json_changed(random, head)
    else:
        start = 4 * random.randrange(len(tensors) // 4)
        tensors[start : start + 4] = random.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", random.randbytes(4)))
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + bytes(tensors)


# SQLite -------------------------------------------------------------------------------------------


def of_sqlite(random: Random, data: bytes) -> bytes:
    """Values, tables or the version of an SQLite file changed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        with open(path, "wb") as file:
            file.write(data)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            for _ in range(random.choice((1, 1, 2, 3))):
                _table_changed(random, connection)
            connection.execute("PRAGMA journal_mode = DELETE")
        finally:
            connection.close()
        with open(path, "rb") as file:
            return file.read()


def _table_changed(random: Random, connection: sqlite3.Connection) -> None:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if not tables:
        return
    table = random.choice(tables)
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    column, draw = random.choice(columns), random.random()
    values = (*(n for n in NUMBERS if -(2**63) <= n < 2**63), *FLOATS, *TEXTS, b"\xff\xfe\0", None)
    statements: list[tuple[str, tuple[Any, ...]]]
    if draw < 0.75:
        one = f"SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET ?"
        rows = f"UPDATE {table} SET {column} = ? WHERE rowid IN ({one})"
        statements = [(rows, (random.choice(values), random.randrange(4)))]
    elif draw < 0.8:
        statements = [(f"UPDATE {table} SET {column} = ?", (random.choice(values),))]
    elif draw < 0.85:
        statements = [(f"DROP TABLE {table}", ())]
    elif draw < 0.9:
        statements = [(f"ALTER TABLE {table} RENAME COLUMN {column} TO other", ())]
    elif draw < 0.95:
        name = random.choice(("user_version", "application_id"))
        statements = [(f"PRAGMA {name} = {random.choice((0, 1, 2, 3, 7, -1, 2**31 - 1))}", ())]
    else:
        statements = [(f"DELETE FROM {table}", ())]
    for statement, arguments in statements:
        try:
            connection.execute(statement, arguments)
        except sqlite3.Error:  # a rule of the table forbids it
            continue


# Gzip ---------------------------------------------------------------------------------------------


def inside_gzip(change: Mutation) -> Mutation:
    """A change of what is packed, mostly; else of the packed bytes."""

    def changed(random: Random, data: bytes) -> bytes:
        if random.random() < 0.15:
            return of_bytes(random, data)
        return gzip.compress(change(random, gzip.decompress(data)), 1, mtime=0)

    return changed


def mostly(change: Mutation) -> Mutation:
    """A change by format in three cases of four, of the bytes in the fourth."""

    def changed(random: Random, data: bytes) -> bytes:
        return of_bytes(random, data) if random.random() < 0.25 else change(random, data)

    return changed
