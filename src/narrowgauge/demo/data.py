"""Real images for the demo: scikit-learn's digits, or Fashion-MNIST's IDX files from the disk.

Nothing is ever downloaded: a demo that needs the network on its first run fails where it is most
wanted, behind a firewall on a cluster.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch.nn.functional import avg_pool2d

_IDX_FILES = {
    "train images": "train-images-idx3-ubyte",
    "train labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
_CLASSES = 10
_SMALLEST_SIDE = 8  # of an image, in pixels: halved, then pooled twice by the network
_FASHION_FOLDERS = (
    "fashion-mnist",
    "data/fashion-mnist",
    "data/FashionMNIST/raw",  # where torchvision puts it
    "~/fashion-mnist",
    "~/data/FashionMNIST/raw",
    "/usr/share/datasets/fashion-mnist",  # Debian's package
)
HOW_TO_GET_FASHION_MNIST = (
    "On Debian and Ubuntu: apt-get install dataset-fashion-mnist. Elsewhere: put the four IDX "
    f"files ({', '.join(_IDX_FILES.values())}; .gz or not) into one folder and pass it: "
    "narrowgauge demo --data FOLDER"
)


class DataError(Exception):
    """The images asked for are not there, or not what their names promise."""


@dataclass(frozen=True)
class Images:
    """Images and labels, split for training and testing.

    Attributes:
        name: for people.
        train_images: float32 in [0, 1], shape (N, 1, height, width).
        train_labels: int64, shape (N,).
        test_images: as ``train_images``; no image is in both.
        test_labels: as ``train_labels``.
    """

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_images(data: str) -> Images:
    """Load the data set of a name or of a folder with IDX files.

    Args:
        data: ``"digits"``, ``"fashion-mnist"`` (looked for in the usual places), or a folder.

    Raises:
        DataError: it is not there or damaged; the message says how to get it.
    """
    if data == "digits":
        return _digits()
    if data == "fashion-mnist":
        folder = find_fashion_mnist()
        if folder is None:
            raise DataError(
                "Fashion-MNIST was not found in any of: "
                f"{', '.join(_FASHION_FOLDERS)}. {HOW_TO_GET_FASHION_MNIST}"
            )
        return _idx_images(folder, "Fashion-MNIST")
    folder = _expanded(data)
    if not folder.is_dir():
        raise DataError(
            f"{data!r} is neither a known data set (digits, fashion-mnist) nor a folder. "
            f"{HOW_TO_GET_FASHION_MNIST}"
        )
    # A name that is no UTF-8 could not be written into the report.
    name = folder.resolve().name.encode("utf-8", "replace").decode("utf-8")
    return _idx_images(folder, name or str(folder))


def find_fashion_mnist() -> Path | None:
    """The folder with Fashion-MNIST's IDX files, or ``None`` if no usual place has them."""
    for place in _FASHION_FOLDERS:
        folder = _expanded(place)
        if all(_idx_path(folder, name) for name in _IDX_FILES.values()):
            return folder
    return None


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            f"the demo's digits come with scikit-learn, which cannot be imported ({error}): pip "
            "install scikit-learn, or pass a folder with IDX files: narrowgauge demo --data FOLDER"
        ) from error
    digits = load_digits()
    # 360 of the 1797 images are for testing, the same ones whatever the seed of a run is.
    train_images, test_images, train_labels, test_labels = train_test_split(
        digits.images.astype(numpy.float32) / 16,
        digits.target.astype(numpy.int64),
        test_size=360,
        stratify=digits.target,
        random_state=0,
    )
    return Images(
        "scikit-learn digits",
        torch.from_numpy(train_images)[:, None],
        torch.from_numpy(train_labels),
        torch.from_numpy(test_images)[:, None],
        torch.from_numpy(test_labels),
    )


def _idx_images(folder: Path, name: str) -> Images:
    parts = {}
    for part, file_name in _IDX_FILES.items():
        path = _idx_path(folder, file_name)
        if path is None:
            raise DataError(
                f"{folder} has no {file_name} (nor {file_name}.gz). {HOW_TO_GET_FASHION_MNIST}"
            )
        parts[part] = _read_images(path) if part.endswith("images") else _read_labels(path)
    for split in ("train", "test"):
        images, labels = parts[f"{split} images"], parts[f"{split} labels"]
        if len(images) != len(labels):
            raise DataError(f"{folder}: {len(images)} {split} images, but {len(labels)} labels")
    return Images(
        name,
        _halved(parts["train images"]),
        parts["train labels"].long(),
        _halved(parts["test images"]),
        parts["test labels"].long(),
    )


def _halved(images: torch.Tensor) -> torch.Tensor:
    """Bytes of shape (N, height, width) as float32 in [0, 1], 2 × 2 pixels averaged to one.

    A quarter of the pixels makes a quarter of the work: the demo is to take minutes on a laptop.
    """
    return avg_pool2d(images[:, None].float() / 255, 2)


def _expanded(place: str) -> Path:
    """The path with its ``~`` replaced; as it is, if there is no such home."""
    try:
        return Path(place).expanduser()
    except RuntimeError:
        return Path(place)


def _idx_path(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _read_images(path: Path) -> torch.Tensor:
    images = _read_idx(path, dimensions=3)
    count, height, width = images.shape
    if count == 0:
        raise DataError(f"{path} holds no images; at least one is needed")
    if min(height, width) < _SMALLEST_SIDE:
        raise DataError(
            f"{path} holds images of {height} x {width} pixels; allowed: at least "
            f"{_SMALLEST_SIDE} x {_SMALLEST_SIDE}"
        )
    return images


def _read_labels(path: Path) -> torch.Tensor:
    labels = _read_idx(path, dimensions=1)
    if len(labels) == 0:
        raise DataError(f"{path} holds no labels; at least one is needed")
    if int(labels.max()) >= _CLASSES:
        raise DataError(
            f"{path} holds the label {int(labels.max())}; allowed: 0 to {_CLASSES - 1}, the "
            f"network of the demo tells {_CLASSES} classes apart"
        )
    return labels


def _read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Read an IDX file of bytes: magic, sizes (big-endian), then the bytes."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    expected = 0x0800 + dimensions
    magic = struct.unpack(">I", content[:4])[0] if len(content) >= header else None
    if magic != expected:
        raise DataError(
            f"{path} is no IDX file of {dimensions} dimensions of bytes: it starts with "
            f"{content[:4].hex() or 'nothing'} instead of {expected:08x}"
        )
    sizes = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) != header + math.prod(sizes):
        raise DataError(
            f"{path} is damaged: {len(content) - header} bytes of data where its header promises "
            f"{math.prod(sizes)}"
        )
    if math.prod(sizes) == 0:
        return torch.zeros(sizes, dtype=torch.uint8)  # frombuffer refuses empty buffers
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(sizes)
