"""The folder in which trained maps are published: a manifest, weights and a card."""

import hashlib
import json
import pathlib

import numpy as np

MANIFEST, WEIGHTS, CARD = "maps.json", "maps.safetensors", "README.md"
FORMAT = 2
# What loading depends on; the rest of a manifest is for readers.
ESSENTIAL = "base", "layers", "softmax"


def write(folder, manifest, arrays):
    """Writes the three files of a set of maps."""
    from safetensors.numpy import save

    data, manifest = save(arrays), {"format": FORMAT, **manifest}
    manifest["checksum"] = _checksum(manifest, data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(data)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    (folder / CARD).write_text(_card(manifest, len(data)), "utf-8")


def read(folder):
    """Returns the manifest and the arrays of a set of maps, as they were saved."""
    from safetensors.numpy import load

    try:
        manifest = json.loads(pathlib.Path(folder, MANIFEST).read_text("utf-8"))
        place = pathlib.Path(folder)
        if "weights_of" in manifest:  # shipped sets share those of a folder beside
            place = place.parent / pathlib.Path(manifest["weights_of"]).name
        data = (place / WEIGHTS).read_bytes()
        if manifest["format"] > FORMAT:
            raise ValueError(f"format {manifest['format']}: use a newer keras_rfattn")
        if manifest["checksum"] != _checksum(manifest, data):
            raise ValueError("a file has changed since it was saved")
        arrays = load(data)
        if not all(np.all(np.isfinite(x)) for x in arrays.values()):
            raise ValueError("weights are NaN or infinite")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(damage(folder, error)) from error
    return manifest, arrays


def damage(folder, error):
    """Returns the message about a folder that cannot be used as it is."""
    return (
        f"A folder of trained maps must hold {MANIFEST!r} and {WEIGHTS!r} as "
        f"`save_maps` wrote them. Received: {str(folder)!r}, with {error!r}. Get the "
        "folder again, or save the maps again."
    )


def _checksum(manifest, data):
    digest = hashlib.sha256(data)
    # The first format has a checksum of the weights alone.
    if manifest["format"] > 1:
        digest.update(json.dumps([manifest[x] for x in ESSENTIAL]).encode())
    return f"sha256:{digest.hexdigest()}"


def _card(manifest, size):
    """Returns the text of the model card of maps of `size` bytes."""
    layers, name = manifest["layers"], manifest["base_model"]
    heads = sum(len(x["options"].get("softmax_heads", ())) for x in layers)
    maps = {f"{x['mechanism']} of {x['width']} features" for x in layers}
    entries = {"base_model": name, "license": manifest["license"]}
    about = "".join(f"{key}: {x}\n" for key, x in entries.items() if x)
    metrics, training = manifest["metrics"].items(), "\n".join(manifest["training"])
    rows = "".join(f"| {key.replace('_', ' ')} | {x} |\n" for key, x in metrics)
    return f"""---
library_name: keras-rfattn
{about}tags: [keras, linear-attention]
---

# {name or manifest["base"]["class"]} with linear attention

{len(layers)} attention layers with trained feature maps ({", ".join(sorted(maps))});
{len(manifest["softmax"])} layers and {heads} key/value heads stay softmax. The file of
weights has {size / 1e6:.2f} MB. To make attention linear in sequence length:
`keras_rfattn.load_maps(model, "PATH OR URI OF THIS FOLDER")`.

| quality and training | |
|---|---|
{rows}
```
{training}
```
"""
