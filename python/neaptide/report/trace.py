"""trace.json of a run: spans, instants and counters by track, and how they become few enough to draw.

The file has one event a line (neap/trace/chrome_json.h), so it is read line by line: memory holds numbers, not text.
Times are milliseconds since the first event. Nothing is left out in silence: whoever draws fewer things than there are
says how many there were.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from neaptide._command import CommandError

FIRST_LINE = '{"displayTimeUnit":"ms","traceEvents":['
LAST_LINE = "]}"


@dataclass
class Spans:
    """Spans of one track, in the order of their begins."""

    begin: np.ndarray
    end: np.ndarray
    name: np.ndarray  # index into Trace.names
    bytes: np.ndarray  # -1: has none
    step: np.ndarray  # -1: has none

    def __len__(self):
        return len(self.begin)

    def of(self, chosen):
        return Spans(*(getattr(self, key)[chosen] for key in ("begin", "end", "name", "bytes", "step")))


@dataclass
class Blocks:
    """What is drawn of a track: spans, or neighbours that are drawn as one."""

    begin: np.ndarray
    end: np.ndarray
    count: np.ndarray  # spans in it
    busy: np.ndarray  # ms in which one of them ran
    name: list  # of the span, or of the one that took most of the time


@dataclass
class Window:
    label: str
    begin: float
    end: float


@dataclass
class Trace:
    names: list = field(default_factory=list)
    spans: dict = field(default_factory=dict)  # track "group/lane" → Spans
    instants: dict = field(default_factory=dict)  # track → [(ms, name)]
    counters: dict = field(default_factory=dict)  # (track, series) → (times in ms, values)
    dropped: int = 0  # events that the recorder had no room for

    @staticmethod
    def read(path):
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                return Reader(path).read(lines)
        except OSError as error:
            raise CommandError(f"{path}: cannot be read; {error}") from error

    def memory(self):
        """(track, times, bytes) of each device that has a curve."""
        found = [(key, curve) for key, curve in self.counters.items() if key[1] == "bytes in use"]
        return [(track, *curve) for (track, _), curve in found]

    def among_ranks(self):
        return any(track.startswith("comm/") for track in (*self.spans, *self.instants))

    def extent(self):
        ends = [spans.end.max() for spans in self.spans.values() if len(spans)]
        begins = [spans.begin.min() for spans in self.spans.values() if len(spans)]
        return (float(min(begins)), float(max(ends))) if ends else (0.0, 0.0)

    def steps(self):
        """A window for each step, from its first forward to the next one's, the last one to the end of the trace."""
        host = self.spans.get("trainer/host")
        if host is None:
            return []
        first = {}
        for begin, step in zip(host.begin.tolist(), host.step.tolist(), strict=True):
            first.setdefault(step, begin)
        numbers = sorted(step for step in first if step >= 0)
        ends = [first[step] for step in numbers[1:]] + [self.extent()[1]]
        return [Window(f"step {n}", first[n], end) for n, end in zip(numbers, ends, strict=True)]


class Reader:
    """Collects events of one file."""

    def __init__(self, path):
        self.path = path
        self.trace = Trace()
        self.groups, self.lanes, self.ids = {}, {}, {}
        self.rows = defaultdict(list)
        self.points = defaultdict(lambda: ([], []))

    def read(self, lines):
        first = next(lines, "").strip()
        if first != FIRST_LINE:
            raise CommandError(f"{self.path}: expected a trace of neap train; it begins with {first[:40]!r}")
        number = 1
        for number, line in enumerate(lines, 2):
            text = line.rstrip("\n")
            if text == LAST_LINE:
                return self.finish()
            if text == line:
                break
            self.take(number, text.removesuffix(","))
        raise CommandError(f"{self.path}: truncated in line {number}: expected {LAST_LINE!r} at its end")

    def take(self, number, text):
        try:
            event = json.loads(text)
            phase = event["ph"]
            if phase == "M":
                self.name(event)
            elif phase == "X":
                self.span(event)
            elif phase == "i":
                self.instant(event)
            elif phase == "C":
                self.point(event)
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{self.path}:{number}: expected an event of a trace; found {text[:60]!r}") from error

    def name(self, event):
        if event["name"] == "process_name":
            self.groups[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            self.lanes[event["tid"]] = f"{self.groups[event['pid']]}/{event['args']['name']}"

    def span(self, event):
        args = event.get("args", {})
        name = self.ids.setdefault(event["name"], len(self.ids))
        begin = event["ts"]
        row = (begin, begin + event["dur"], name, args.get("bytes", -1), args.get("step", -1))
        self.rows[self.lanes[event["tid"]]].append(row)

    def instant(self, event):
        track = self.lanes[event["tid"]]
        if track == "trace/recorder":
            self.trace.dropped = event["args"]["count"]
        else:
            self.trace.instants.setdefault(track, []).append((event["ts"] * 1e-3, event["name"]))

    def point(self, event):
        times, values = self.points[self.lanes[event["tid"]], event["name"]]
        times.append(event["ts"] * 1e-3)
        values.append(float(event["args"]["value"]))

    def finish(self):
        trace = self.trace
        trace.names = list(self.ids)
        for track, rows in self.rows.items():
            table = np.array(rows, dtype=np.float64)
            table = table[np.argsort(table[:, 0], kind="stable")]
            numbers = table[:, 2:].astype(np.int64).T
            trace.spans[track] = Spans(table[:, 0] * 1e-3, table[:, 1] * 1e-3, *numbers)
        for key, (times, values) in self.points.items():
            trace.counters[key] = (np.array(times), np.array(values))
        # A host's clock began when its machine did.
        firsts = [spans.begin[0] for spans in trace.spans.values()]
        firsts += [times.min() for times, _ in trace.counters.values()]
        firsts += [at for marks in trace.instants.values() for at, _ in marks]
        start = min(firsts, default=0.0)
        for spans in trace.spans.values():
            spans.begin -= start
            spans.end -= start
        trace.counters = {key: (times - start, values) for key, (times, values) in trace.counters.items()}
        trace.instants = {track: [(at - start, name) for at, name in marks] for track, marks in trace.instants.items()}
        return trace


def firsts_of_blocks(spans, grain):
    """Index of the first span of each block. Spans shorter than `grain` ms that begin within the same `grain` ms are
    one block; none are when it is None."""
    if grain is None or len(spans) == 0:
        return np.arange(len(spans))
    cell = np.floor(spans.begin / grain).astype(np.int64)
    long = spans.end - spans.begin >= grain
    return np.flatnonzero(np.concatenate([[True], (cell[1:] != cell[:-1]) | long[1:] | long[:-1]]))


def longest_names(spans, block, lengths):
    """The name, by its number, that takes most of the time of each block."""
    key = block * (spans.name.max() + 1) + spans.name
    keys, where = np.unique(key, return_inverse=True)
    total = np.bincount(where, weights=lengths)
    of = keys // (spans.name.max() + 1)
    order = np.lexsort((total, of))  # the last one of each block has the most
    last = np.flatnonzero(np.append(of[order][1:] != of[order][:-1], True))
    return keys[order][last] % (spans.name.max() + 1)


def merge(spans, names, grain):
    """The blocks of a track, as firsts_of_blocks() has them."""
    if len(spans) == 0:
        return Blocks(spans.begin, spans.end, spans.name, spans.begin, [])
    first = firsts_of_blocks(spans, grain)
    lengths = spans.end - spans.begin
    # What of a span no earlier one of its block covers, for spans of a track may nest.
    reach = np.concatenate([[-np.inf], np.maximum.accumulate(spans.end)[:-1]])
    reach[first] = -np.inf
    alone = np.maximum(0, spans.end - np.maximum(spans.begin, reach))
    count = np.diff(np.append(first, len(spans)))
    label = longest_names(spans, np.repeat(np.arange(len(first)), count), lengths)
    end = np.maximum.reduceat(spans.end, first)
    return Blocks(spans.begin[first], end, count, np.add.reduceat(alone, first), [names[name] for name in label])


def merged(tracks, names, window, most):
    """Blocks of each track within the window, about `most` together, and the grain that it took (None: none)."""
    inside = {
        track: spans.of((spans.end > window.begin) & (spans.begin < window.end)) for track, spans in tracks.items()
    }
    grain = None
    while sum(len(firsts_of_blocks(spans, grain)) for spans in inside.values()) > most:
        grain = (window.end - window.begin) / 8000 if grain is None else grain * 2
    return {track: merge(spans, names, grain) for track, spans in inside.items()}, grain


def thinned(times, values, most):
    """A stepwise curve of at most about `most` points: of each part the first, lowest, highest and last."""
    if len(times) <= most:
        return times, values
    edges = np.linspace(0, len(times), most // 4 + 1).astype(np.int64)
    kept = set()
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if a < b:
            kept |= {a, a + int(values[a:b].argmin()), a + int(values[a:b].argmax()), b - 1}
    chosen = np.array(sorted(kept))
    return times[chosen], values[chosen]
