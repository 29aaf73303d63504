"""The folder in which trained maps are published: a manifest, weights and a card."""

import hashlib
import json
import pathlib

import numpy as np

MANIFEST, WEIGHTS, CARD = "maps.json", "maps.safetensors", "README.md"
FORMAT = 1
# What loading reads of a manifest, of its "base" and of each of its "layers".
KEYS = {
    "versions": dict, "base": dict, "layers": list, "softmax": list, "checksum": str,
    "training": dict, "metrics": dict,
}  # fmt: skip
BASE_KEYS = {"class": str, "weights": str}
LAYER_KEYS = {
    "path": str, "mechanism": str, "feature_map": dict, "options": dict,
    "fingerprint": list,
}  # fmt: skip


def write(folder, manifest, arrays, card):
    """Writes the three files of a set of maps."""
    from safetensors.numpy import save

    data = save(arrays)
    manifest = {"format": FORMAT, **manifest, "checksum": _checksum(data)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(data)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    (folder / CARD).write_text(card, "utf-8")


def read_manifest(folder):
    """Reads and checks the manifest of a set of maps."""
    file = pathlib.Path(folder) / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"A folder of trained maps must hold {MANIFEST!r}, as `save_maps` writes "
            f"it. Received: {str(folder)!r}, which does not hold it."
        )
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{str(file)!r} must be JSON. It is damaged: {error}. Get the folder again."
        ) from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise ValueError(
            f"{str(file)!r} has format {found}, and this version of keras_rfattn reads "
            f"formats up to {FORMAT}. Install a newer version of keras_rfattn."
        )
    if found != FORMAT or not _is_whole(manifest):
        raise ValueError(
            f"{str(file)!r} must be a manifest of trained maps, a JSON object with "
            f"{', '.join(KEYS)}, which names each layer once. It is foreign or "
            "damaged. Get the folder again, or save the maps again."
        )
    return manifest


def _is_whole(manifest):
    """Returns whether a manifest has all that `save_maps` writes, each layer once."""
    if not _has(manifest, KEYS) or not _has(manifest["base"], BASE_KEYS):
        return False
    if not all(_has(layer, LAYER_KEYS) for layer in manifest["layers"]):
        return False
    names = [*(x["path"] for x in manifest["layers"]), *map(str, manifest["softmax"])]
    return len(set(names)) == len(names)


def _has(entry, keys):
    return isinstance(entry, dict) and all(
        isinstance(entry.get(name), kind) for name, kind in keys.items()
    )


def read_arrays(folder, manifest):
    """Reads and checks the weights of a set of maps."""
    from safetensors.numpy import load

    file = pathlib.Path(folder) / WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} holds {MANIFEST!r}, but not the weights {WEIGHTS!r}. Get "
            "the whole folder."
        )
    data = file.read_bytes()
    if _checksum(data) != manifest["checksum"]:
        raise ValueError(
            f"{str(file)!r} has changed since it was saved: its checksum is not the "
            f"one in {MANIFEST!r}. Get the folder again, or save the maps again."
        )
    arrays = load(data)
    bad = [name for name, x in arrays.items() if not np.all(np.isfinite(x))]
    if bad:
        raise ValueError(
            f"The weights in {str(file)!r} must be finite. Received: NaN or infinities "
            f"in {', '.join(bad[:4])}. Get the folder again, or save the maps again."
        )
    return arrays


def _checksum(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
