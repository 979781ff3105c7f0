"""Folders of images: found, decoded to [0, 1] and stacked.

One folder per class, with any folders below it. Every file that Pillow can open is read, whatever its ending;
a file that is no image is left out and listed. A picture whose values have no clear scale, such as 32-bit
integers, is an error that names the file.
"""

import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .extras import needed

Floats = NDArray[np.float32]

_DEPTHS = {"8-bit": 255, "16-bit": 65535}


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images of a folder.

    Parameters
    ----------
    x : ndarray of float32, (N, C, H, W)
        Pixels in [0, 1]; one channel for grey, else three.
    files : tuple of Path
        Each image's path in the folder.
    depth : str
        {"8-bit", "16-bit", "float"}: of all images.
    skipped : tuple of (str, str)
        What was left out, and why.
    """

    x: Floats
    files: tuple[Path, ...]
    depth: str
    skipped: tuple[tuple[str, str], ...]


def read_pictures(path: Path, in_classes: bool) -> Pictures | None:
    """Return the images in the class folders, or those directly in the folder; None if there are none.

    Raises
    ------
    ValueError
        If an image cannot be read as it is, or differs from the first in shape or depth; it names the file.
    """
    image = needed("PIL.Image", "data", "an image")
    files, skipped = [], []
    for file in _files(path):
        if any(part.startswith(".") for part in file.parts):
            skipped.append((str(file), "hidden"))
        elif (len(file.parts) > 1) is not in_classes:
            skipped.append((str(file), "not in a class folder" if in_classes else "in a folder"))
        elif _is_image(image, path, file):
            files.append(file)
        else:
            skipped.append((str(file), "no image"))
    if not files:
        return None
    first, depth, _ = _pixels(image, path, files[0])
    x = np.empty((len(files), *first.shape), np.float32)
    for sample, file in zip(x, files, strict=True):
        pixels, own, left = _pixels(image, path, file)
        if pixels.shape != first.shape:
            raise ValueError(
                f"{file} must have the shape of {files[0]}, {first.shape} (channels, height, width), got "
                f"{pixels.shape}"
            )
        if own != depth:
            raise ValueError(
                f"{file} must be {depth}, as {files[0]} is, got {own}: their scales differ, so save all "
                "images with one depth"
            )
        if left:
            skipped.append((str(file), left))
        sample[:] = pixels
    return Pictures(x, tuple(files), depth, tuple(skipped))


def _files(path: Path) -> list[Path]:
    """Return all files below a folder, through links too, relative to it and sorted."""
    return sorted(file.relative_to(path) for file in _walked(path, frozenset()))


def _walked(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    above |= {folder.resolve()}
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            yield entry
        elif entry.resolve() not in above:  # A link upwards would never end.
            yield from _walked(entry, above)


def _is_image(image: Any, folder: Path, file: Path) -> bool:
    """Return whether Pillow recognises a file; ValueError if it does not, but the name is an image's."""
    try:
        with image.open(folder / file):
            return True
    except Exception as error:
        named = (mimetypes.guess_type(file.name)[0] or "").startswith("image/")
        if isinstance(error, image.UnidentifiedImageError) and not named and not _registered(image, file):
            return False
        raise ValueError(f"{file} must be an image that Pillow reads ({error})") from error


def _registered(image: Any, file: Path) -> bool:
    return image.registered_extensions().get(file.suffix.lower()) in image.OPEN


def _pixels(image: Any, folder: Path, file: Path) -> tuple[Floats, str, str]:
    try:
        # By its content: of a path, Pillow maps the file, and turns some TIFFs wrongly.
        with (folder / file).open("rb") as content, image.open(content) as opened:
            return decoded(opened)
    except Exception as error:  # A damaged image fails in many ways.
        raise ValueError(f"{file} must be an image that Pillow reads ({error})") from error


def decoded(picture: Any) -> tuple[Floats, str, str]:
    """Return a Pillow image as (C, H, W) in [0, 1], its depth, and what was left out of it, if anything.

    It is turned upright as its EXIF orientation says. Grey images have one channel, all others three.

    Raises
    ------
    ValueError
        If it has several pages, transparent pixels, or values without a scale.
    """
    left = ""
    if picture.format == "MPO":  # A camera's JPEG; the pictures after the first are previews or depths.
        left = "pictures after the first, which a camera adds to a JPEG"
    elif (pages := getattr(picture, "n_frames", 1)) > 1:
        raise ValueError(f"it must have one page, got {pages}: save each as a file of its own")
    if _loses_bits(picture):
        left = "the lower 8 of 16 bits a colour, which Pillow does not read"
    scale_is_known = picture.format in ("PNG", "PPM")
    picture.load()
    transpose = needed("PIL.ImageOps", "data", "an image").exif_transpose
    picture = transpose(picture)
    mode = picture.mode
    if mode == "F":
        pixels = np.asarray(picture, np.float32)[None]
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN too
            raise ValueError(
                f"floating-point pixels must be from 0 to 1, got {pixels.min():g} to {pixels.max():g}: "
                "rescale them, or use an .npz"
            )
        return pixels, "float", left
    if mode.startswith("I;16") or (mode == "I" and scale_is_known):
        return _scaled(picture, "16-bit")[None], "16-bit", left
    if mode.startswith("I"):
        raise ValueError(
            "32-bit integers have no scale: save 16-bit integers, or floating-point pixels from 0 to 1"
        )
    if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema()[0] < 255:
        raise ValueError("it must have no transparent pixels: save it on a background")
    if mode in ("1", "L", "LA", "La"):
        return _scaled(picture.convert("L"), "8-bit")[None], "8-bit", left
    return _scaled(picture.convert("RGB"), "8-bit").transpose(2, 0, 1), "8-bit", left


def _scaled(picture: Any, depth: str) -> Floats:
    return np.asarray(picture, np.float32) / np.float32(_DEPTHS[depth])


def _loses_bits(picture: Any) -> bool:
    """Return whether Pillow reduces 16 bits a colour to 8."""
    if picture.mode not in ("RGB", "RGBA", "LA") or not picture.tile:
        return False
    args = picture.tile[0][3]
    parts = args if isinstance(args, tuple) else (args,)
    most = max((part for part in parts if isinstance(part, int)), default=0)
    return any(";16" in str(part) for part in parts) or (picture.format == "PPM" and most > 255)
