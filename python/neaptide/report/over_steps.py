"""Figures over the steps of a run, from metrics.jsonl."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

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
    coloured,
    figure,
    mark_capacity,
)
from neaptide.report.trace import thinned
from neaptide.report.units import bytes_text, unit_of

PARTS = {  # of peak_parts, from the bottom of the stack
    "parameters": ("parameters", SLATE),
    "optimizer": ("optimizer state", PURPLE),
    "gradients": ("gradients", AMBER),
    "activations": ("activations", TEAL),
    "workspace": ("workspace", RED),
}
MOST_BARS = 240  # of a row of bars


def values_of(steps, key):
    return [step.get(key) for step in steps]


def any_value(steps, key):
    return any(step.get(key) is not None for step in steps)


def step_axis(fig, steps, **where):
    fig.update_xaxes(title_text="step", tickformat="d", **where)
    if len(steps) <= 12:
        fig.update_xaxes(dtick=1)


def groups_of(steps):
    """Neighbours that share a bar, at most MOST_BARS groups of them, and what to say about it."""
    size = max(1, -(-len(steps) // MOST_BARS))
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    note = f"{len(steps):,} steps, drawn as {len(groups)} bars: of each {size} neighbours the largest value."
    return groups, [note] if size > 1 else []


def few(steps, key):
    """Steps to draw as bars: all of them, or of each few neighbours the one with the largest value of `key`."""
    groups, notes = groups_of(steps)
    return [max(group, key=lambda step: step[key]) for group in groups], notes


def few_points(x, y):
    """A curve over steps, of which every peak and dip stays."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if len(known) <= MOST_POINTS:
        return [a for a, _ in known], [b for _, b in known], []
    xs, ys = thinned(np.array([a for a, _ in known]), np.array([b for _, b in known]), MOST_POINTS)
    note = f"{len(known)} steps, drawn as {len(xs)} points: of each few neighbours the lowest and the highest value."
    return xs.tolist(), ys.tolist(), [note]


def training(run):
    """Loss, gradient norm, tokens per second and learning rate over the steps."""
    curves = [
        ("loss", "loss", BLUE, ".4f"),
        ("gradient norm", "grad_norm", AMBER, ".4f"),
        ("tokens per second", "tokens_per_s", GREEN, ",.0f"),
        ("learning rate", "lr", SLATE, ".3g"),
    ]
    fig = make_subplots(
        rows=2,
        cols=2,
        shared_xaxes=True,
        vertical_spacing=0.14,
        horizontal_spacing=0.09,
        subplot_titles=[curve[0] for curve in curves],
    )
    x, notes = values_of(run.steps, "step"), []
    mode = "lines+markers" if len(x) <= 60 else "lines"
    for i, (title, key, colour, form) in enumerate(curves):
        xs, ys, said = few_points(x, values_of(run.steps, key))
        notes = said or notes
        hover = f"step %{{x}}: %{{y:{form}}}<extra>{title}</extra>"
        line = go.Scatter(x=xs, y=ys, name=title, mode=mode, line_color=colour, hovertemplate=hover, showlegend=False)
        fig.add_trace(line, row=i // 2 + 1, col=i % 2 + 1)
    if any_value(run.steps, "eval_loss"):
        xs, ys, _ = few_points(x, values_of(run.steps, "eval_loss"))
        marker = {"symbol": "diamond", "size": 8}
        hover = "step %{x}: %{y:.4f}<extra>held-out loss</extra>"
        held_out = go.Scatter(
            x=xs,
            y=ys,
            name="held-out loss",
            mode="lines+markers",
            line={"color": RED, "dash": "dot"},
            marker=marker,
            hovertemplate=hover,
            showlegend=False,
        )
        fig.add_trace(held_out, row=1, col=1)
        fig.layout.annotations[0].text = f"loss, and {coloured('on held-out data', RED)}"
    step_axis(fig, run.steps, row=2)
    fig.update_yaxes(title_text="loss per token", row=1, col=1)
    fig.update_yaxes(title_text="2-norm, before clipping", row=1, col=2)
    fig.update_yaxes(title_text="tokens / s, host's clock", row=2, col=1, rangemode="tozero")
    fig.update_yaxes(title_text="rate", row=2, col=2, rangemode="tozero", exponentformat="power")
    fig.update_layout(height=520, hovermode="closest", margin_t=40)
    return Drawing(fig, notes)


def peak_parts(run):
    """What made the peak of each step, and the capacity above it."""
    steps = [step for step in run.steps if step.get("peak_parts")]
    steps, notes = few(steps, "device_peak")
    capacity = (run.summary or {}).get("capacity_bytes")
    unit, size = unit_of(max(step["device_peak"] for step in steps))
    fig = figure(360, barmode="stack", hovermode="closest", bargap=0.25)
    x = values_of(steps, "step")
    for key, (label, colour) in PARTS.items():
        counts = [step["peak_parts"][key] for step in steps]
        hover = f"step %{{x}}: %{{customdata}}<extra>{label}</extra>"
        text = [bytes_text(count) for count in counts]
        y = [count / size for count in counts]
        fig.add_bar(x=x, y=y, name=label, marker_color=colour, customdata=text, hovertemplate=hover)
    if capacity:
        mark_capacity(fig, capacity, size)
    step_axis(fig, steps)
    fig.update_yaxes(title_text=f"bytes at the step's peak ({unit})")
    return Drawing(fig, notes)


def drops(run):
    """What was to be off the device when backward began, and what really was."""
    steps, notes = few([step for step in run.steps if step.get("planned_drop")], "planned_drop")
    unit, size = unit_of(max(step["planned_drop"] for step in steps))
    fig = figure(320, barmode="group", hovermode="closest", bargap=0.25)
    x = values_of(steps, "step")
    for key, label, colour in ("planned_drop", "planned", GREY), ("measured_drop", "measured", TEAL):
        counts = values_of(steps, key)
        text = [
            f"{bytes_text(count)}, R = {step['measured_drop'] / step['planned_drop']:.4f}"
            for count, step in zip(counts, steps, strict=True)
        ]
        hover = f"step %{{x}}: %{{customdata}}<extra>{label}</extra>"
        y = [count / size for count in counts]
        fig.add_bar(x=x, y=y, name=label, marker_color=colour, customdata=text, hovertemplate=hover)
    step_axis(fig, steps)
    fig.update_yaxes(title_text=f"off the device ({unit})")
    return Drawing(fig, notes)


def link(run):
    """Traffic, late reloads and exposed wait of each step."""
    keys = ("step", "offloaded_bytes", "reloaded_bytes", "late_reloads", "exposed_wait_ms", "exposed_share")
    shared = [{**step, "exposed_share": wait_share(step)} for step in run.steps]
    groups, notes = groups_of(shared)
    steps = [{key: max(step[key] for step in group) for key in keys} for group in groups]
    x = values_of(steps, "step")
    unit, size = unit_of(max(max(step["offloaded_bytes"], step["reloaded_bytes"]) for step in steps))
    out_and_in = f"moved over the link: {coloured('out', TEAL)} and {coloured('in', GREEN)}"
    titles = [out_and_in, "exposed wait", "late reloads"]
    fig = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)

    def add_bars(col, name, colour, y, *, hover, text=None):
        fig.add_bar(
            x=x,
            y=y,
            name=name,
            marker_color=colour,
            customdata=text,
            hovertemplate=f"step %{{x}}: {hover}<extra></extra>",
            showlegend=False,
            row=1,
            col=col,
        )

    for key, label, colour in ("offloaded_bytes", "out", TEAL), ("reloaded_bytes", "in", GREEN):
        counts = values_of(steps, key)
        text = [bytes_text(count) for count in counts]
        add_bars(1, label, colour, [count / size for count in counts], hover=f"%{{customdata}} {label}", text=text)
    text = [f", {step['exposed_share']:.1%} of the step" for step in steps]
    add_bars(2, "exposed wait", RED, values_of(steps, "exposed_wait_ms"), hover="%{y:.3f} ms%{customdata}", text=text)
    add_bars(3, "late reloads", AMBER, values_of(steps, "late_reloads"), hover="%{y}")
    step_axis(fig, steps)
    fig.update_yaxes(rangemode="tozero")
    fig.update_yaxes(title_text=unit, row=1, col=1)
    fig.update_yaxes(title_text="ms", row=1, col=2)
    fig.update_yaxes(title_text="storages", row=1, col=3)
    for row, key in (2, "exposed_wait_ms"), (3, "late_reloads"):
        if not any(values_of(steps, key)):
            fig.update_yaxes(range=[0, 1], row=1, col=row)
            fig.add_annotation(text="none", showarrow=False, x=0.5, y=0.5, xref=f"x{row} domain", yref=f"y{row} domain")
    fig.update_layout(height=330, barmode="group", hovermode="closest", bargap=0.25, margin_t=40)
    return Drawing(fig, notes)


def wait_share(step):
    whole = step.get("device_step_ms") or step["step_ms"]
    return step["exposed_wait_ms"] / whole if whole else 0


def expert_load(run):
    """Tokens of each expert of the last step, as a multiple of its layer's mean."""
    step = next(step for step in reversed(run.steps) if step.get("expert_load"))
    load = step["expert_load"]
    share = [[count * len(layer) / max(1, sum(layer)) for count in layer] for layer in load]
    fig = figure(170 + 26 * max(4, len(load)), hovermode="closest", margin_t=30)
    fig.add_heatmap(
        z=share,
        customdata=load,
        colorscale="Viridis",
        zmin=0,
        colorbar_title_text="× mean",
        hovertemplate="layer %{y}, expert %{x}: %{customdata} tokens, %{z:.2f} × the mean<extra></extra>",
    )
    fig.update_xaxes(title_text="expert", tickformat="d")
    fig.update_yaxes(title_text="layer with experts", autorange="reversed", tickformat="d")
    return Drawing(fig, [f"Step {step['step']}."])
