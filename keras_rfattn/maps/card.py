"""The model card of a set of trained maps."""

import re


def training(report, data, command, license):
    """Returns the entry "training" of a manifest: how the maps were trained."""
    found = {"data": data, "command": command, "license": license}
    if report is not None:
        found |= {
            "steps": sum(stage.steps for stage in report.stages),
            "seed": report.seed,
            "minutes": round(report.seconds / 60, 1),
            "error": round(report.after, 4),
            "error_before": round(report.before, 4),
            "error_of_uniform_attention": round(report.uniform_attention, 4),
        }
    return {name: value for name, value in found.items() if value is not None}


def quality_of(manifest):
    """Returns a measure and its values as text, empty if no quality is known."""
    metrics = manifest["metrics"]
    numbers = {k: x for k, x in metrics.items() if not isinstance(x, str)}
    softmax, share = (numbers.pop(x, None) for x in ("softmax", "share_of_softmax"))
    measures = [x for x in numbers if not x.startswith("control_")]
    if softmax is not None and measures:
        measure = re.split("_(?:on|at)_", measures[0])[0].replace("_", " ")
        return f"{measure} {numbers[measures[0]]:.4g}, softmax {softmax:.4g}"
    share = metrics.get("share_of_softmax") if share is None else f"{share:.3f}"
    return "" if share is None else f"{share} of softmax's quality"


def card(manifest, report, arrays):
    """Returns the text of the model card."""
    base, found = manifest["base"], manifest["training"]
    mechanisms = dict.fromkeys(x["mechanism"] for x in manifest["layers"])
    widths = dict.fromkeys(str(x["width"]) for x in manifest["layers"])
    name = base["name"] or base["class"]
    lines = ["---", "library_name: keras-rfattn"]
    if base["name"]:
        lines.append(f"base_model: {base['name']}")
    if "license" in found:
        lines.append(f"license: {found['license']}")
    lines += ["tags: [keras, linear-attention]", "---", ""]
    lines += [f"# {name} with linear attention", ""]
    size = sum(x.nbytes for x in arrays.values()) / 1e6
    lines += [
        f"Trained feature maps ({', '.join(mechanisms)}, {', '.join(widths)} features) "
        f"make {len(manifest['layers'])} attention layers of {name} linear in sequence "
        f"length. {len(manifest['softmax'])} layers stay softmax. The file has "
        f"{size:.2f} MB.",
        "",
        "```python",
        'keras_rfattn.load_maps(model, "PATH OR URI OF THIS FOLDER")',
        "```",
        "",
    ]
    lines += _table("quality", manifest["metrics"])
    lines += _table("training", found)
    if report is not None:
        lines += ["```", str(report), "```", ""]
    return "\n".join(lines)


def _table(title, entries):
    if not entries:
        return []
    rows = [f"| {name.replace('_', ' ')} | {entries[name]} |" for name in entries]
    return [f"| {title} | |", "|---|---|", *rows, ""]
