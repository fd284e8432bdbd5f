"""The page: words and tiles around the figures, in one file that needs no other."""

import json
from html import escape
from pathlib import Path
from statistics import median

from plotly.offline import get_plotlyjs

from neaptide.report import over_steps, over_time
from neaptide.report.units import bytes_text, ms_text

HERE = Path(__file__).parent
STATUS = {  # of summary.json: in words, and how it looks
    "finished": ("finished", "good"),
    "interrupted": ("stopped by a signal", "fair"),
    "unfinished": ("still running, or killed", "fair"),
    "out_of_memory": ("out of memory", "bad"),
    "non_finite": ("loss or gradients not finite", "bad"),
    "rank_failed": ("another rank failed", "bad"),
}
WITHOUT_TRACE = (
    "The run has no trace, so this is not known. With <code>--log.trace=true</code> the next one leaves "
    "<code>trace.json</code>."
)


def warm_median(values):
    """Without the first, which also warms up, unless it is the only one: as summary.json has it."""
    known = [value for value in values if value is not None]
    return median(known[1:] or known) if known else None


class Page:
    """Sections in order, and the figures that they show."""

    def __init__(self):
        self.sections = []
        self.figures = {}

    def section(self, key, title, *parts):
        self.sections.append((key, title, "\n".join(part for part in parts if part)))

    def figure(self, key, drawing, caption=""):
        self.figures[key] = json.loads(drawing.figure.to_json())
        return figure_html(key, [caption, *drawing.notes])

    def views(self, key, drawings, first, caption=""):
        """A figure of which one view is shown at a time, to begin with the one of number `first` or the last."""
        views = [{"notes": drawing.notes, "figure": json.loads(drawing.figure.to_json())} for _, drawing in drawings]
        self.figures[key] = {"views": views, "first": min(first, len(views) - 1)}
        options = "".join(f'<option value="{i}">{escape(label)}</option>' for i, (label, _) in enumerate(drawings))
        chooser = f'<label class="chooser">show <select data-views="{key}">{options}</select></label>'
        return chooser + figure_html(key, [caption, '<span data-notes="' + key + '"></span>'])


def figure_html(key, captions):
    text = " ".join(caption for caption in captions if caption)
    return f'<div class="figure" id="figure-{key}"></div>' + (f'<p class="note">{text}</p>' if text else "")


# ---- head


def chip(run):
    words, look = STATUS.get(run.status, (run.status, "fair"))
    return f'<span class="chip {look}">{escape(words)}</span>'


def subtitle(run):
    def value(section, key, otherwise="?"):
        return run.config.get(section, {}).get(key, otherwise)

    train = run.config["train"]
    tokens = run.steps[0]["tokens"] if run.steps and "tokens" in run.steps[0] else None
    pieces = [
        value("model", "path"),
        f"{value('device', 'type')}:{value('device', 'index', '0')}",
        f"{len(run.steps)} of {train.get('steps', '?')} steps" + (f" of {tokens} tokens" if tokens else ""),
        f"sequences of {train.get('sequence', '?')}",
        f"offload {value('offload', 'mode')}",
        f"recompute {value('recompute', 'mode')}",
    ]
    if run.trace is not None and run.trace.among_ranks():
        pieces.append("several ranks, of which times and bytes are those of rank 0")
    return " · ".join(escape(str(piece)) for piece in pieces)


def tile(title, value, *details):
    lines = "".join(f"<div>{escape(detail)}</div>" for detail in details if detail)
    return f'<div class="tile"><h3>{escape(title)}</h3><div class="value">{escape(value)}</div>{lines}</div>'


def fullest_step(run):
    known = [step for step in run.steps if step.get("device_peak") is not None]
    return max(known, key=lambda step: step["device_peak"]) if known else None


def place_of_peak(step):
    parts = step.get("peak_parts") if step else None
    if not parts:
        return ""
    return f"step {step['step']}, {parts['place'] or 'in the ' + parts['piece']}"


def ratio(run):
    """The step with the largest planned drop: what R is told of."""
    planned = [step for step in run.steps if step.get("planned_drop")]
    return max(planned, key=lambda step: step["planned_drop"]) if planned else None


def memory_tiles(run):
    summary = run.summary or {}
    fullest = fullest_step(run)
    # The summary's is of the steps since the run went on, but also of what did not end.
    peaks = [summary.get("peak_bytes"), fullest and fullest["device_peak"]]
    peak = max((peak for peak in peaks if peak is not None), default=None)
    if peak is not None:
        capacity = summary.get("capacity_bytes")
        of = f"of {bytes_text(capacity)} ({peak / capacity:.0%})" if capacity else "of unlimited memory"
        where = (
            place_of_peak(fullest) if fullest and fullest["device_peak"] == peak else "outside of the steps that ended"
        )
        yield tile("Device peak", bytes_text(peak), of, where)
    if planned := ratio(run):
        r = planned["measured_drop"] / planned["planned_drop"]
        detail = f"{bytes_text(planned['measured_drop'])} of {bytes_text(planned['planned_drop'])} planned"
        yield tile("R, drop of the peak", f"{r:.4f}", detail)
    out, back = (sum(step.get(key, 0) for step in run.steps) for key in ("offloaded_bytes", "reloaded_bytes"))
    if out:
        late, wait = (sum(step[key] for step in run.steps) for key in ("late_reloads", "exposed_wait_ms"))
        yield tile(
            "Over the link",
            bytes_text(out),
            f"out, {bytes_text(back)} in",
            f"{late} late reloads, {ms_text(wait)} exposed wait",
        )
    if reruns := sum(step.get("reruns", 0) for step in run.steps):
        kept = max(step["bytes_not_kept"] for step in run.steps)
        yield tile("Recomputed", f"{reruns} units", f"{bytes_text(kept)} not kept in a step")


def speed_tiles(run):
    if not run.steps:
        return
    host = ms_text(warm_median(over_steps.values_of(run.steps, "step_ms")))
    device = warm_median(over_steps.values_of(run.steps, "device_step_ms"))
    mfu = warm_median(over_steps.values_of(run.steps, "mfu"))
    used = f"{mfu:.1%} of the devices' FLOPs" if mfu is not None else ""
    if device is not None:
        yield tile("Step, device's clock", ms_text(device), f"{host} on the host's clock", used)
    else:
        yield tile("Step", host, "on the host's clock", used)
    first, last = run.steps[0]["loss"], run.steps[-1]["loss"]
    held_out = [value for value in over_steps.values_of(run.steps, "eval_loss") if value is not None]
    yield tile(
        "Loss",
        number(last),
        f"from {number(first)} at step {run.steps[0]['step']}",
        f"{number(held_out[-1])} on held-out data" if held_out else "",
    )
    speed = warm_median(over_steps.values_of(run.steps, "tokens_per_s"))
    yield tile("Tokens per second", f"{speed:,.0f}", "median, on the host's clock")


def number(value):
    return "not finite" if value is None else f"{value:.4f}"


def early_end(run):
    """What a run said when it ended early."""
    message = (run.summary or {}).get("message")
    if not message:
        return ""
    words = STATUS[run.status][0]
    return f'<section class="alarm"><h2>{escape(words)}</h2><pre>{escape(message.strip())}</pre></section>'


# ---- sections


def add_memory(page, run):
    parts = []
    if run.trace is None:
        parts.append(f"<h3>Over time</h3><p>{WITHOUT_TRACE}</p>")
    elif run.trace.memory():
        drawings = [(window.label, over_time.memory(run, window)) for window in over_time.windows(run)]
        caption = (
            "A change is drawn when the host makes it, which runs ahead of the device and waits for it at a step's end."
        )
        parts += ["<h3>Over time</h3>", page.views("memory", drawings, 0, caption)]
    else:
        parts.append("<h3>Over time</h3><p>The device of this run counts no memory in its trace.</p>")
    if over_steps.any_value(run.steps, "peak_parts"):
        fullest = fullest_step(run)
        rows = "".join(
            f"<tr><td>{label}</td><td>{bytes_text(fullest['peak_parts'][key])}</td>"
            f"<td>{fullest['peak_parts'][key] / max(1, fullest['device_peak']):.1%}</td></tr>"
            for key, (label, _) in over_steps.PARTS.items()
        )
        where, most = place_of_peak(fullest), bytes_text(fullest["device_peak"])
        parts += [
            "<h3>What the peak is made of</h3>",
            page.figure("peak", over_steps.peak_parts(run)),
            f"<table><caption>The largest, {most}: {escape(where)}</caption>{rows}</table>",
            '<p class="note">Activations lay there at rest, before or after the piece of the step that made the peak; '
            "workspace is what operators needed meanwhile.</p>",
        ]
    elif run.steps:
        parts.append("<h3>What the peak is made of</h3><p>A plain CPU counts no memory.</p>")
    if ratio(run):
        caption = (
            "Bytes that were to be off the device when backward began, and that really were. Where R is below 1, "
            "something else held on to what had been copied."
        )
        parts += ["<h3>Planned and measured</h3>", page.figure("drops", over_steps.drops(run), caption)]
    page.section("memory", "Memory", *parts)


def add_streams(page, run):
    if run.trace is None:
        page.section("streams", "Streams", f"<p>{WITHOUT_TRACE}</p>")
        return
    if not run.trace.spans:
        page.section("streams", "Streams", "<p>The trace holds no spans.</p>")
        return
    drawings = [(window.label, over_time.timeline(run, window)) for window in over_time.windows(run)]
    caption = "Drag to zoom, double-click to go back."
    dropped = ""
    if run.trace.dropped:
        lost = f"The recorder had no room for {run.trace.dropped} more events: the end is missing."
        dropped = f'<p class="warning">{lost}</p>'
    steps = len(run.trace.steps())
    if steps > len(drawings) - 1:
        caption += f" Of {steps} steps those that differ most have a view of their own."
    second = 2  # the whole run and the first step, which also warms up, are before it
    page.section("streams", "Streams", dropped, page.views("timeline", drawings, second, caption))


def add_link(page, run):
    if not any(step.get("offloaded_bytes") or step.get("late_reloads") for step in run.steps):
        page.section("link", "Link", "<p>Nothing was offloaded.</p>")
        return
    caption = (
        "A late reload began only when backward needed it. Exposed wait is time in which compute had nothing to do but "
        "wait for copies: with late reloads a wider prefetch helps, without them the link is the bottleneck."
    )
    page.section("link", "Link, late reloads and waits", page.figure("link", over_steps.link(run), caption))


def add_training(page, run):
    if run.steps:
        page.section("training", "Training", page.figure("training", over_steps.training(run)))
    if over_steps.any_value(run.steps, "expert_load"):
        page.section(
            "experts", "Experts", page.figure("experts", over_steps.expert_load(run), "Tokens over all ranks.")
        )


def add_files(page, run):
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{bytes_text(size)}</td></tr>" for name, size in run.files)
    page.section("run-file", "Run file", f"<pre>{escape(run.config_text)}</pre>")
    page.section("files", "Files", f"<p><code>{escape(str(run.path))}</code></p><table>{rows}</table>")


def page_of(run):
    """The whole HTML of a RunDirectory."""
    page = Page()
    add_memory(page, run)
    add_streams(page, run)
    add_link(page, run)
    add_training(page, run)
    add_files(page, run)
    nav = "".join(f'<a href="#{key}">{escape(title.split(",")[0])}</a>' for key, title, _ in page.sections)
    sections = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{body}</section>' for key, title, body in page.sections
    )
    tiles = "".join([*memory_tiles(run), *speed_tiles(run)])
    # A closing tag within a name would end the script.
    data = json.dumps(page.figures, separators=(",", ":")).replace("</", "<\\/")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)} – Neaptide</title>
<link rel="icon" href="data:,">
<style>{(HERE / "page.css").read_text()}</style>
</head>
<body>
<nav><strong>Neaptide</strong>{nav}<button id="theme" type="button" title="light or dark">◐</button></nav>
<main>
<header><h1>{escape(run.name)} {chip(run)}</h1><p>{subtitle(run)}</p></header>
{early_end(run)}
<div class="tiles">{tiles}</div>
{sections}
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{(HERE / "page.js").read_text()}</script>
</body>
</html>
"""
