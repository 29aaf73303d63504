"""The folder in which trained maps are published: a manifest, weights and a card."""

import hashlib
import json
import pathlib

import numpy as np

MANIFEST, WEIGHTS, CARD = "maps.json", "maps.safetensors", "README.md"
FORMAT = 1
KEYS = {
    "format": int, "versions": dict, "base": dict, "layers": list, "softmax": list,
    "tensors": dict, "checksum": str, "training": dict, "metrics": dict,
}  # fmt: skip
LAYER_KEYS = {
    "path": str, "mechanism": str, "feature_map": dict, "options": dict,
    "fingerprint": list,
}  # fmt: skip


BASE_KEYS = {"class": str, "weights": str}
# Older sets could hold trained weights of the checkpoint under these keys.
WEIGHTS_OF_BASE = "checkpoint_weights", "adapters"


def write(folder, manifest, arrays, card):
    """Writes the three files of a set of maps."""
    from safetensors.numpy import save

    folder = pathlib.Path(folder)
    data = save(arrays)
    manifest = {
        "format": FORMAT,
        **manifest,
        "tensors": {
            name: {"shape": list(x.shape), "dtype": x.dtype.name}
            for name, x in arrays.items()
        },
        "checksum": _checksum(data),
    }
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
    if found != FORMAT or not _has(manifest, KEYS):
        raise ValueError(
            f"{str(file)!r} must be a manifest of trained maps, a JSON object with "
            f"the keys {', '.join(KEYS)}. It is foreign or damaged. Get the folder "
            "again, or save the maps again."
        )
    if not all(_has(layer, LAYER_KEYS) for layer in manifest["layers"]):
        raise ValueError(
            f"Each of the 'layers' in {str(file)!r} must have the keys "
            f"{', '.join(LAYER_KEYS)}. The file is damaged. Get the folder again."
        )
    names = [*(x["path"] for x in manifest["layers"]), *manifest["softmax"]]
    if (
        not _has(manifest["base"], BASE_KEYS)
        or not all(isinstance(x, str) for x in names)
        or len(set(names)) != len(names)
    ):
        raise ValueError(
            f"{str(file)!r} must name each layer once, and the class and the weights "
            "of its checkpoint. It is damaged. Get the folder again."
        )
    held = [key for key in WEIGHTS_OF_BASE if manifest.get(key)]
    if held:
        raise ValueError(
            f"{str(file)!r} must be a set of maps alone. Received: {held}, weights of "
            "the checkpoint that were trained with the maps. Load the set with the "
            f"version that saved it, {manifest['versions']}, and save the whole model "
            "there by `save_to_preset`."
        )
    return manifest


def read_arrays(folder, manifest):
    """Reads and checks the weights of a set of maps."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    file = pathlib.Path(folder) / WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} holds {MANIFEST!r}, but not the weights {WEIGHTS!r}. Get "
            "the whole folder."
        )
    data = file.read_bytes()
    try:
        arrays = load(data)
    except SafetensorError as error:
        raise ValueError(
            f"{str(file)!r} must be a safetensors file. It is torn or damaged: "
            f"{error}. Get the folder again."
        ) from None
    found = {
        name: {"shape": list(x.shape), "dtype": x.dtype.name}
        for name, x in arrays.items()
    }
    wanted = manifest["tensors"]
    if found != wanted:
        names = sorted(set(wanted) ^ set(found)) or sorted(
            name for name in wanted if wanted[name] != found[name]
        )
        raise ValueError(
            f"{str(file)!r} must hold the {len(wanted)} tensors that {MANIFEST!r} "
            f"lists. Received: {len(found)} tensors; missing, surplus or of another "
            f"shape or dtype: {', '.join(names[:4])}. Get the folder again."
        )
    if _checksum(data) != manifest["checksum"]:
        raise ValueError(
            f"{str(file)!r} has changed since it was saved: its checksum is not the "
            f"one in {MANIFEST!r}. Get the folder again, or save the maps again."
        )
    bad = [name for name, x in arrays.items() if not np.all(np.isfinite(x))]
    if bad:
        raise ValueError(
            f"The weights in {str(file)!r} must be finite. Received: NaN or infinities "
            f"in {', '.join(bad[:4])}. Get the folder again, or save the maps again."
        )
    return arrays


def _checksum(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _has(entry, keys):
    return isinstance(entry, dict) and all(
        isinstance(entry.get(name), kind) for name, kind in keys.items()
    )
