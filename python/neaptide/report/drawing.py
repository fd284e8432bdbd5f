"""What the figures share: colours, and how much of a thing is drawn. Text, grid and paper are coloured by the page."""

from dataclasses import dataclass

import plotly.graph_objects as go

from neaptide.report.units import bytes_text

# Read well on white and on black, and apart from each other.
BLUE, TEAL, GREEN, AMBER, RED = "#3f7fd1", "#1f9d8f", "#7fae42", "#dd9a2f", "#dc5048"
PURPLE, SLATE, GREY = "#9566cc", "#6d80ad", "#929aa8"

MOST_POINTS = 4000  # of a curve


@dataclass
class Drawing:
    """A figure, and what its reader has to know about how it was drawn."""

    figure: go.Figure
    notes: list


def figure(height, **layout):
    return go.Figure(layout={"height": height, **layout})


def coloured(text, colour):
    return f'<span style="color:{colour}">{text}</span>'


def mark_capacity(fig, capacity, size):
    label = {"text": f"capacity {bytes_text(capacity)}", "xanchor": "left", "yanchor": "bottom", "x": 0}
    fig.add_hline(y=capacity / size, line={"color": RED, "dash": "dash", "width": 1.5}, annotation=label)
