"""Common names of attention mechanisms, and the registered names that they mean.

Only error messages use this table. A name that is not registered never selects a map.
"""

import difflib
import inspect
import re

# Maps registered names to what papers and other libraries call these maps, normalized
# by `_normalized`. Some names mean several maps.
MEANINGS = {
    ("favorpp",): "adaptiverandomfeatures oprf optimalpositiverandom performerpp",
    ("favorpp", "gerf", "poisson_positive", "geometric_positive"): (
        "chefsrandomtables crt"
    ),
    ("favorpp_dense",): "denseexponential derf favorsharp",
    ("elu",): "elu1 eluplus1 katharopoulos linear",
    ("favorplus",): "favorsoftmax performer performers positiverandom positive prf",
    ("favor",): "fourier randomfourier rfa rff trf trig trigonometric trigrf",
    ("gerf",): "generalizedexponential",
    ("relu",): "generalized performerrelu",
    ("hybrid_angular", "hybrid_gaussian", "hybrid_clustered"): (
        "hrf hybrid hybridrandom"
    ),
    ("hedgehog",): "lolcats",
    ("polynomial",): "poly",
    ("polysketch", "polysketch_learned"): "polysketchformer",
    ("favorplus", "favorpp"): "random",
}
ALIASES = {
    alias: names for names, aliases in MEANINGS.items() for alias in aliases.split()
}
# Words that may follow a name and do not change what it means.
GENERIC_WORDS = ("attention", "transformer", "features", "kernel", "map", "former")
# With a lower value, "reformer" would count as a misspelled "performer".
CUTOFF = 0.85


def hint(name, registered):
    """Returns a sentence about an unknown name, or "" if no registered one is near."""
    if name.strip().lower() in ("softmax", "none", "vanilla", "exact"):
        return (
            "Attention that is not replaced stays softmax: name its layers in "
            "`exclude`, or give them `None` in a `Plan`."
        )
    spellings = {_normalized(x): (x,) for x in registered}
    # Registered names come last, so that they override an equal alias. Users may
    # register a map under an alias.
    known = {
        alias: tuple(x for x in names if x in registered)
        for alias, names in ALIASES.items()
    } | spellings
    for spelling in _spellings(name):
        if known.get(spelling):
            return f"{name!r} is called {_either(known[spelling])} here."
    normalized = _normalized(name)
    # Candidates share the first letter. "eluu" is a misspelled "elu", but "gelu" is
    # another function.
    candidates = [x for x in known if known[x] and x[:1] == normalized[:1]]
    close = difflib.get_close_matches(normalized, candidates, n=1, cutoff=CUTOFF)
    if not close:
        return ""
    meant = _either(known[close[0]])
    if close[0] in ALIASES:
        return f"Did you mean {close[0]!r}, which is called {meant} here?"
    return f"Did you mean {meant}?"


def _either(names):
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


def way_out(found):
    """Returns advice on what to pass in place of a wrong object, or ""."""
    if isinstance(found, type) and hasattr(found, "key_features"):
        return f" Create an instance: {found.__name__}()."
    if inspect.isroutine(found):
        return (
            " Write a subclass of `FeatureMap` that computes the function (see the "
            "guide for maps of your own)."
        )
    if isinstance(found, (list, tuple, set)):
        return " Use a `keras_rfattn.models.Plan` to give each layer its own map."
    return ""


def _normalized(name):
    """Normalizes a name: case, punctuation, spelling; + and # become words."""
    name = name.lower().replace("++", "pp").replace("+", "plus").replace("#", "sharp")
    name = re.sub(r"plus[\W_]*plus", "pp", name)
    return re.sub(r"[\W_]", "", name).replace("favour", "favor")


def _spellings(name):
    """Yields the normalized name, then the name without each trailing generic word."""
    found = _normalized(name)
    yield found
    while True:
        word = next((x for x in GENERIC_WORDS if found.endswith(x)), None)
        if word is None or found == word:
            return
        found = found.removesuffix(word)
        yield found
