"""Reads the scalars of a TensorBoard event file, with the `tensorboard` package where it is installed."""

import struct
from collections import defaultdict

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None


def read_scalars(path):
    """{tag: [(step, value), …]}"""
    if EventAccumulator is None:
        return parse(path.read_bytes())
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def parse(data):
    scalars = defaultdict(list)
    while data:
        (size,) = struct.unpack_from("<Q", data)
        record, data = data[12 : 12 + size], data[16 + size :]
        event = dict(fields(record))
        if 5 not in event:
            continue
        for _, message in fields(event[5]):
            value = dict(fields(message))
            scalars[value[1].decode()].append((event.get(2, 0), struct.unpack("<f", value[2])[0]))
    return scalars


def fields(message):
    """(number, value) of every field of a protocol buffer, undecoded."""
    while message:
        key, message = varint(message)
        if key & 7 == 0:
            value, message = varint(message)
        else:
            size, message = {1: (8, message), 5: (4, message)}.get(key & 7) or varint(message)
            value, message = message[:size], message[size:]
        yield key >> 3, value


def varint(data):
    value = shift = 0
    for used, byte in enumerate(data, 1):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[used:]
    raise ValueError("truncated")
