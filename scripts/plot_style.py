"""Colours and matplotlib settings that all figures share."""

BLUE, ORANGE, GREEN, GREY, INK = "#2563a8", "#d9772b", "#2f8f6b", "#8a8f98", "#23272e"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#c9cdd3",
    "axes.labelcolor": "#5a606a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ebee",
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "xtick.color": "#5a606a",
    "ytick.color": "#5a606a",
    "xtick.bottom": False,
    "ytick.left": False,
}
