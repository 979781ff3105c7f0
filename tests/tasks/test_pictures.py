"""Folders of images: decoded right, or an error that names the file; nothing is skipped without a word."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hedgerow.tasks import OwnData, OwnSource, parse_classes, read_own

Image = pytest.importorskip("PIL.Image")
TiffImagePlugin = pytest.importorskip("PIL.TiffImagePlugin")

GREY = np.arange(0, 240, 4, np.uint8).reshape(6, 10)
RGB = np.stack([GREY, GREY[::-1], 240 - GREY], axis=-1)


def read(folder: Path) -> OwnData:
    return read_own(OwnSource.of({"data": str(folder)}), parse_classes("0,1"))


def saved(folder: Path, name: str, pixels: Any = GREY, **options: Any) -> Path:
    """Save an image beside one of the other class, and return the data set's folder."""
    for path in (folder / "0" / "first.png", folder / "1" / name):
        path.parent.mkdir(parents=True, exist_ok=True)
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    picture.save(folder / "1" / name, **options)
    return folder


def alone(folder: Path, name: str, pixels: Any = GREY, **options: Any) -> np.ndarray:
    """Return the one image of a data set."""
    data = read(saved(folder, name, pixels, **options))
    assert len(data.x) == 1
    return data.x[0]


def endings() -> list[str]:
    """Return the endings that Pillow writes and reads here."""
    Image.init()
    both = {
        e for e, form in Image.registered_extensions().items() if form in Image.OPEN and form in Image.SAVE
    }
    # No image of one page of grey, or no image without another program.
    return sorted(
        both
        - {
            ".blp",
            ".eps",
            ".ps",
            ".bufr",
            ".grib",
            ".h5",
            ".hdf",
            ".wmf",
            ".emf",
            ".xbm",
            ".msp",
            ".ico",
            ".icns",
            ".mpo",
        }
    )


LOSSY = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".webp",
    ".avif",
    ".avifs",
    ".j2c",
    ".j2k",
    ".jp2",
    ".jpc",
    ".jpf",
    ".jpx",
}


@pytest.mark.parametrize("ending", endings())
def test_every_ending_that_pillow_opens_is_read(tmp_path: Path, ending: str) -> None:
    try:
        x = alone(tmp_path, f"a{ending}", RGB)
    except OSError as error:
        pytest.skip(f"Pillow does not save RGB as {ending}: {error}")
    if ending == ".pbm" and x.shape[0] == 1:
        return
    expected = RGB.transpose(2, 0, 1) / 255
    assert x.shape == expected.shape
    assert abs(x - expected).mean() < (0.12 if ending in LOSSY or ending == ".gif" else 1e-6)


def test_images_in_folders_below_a_class_and_without_an_ending_are_read(tmp_path: Path) -> None:
    saved(tmp_path, "a.png")
    saved(tmp_path / "1" / "2024", "deep.png")
    Image.fromarray(GREY).save(tmp_path / "0" / "scan", format="PNG")
    (tmp_path / "more").mkdir()
    data = read_own(OwnSource.of({"data": str(tmp_path)}), parse_classes("0,1"))
    assert (data.x.shape, data.y.tolist()) == ((3, 1, 6, 10), [0, 1, 1])


def test_a_link_to_a_folder_is_followed_and_a_circle_ends(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere", "a.png")
    folder = saved(tmp_path / "set", "b.png")
    (folder / "1" / "more").symlink_to(tmp_path / "elsewhere" / "1")
    (folder / "1" / "circle").symlink_to(folder)
    assert len(read(folder).x) == 2


def test_what_is_no_image_is_left_out_with_a_word(tmp_path: Path) -> None:
    folder = saved(tmp_path, "a.png")
    for name in ("1/notes.txt", "1/.DS_Store", "labels.csv", "1/Thumbs.db"):
        (folder / name).write_text("no image")
    Image.fromarray(GREY).save(folder / "top.png")
    reading = read(folder).reading
    assert reading is not None
    assert {*reading.skipped} == {
        ("1/notes.txt", "no image"),
        ("1/.DS_Store", "hidden"),
        ("1/Thumbs.db", "no image"),
        ("labels.csv", "not in a class folder"),
        ("top.png", "not in a class folder"),
    }


@pytest.mark.parametrize("name", ["a.png", "a.heic", "a.svg", "a.jp2"])
def test_a_file_with_an_images_name_that_is_none_is_an_error(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, "b.png")
    (folder / "1" / name).write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"1/{name} must be an image that Pillow reads"):
        read(folder)


# Scales.


def test_floats_are_read_as_they_are(tmp_path: Path) -> None:
    pixels = (GREY / 255).astype(np.float32)
    assert np.array_equal(alone(tmp_path, "a.tif", pixels)[0], pixels)


@pytest.mark.parametrize(
    "pixels", [GREY * np.float32(1.5), GREY / np.float32(255) - 0.1, np.full((2, 2), np.nan, np.float32)]
)
def test_floats_beyond_0_to_1_are_an_error(tmp_path: Path, pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"1/a\.tif must be .*floating-point pixels must be from 0 to 1"):
        alone(tmp_path, "a.tif", pixels.astype(np.float32))


def test_16_bits_are_scaled_and_32_are_an_error(tmp_path: Path) -> None:
    wide = GREY.astype(np.uint16) * 257
    for name in ("a.png", "a.tif", "a.pgm"):
        x = alone(tmp_path / name, name, wide)
        assert x[0] == pytest.approx(GREY / 255, abs=1e-6), name
    with pytest.raises(ValueError, match=r"1/a\.tif .*32-bit integers have no scale"):
        alone(tmp_path / "32", "a.tif", GREY.astype(np.int32) * 400)


@pytest.mark.parametrize("other", [GREY.astype(np.uint16) * 257, (GREY / 255).astype(np.float32)])
def test_images_of_another_depth_are_an_error_in_one_set_and_another_type_at_another_site(
    tmp_path: Path, other: np.ndarray
) -> None:
    folder = saved(tmp_path, "a.tif")
    site = saved(tmp_path.with_name(f"{tmp_path.name}-other"), "a.tif", other)
    assert read(folder).dtype == "float32"
    assert read(site).dtype in ("float32[16-bit]", "float32[float]")
    (site / "1" / "a.tif").rename(folder / "1" / "b.tif")
    with pytest.raises(ValueError, match=r"1/b\.tif must be 8-bit, as 1/a\.tif is, got (16-bit|float)"):
        read(folder)


def test_16_bit_colours_that_pillow_reduces_are_named(tmp_path: Path) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in RGB.astype(np.uint16) * 257)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 6, 16, 2, 0, 0, 0))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "a.png").write_bytes(png + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    data = read(tmp_path)
    assert data.x[0] == pytest.approx(RGB.transpose(2, 0, 1) / 255)
    assert data.reading is not None
    assert data.reading.skipped == (
        ("1/a.png", "the lower 8 of 16 bits a colour, which Pillow does not read"),
    )


# Pages, orientation, transparency.


@pytest.mark.parametrize("name", ["a.tif", "a.gif", "a.png", "a.webp"])
def test_pages_after_the_first_are_an_error(tmp_path: Path, name: str) -> None:
    pages = [Image.fromarray(GREY), Image.fromarray(240 - GREY)]
    with pytest.raises(ValueError, match=rf"1/{name} .*must have one page, got 2"):
        alone(tmp_path, name, pages[0], save_all=True, append_images=pages[1:])


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif"])
@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(1, GREY), (3, GREY[::-1, ::-1]), (6, np.rot90(GREY, -1)), (8, np.rot90(GREY))],
)
def test_an_image_is_turned_upright(tmp_path: Path, name: str, orientation: int, turned: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if name == "a.jpg" else {}
    x = alone(tmp_path, name, GREY, exif=exif, **options)
    assert x.shape[1:] == turned.shape
    assert x[0] == pytest.approx(turned / 255, abs=0.05)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_are_an_error_and_opaque_ones_are_not(tmp_path: Path, mode: str) -> None:
    plain = Image.fromarray(GREY if mode == "LA" else RGB)
    alpha = np.full(GREY.shape, 255, np.uint8)
    for kind in ("opaque", "clear"):
        if mode == "P":
            picture, options = plain.convert("P"), {"transparency": 0} if kind == "clear" else {}
            picture.putpixel((0, 0), 0)
        else:
            picture, options = plain.convert("LA" if mode == "LA" else "RGBA"), {}
            picture.putalpha(Image.fromarray(alpha))
            alpha[0, 0] = 7
        folder = tmp_path / kind
        if kind == "clear":
            with pytest.raises(ValueError, match=r"1/a\.png .*no transparent pixels"):
                alone(folder, "a.png", picture, **options)
        elif mode != "P":
            expected = plain.convert("RGB") if mode != "LA" else plain
            x = alone(folder, "a.png", picture, **options)
            assert x == pytest.approx(np.atleast_3d(np.asarray(expected)).transpose(2, 0, 1) / 255)


def test_a_saved_data_set_decodes_its_images_alike(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = saved(tmp_path, "a.tif", (GREY / 255).astype(np.float32))
    rows = {"image": [str(folder / "1" / "a.tif")], "label": [1]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.save_to_disk(str(tmp_path / "saved"))
    found = read(tmp_path / "saved")
    assert np.array_equal(found.x, read(folder).x)
    assert found.dtype == read(folder).dtype == "float32[float]"
