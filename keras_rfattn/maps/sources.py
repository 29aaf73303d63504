"""Finds folders of trained maps by path, name or URI, and uploads them to a hub."""

import importlib
import os
import pathlib

import keras_rfattn.maps.folder as folders
import keras_rfattn.maps.shipped as shipped

HUBS = ("hf://", "kaggle://", "modelscope://")


def find(source):
    """Returns the local folder of a set of trained maps."""
    if isinstance(source, str) and source.startswith(HUBS):
        return _download(source)
    if isinstance(source, str) and source in shipped.names():
        return shipped.ROOT / source
    if isinstance(source, (str, os.PathLike)):
        folder = pathlib.Path(source).expanduser()
        if folder.is_dir():
            return folder
    raise ValueError(
        "`source` must be a folder that `save_maps` wrote, the name of a set that "
        f"ships with keras_rfattn ({', '.join(shipped.names())}), or a URI that begins "
        f"with {', '.join(HUBS)}. Received: source={source!r}."
    )


def _download(uri):
    # KerasHub resolves all of these schemes for its presets.
    presets = _package("keras_hub.src.utils.preset_utils", uri)
    files = [presets.get_file(uri, x) for x in (folders.MANIFEST, folders.WEIGHTS)]
    return pathlib.Path(files[0]).parent


def upload_maps(uri: str, folder: str | os.PathLike) -> None:
    """Uploads a folder of trained maps to a model hub.

    Args:
        uri: `"hf://user/name"`, where the repository is created if it does not exist,
            or `"kaggle://user/model/keras/variation"`.
        folder: Folder that `save_maps` wrote.

    Raises:
        ImportError: If the package of the hub is not installed.
        ValueError: If `uri` has another form, or the folder is damaged. Nothing is
            uploaded in that case.

    Examples:
        >>> try:
        ...     keras_rfattn.upload_maps("hf://me/my-maps", "no_such_folder")
        ... except ValueError as error:
        ...     print(str(error)[:46])
        A folder of trained maps must hold 'maps.json'
    """
    folder = pathlib.Path(folder)
    folders.read_arrays(folder, folders.read_manifest(folder))
    files = [folders.MANIFEST, folders.WEIGHTS, folders.CARD]
    if isinstance(uri, str) and uri.startswith("hf://"):
        hub = _package("huggingface_hub", uri)
        name = uri.removeprefix("hf://")
        repository = hub.create_repo(repo_id=name, exist_ok=True)
        hub.upload_folder(
            repo_id=repository.repo_id, folder_path=str(folder), allow_patterns=files
        )
    elif isinstance(uri, str) and uri.startswith("kaggle://"):
        hub = _package("kagglehub", uri)
        others = [x.name for x in folder.iterdir() if x.name not in files]
        hub.model_upload(
            uri.removeprefix("kaggle://"), str(folder), ignore_patterns=others
        )
    else:
        raise ValueError(
            "`uri` must have the form 'hf://user/name' or "
            f"'kaggle://user/model/keras/variation'. Received: uri={uri!r}."
        )


def _package(name, uri):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{uri!r} needs a package that is not installed: {error}. Install "
            "`keras-hub` to download, `huggingface_hub` or `kagglehub` to upload."
        ) from error
