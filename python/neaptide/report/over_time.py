"""Figures over time, from the trace of a run: memory, and what ran when on which stream."""

import numpy as np
import plotly.graph_objects as go

from neaptide.report.drawing import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    MOST_POINTS,
    PURPLE,
    RED,
    SLATE,
    TEAL,
    Drawing,
    figure,
    mark_capacity,
)
from neaptide.report.trace import Window, merged, thinned
from neaptide.report.units import bytes_text, ms_text, unit_of

MOST_BLOCKS = 3500  # of a timeline
MOST_WINDOWS = 6  # steps with a view of their own


def constant_parts(run):
    """Bytes of parameters and of optimizer state where both are the same all the time; else None, and why not."""
    parts = [step["peak_parts"] for step in run.steps if step.get("peak_parts")]
    if not parts or len(run.trace.memory()) > 1:
        return None, ""
    sets = {(part["parameters"], part["optimizer"]) for part in parts}
    converted = run.config["train"].get("dtype", "float32") != "float32"
    if len(sets) == 1 and not run.trace.among_ranks() and not converted:
        return next(iter(sets)), ""
    why = "Parameters come and go within a step here, as they lie in pieces or are converted: this is the sum of kinds."
    return None, why


def area(x, y, label, colour, text):
    return go.Scatter(
        x=x,
        y=y,
        name=label,
        mode="lines",
        line={"shape": "hv", "width": 0.8, "color": colour},
        fill="tonexty",
        customdata=text,
        hovertemplate=f"%{{x:.3f}} ms: %{{customdata}}<extra>{label}</extra>",
    )


def bands(total, constant):
    """(upper edge, label, colour) of each kind, from the bottom."""
    if constant is None:
        return [(total, "all kinds", TEAL)]
    return [
        (np.minimum(total, constant[0]), "parameters", SLATE),
        (np.minimum(total, sum(constant)), "optimizer state", PURPLE),
        (total, "gradients, activations, workspace", TEAL),
    ]


def within(times, values, window):
    """The part of a stepwise curve that lies in a window, beginning with what held there."""
    inside = (times >= window.begin) & (times <= window.end)
    before = np.flatnonzero(times < window.begin)[-1:]
    return (
        np.concatenate([np.full(len(before), window.begin), times[inside]]),
        np.concatenate([values[before], values[inside]]),
    )


def memory(run, window):
    """Bytes on the device over time, by kind where a kind keeps its size, and what lies on the host meanwhile."""
    fig = figure(420, hovermode="x unified")
    constant, why = constant_parts(run)
    notes = [why] if why else []
    curves = run.trace.memory()
    peak = max(values.max() for _, _, values in curves)
    unit, size = unit_of(peak)
    end = window.begin
    for track, times, values in curves:
        changes, sizes = within(times, values, window)
        x, total = thinned(changes, sizes, MOST_POINTS)
        if len(x) < len(changes):
            notes.append(
                f"{track}: {len(changes):,} changes, drawn as {len(x):,} points: of each few neighbours the first, the "
                "lowest, the highest and the last."
            )
        end = max([end, *x[-1:]])
        x, total = x.tolist(), total.astype(np.int64)
        fig.add_trace(go.Scatter(x=x, y=[0] * len(x), mode="lines", line_width=0, hoverinfo="skip", showlegend=False))
        below = np.zeros_like(total)
        for upper, label, colour in bands(total, constant):
            text = [bytes_text(int(count)) for count in upper - below]
            fig.add_trace(area(x, (upper / size).tolist(), label, colour, text))
            below = upper
    add_host_bytes(fig, run, window, size)
    capacity = (run.summary or {}).get("capacity_bytes")
    if capacity and capacity < 3 * peak:
        mark_capacity(fig, capacity, size)
    steps = [step for step in run.trace.steps() if step.begin < window.end and step.end > window.begin]
    if len(steps) > 1:
        mark_steps(fig, steps)
    if len(steps) == 1:
        end = end_of_backward(run, window, end)
    margin = 0.02 * (end - window.begin)
    fig.update_xaxes(
        title_text="ms (device's clock, when the host submits the work)", range=[window.begin - margin, end + margin]
    )
    fig.update_yaxes(title_text=f"bytes in use ({unit})", rangemode="tozero")
    return Drawing(fig, notes)


def end_of_backward(run, window, otherwise):
    """When the host has submitted forward and backward. For the rest of a step it waits, and memory stays as it is."""
    host = run.trace.spans["trainer/host"]
    inside = (host.begin >= window.begin) & (host.begin < window.end)
    ends = [
        end
        for end, name in zip(host.end[inside], host.name[inside], strict=True)
        if run.trace.names[name] == "backward"
    ]
    return float(max(ends, default=otherwise))


def add_host_bytes(fig, run, whole, size):
    """What is away, as the engine counts it when a unit's forward ends; a gap between the steps."""
    curve = run.trace.counters.get(("offload/bytes", "away"))
    if curve is None:
        return
    x, y = [], []
    for window in run.trace.steps():
        inside = (curve[0] >= max(window.begin, whole.begin)) & (curve[0] < min(window.end, whole.end))
        x += [*curve[0][inside].tolist(), None]
        y += [*(curve[1][inside] / size).tolist(), None]
    text = [None if value is None else bytes_text(int(value * size)) for value in y]
    line = {"color": BLUE, "width": 2, "shape": "hv"}
    hover = "%{customdata}<extra>left for the host (forward)</extra>"
    fig.add_scatter(
        x=x, y=y, mode="lines", name="left for the host (forward)", line=line, customdata=text, hovertemplate=hover
    )


def mark_steps(fig, windows):
    for i, window in enumerate(windows):
        if i % 2 == 0 and len(windows) <= 40:
            fig.add_vrect(x0=window.begin, x1=window.end, fillcolor=GREY, opacity=0.12, line_width=0, layer="below")
        if len(windows) <= 16:
            fig.add_annotation(
                x=(window.begin + window.end) / 2,
                y=1,
                yref="paper",
                yanchor="bottom",
                showarrow=False,
                text=window.label if len(windows) <= 8 else window.label.split()[1],
                font_size=11,
            )


KINDS = {  # of a lane: label and colour
    "compute": ("compute", BLUE),
    "wait": ("compute waits", RED),
    "copies out": ("copies out", TEAL),
    "copies in": ("copies in", GREEN),
    "copies between devices": ("copies between devices", PURPLE),
    "collective": ("collectives", PURPLE),
    "stream": ("a copy stream waits", GREY),
    "second runs": ("recomputation (host)", AMBER),
    "unit": ("a unit's forward (host)", SLATE),
    "host": ("host", GREY),
}
ORDER = list(KINDS)


def kind_of(track):
    group, _, lane = track.partition("/")
    if lane in KINDS:
        return lane
    if group == "comm":
        return "collective"
    if lane.startswith("stream "):
        return "stream"
    return "unit" if group == "offload" else "host"


def clock(run):
    simulated = any(kind_of(track) == "compute" for track in run.trace.spans)
    return "ms (device's clock)" if simulated else "ms (host's clock)"


def lanes(run):
    """(label of the lane, kind, spans) of every track, waits of compute apart from its work, from the top down."""
    groups = {track.split("/")[0] for track in run.trace.spans if kind_of(track) == "compute"}
    found = []
    for track in sorted(run.trace.spans, key=lambda track: (ORDER.index(kind_of(track)), track)):
        group, _, lane = track.partition("/")
        label = lane if len(groups) == 1 and group in groups and lane != "host" else track.replace("/", " ")
        spans = run.trace.spans[track]
        if kind_of(track) != "compute":
            found.append((label, kind_of(track), spans))
            continue
        waits = np.array([run.trace.names[name] == "wait" for name in spans.name], dtype=bool)
        found.append((label, "compute", spans.of(~waits)))
        if waits.any():
            found.append((label, "wait", spans.of(waits)))
    return found


def windows(run):
    """The whole run, and some of its steps: first, second and last, the slowest, and that with most late reloads."""
    whole = Window("whole run", *run.trace.extent())
    steps = run.trace.steps()
    if len(steps) > MOST_WINDOWS:
        by_label = {f"step {step['step']}": step for step in run.steps}
        known = [window for window in steps if window.label in by_label]
        chosen = [steps[0], steps[1], steps[-1]]
        if known:
            chosen.append(max(known, key=lambda w: by_label[w.label].get("device_step_ms") or w.end - w.begin))
            chosen.append(max(known, key=lambda w: by_label[w.label]["late_reloads"]))
            chosen.append(max(known, key=lambda w: by_label[w.label]["exposed_wait_ms"]))
        steps = sorted({window.begin: window for window in chosen}.values(), key=lambda window: window.begin)
    return [whole, *steps]


def block_texts(blocks, label):
    out = []
    rows = zip(blocks.begin, blocks.end, blocks.count, blocks.busy, blocks.name, strict=True)
    for begin, end, count, busy, name in rows:
        length = end - begin
        if count == 1:
            out.append(f"<b>{name}</b><br>{label}: {length:.4g} ms from {begin:.3f} ms")
        else:
            share = busy / length if length > 0 else 1
            out.append(
                f"<b>{count} spans, busy {share:.1%}</b>, most of it {name}<br>"
                f"{label}: {length:.4g} ms from {begin:.3f} ms"
            )
    return out


def timeline(run, window):
    """What ran when, lane by lane, within a window."""
    found = lanes(run)
    tracks = {(label, kind): spans for label, kind, spans in found}
    blocks, grain = merged(tracks, run.trace.names, window, MOST_BLOCKS)
    names = list(dict.fromkeys(label for label, _, _ in found))
    fig = figure(120 + 38 * max(4, len(names) + 1), barmode="overlay", hovermode="closest", bargap=0.3)
    for (label, kind), block in blocks.items():
        title, colour = KINDS[kind]
        fig.add_bar(
            orientation="h",
            y=[label] * len(block.begin),
            base=block.begin.round(6).tolist(),
            x=(block.end - block.begin).round(6).tolist(),
            marker={"color": colour, "line_width": 0},
            width=0.35 if kind == "wait" else 0.7,  # within the lane of compute, so that both are seen
            name=title,
            customdata=block_texts(block, label),
            hovertemplate="%{customdata}<extra></extra>",
            legendgroup=kind,
            showlegend=False,
        )
    for kind in dict.fromkeys(kind for _, kind, _ in found):
        title, colour = KINDS[kind]
        # In the legend a swatch for each kind, whichever lanes have something in this window.
        fig.add_bar(x=[None], y=[names[0]], name=title, marker_color=colour, legendgroup=kind, orientation="h")
    add_instants(fig, run, window, names)
    fig.update_xaxes(title_text=clock(run), range=[window.begin, window.end])
    fig.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    drawn = sum(len(block.begin) for block in blocks.values())
    total = int(sum(block.count.sum() for block in blocks.values()))
    if grain is None:
        return Drawing(fig, [f"{window.label}: every one of its {total:,} spans."])
    note = (
        f"{window.label}: {total:,} spans, drawn as {drawn:,} blocks: those of a lane that are shorter than "
        f"{ms_text_fine(grain)} and begin within the same {ms_text_fine(grain)} are one, and it says how many they are "
        "and how busy."
    )
    return Drawing(fig, [note])


def ms_text_fine(value):
    return f"{value * 1000:.3g} µs" if value < 1 else ms_text(value)


def add_instants(fig, run, window, names):
    marks = {"offload/late reloads": ("late reloads", AMBER, "x")}
    marks |= {
        track: (track.replace("/", " ") + " (host)", PURPLE, "diamond")
        for track in run.trace.instants
        if "comm/" in track
    }
    for track, (label, colour, symbol) in marks.items():
        inside = [(at, name) for at, name in run.trace.instants.get(track, []) if window.begin <= at <= window.end]
        if not inside:
            continue
        if label not in names:
            names.append(label)
        fig.add_scatter(
            x=[at for at, _ in inside],
            y=[label] * len(inside),
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": symbol, "size": 8},
            customdata=[name for _, name in inside],
            hovertemplate="%{customdata}<br>" + label + ", at %{x:.3f} ms<extra></extra>",
        )
