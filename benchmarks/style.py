"""The look of all pictures: one color a method, text that a phone shows legibly."""

# Pictures are as wide as a column of text: 4.5 inches, 360 pixels on a phone.
WIDTH = 4.5
DPI = 160
FONTS = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8}
COLORS = {
    "softmax": "black",
    "favorpp_learned": "tab:blue",
    "favorpp": "tab:orange",
    "favorpp_dense": "tab:purple",
    "hedgehog": "tab:green",
    "polysketch": "tab:brown",
    # Softmax in parts of a text.
    "cut": "darkgray",
    "mean of chunks": "dimgray",
    "best chunk": "tab:red",
    "control": "gray",
}


def figure(height, rows=1, columns=1, **kwargs):
    """Returns a figure of some panels, and the list of their axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(FONTS)
    made = Figure(figsize=(WIDTH, height), layout="constrained")
    return made, list(made.subplots(rows, columns, squeeze=False, **kwargs).flat)


def legend(figure, axes, columns=2):
    """Puts the legend of some axes below a figure, where it hides no point."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns
    )


def token_ticks(axes, tokens):
    """Makes an axis of numbers of tokens logarithmic, and writes these out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{x:,}" for x in tokens])
    axes.minorticks_off()


def save(figure, path):
    """Writes a picture."""
    figure.savefig(path, dpi=DPI)
    print(path)
