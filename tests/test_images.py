"""Pictures are what PIL reads, the crops and flips are drawn from seed, epoch and number, and bad files are named."""

import io
import math
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import run
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from training import DDP, ENV, command, image_folder, load, photograph, status

SEED, SIZE = 3, 32


@pytest.fixture(scope="module")
def recipe():
    return load(DDP)


def encoded(picture, form, **options):
    box = io.BytesIO()
    picture.save(box, form, **options)
    return box.getvalue()


def files():
    """{name: bytes}, all of which PIL reads. No crop of 36 x 30 pixels is scaled down to 32 x 32."""
    small, big = photograph(36, 30), photograph(640, 480)
    noise = np.random.default_rng(1).integers(256, size=(30, 36, 4))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    deep = Image.fromarray((np.arange(36 * 30).reshape(30, 36) * 60).astype(np.uint16))
    noisy = Image.fromarray(noise.astype(np.uint8), "RGBA")
    jpeg = encoded(small, "JPEG", quality=90)
    spoilt = bytearray(encoded(big, "JPEG"))
    spoilt[len(spoilt) // 2 : len(spoilt) // 2 + 20] = bytes(range(20))
    return {
        "plain.jpg": jpeg,
        "grey.jpg": encoded(small.convert("L"), "JPEG"),
        "cmyk.jpg": encoded(small.convert("CMYK"), "JPEG"),
        "rgb inside.jpg": encoded(small, "JPEG", keep_rgb=True),
        "progressive.jpg": encoded(small, "JPEG", progressive=True),
        "fine colour.jpg": encoded(small, "JPEG", subsampling=0),
        "rotated by exif.jpg": encoded(small, "JPEG", exif=rotated),
        "trailing bytes.jpg": jpeg + b"more",
        "two pictures.jpg": encoded(small, "MPO", save_all=True, append_images=[small]),
        "a png.jpg": encoded(small, "PNG"),
        "a jpeg.png": jpeg,
        "palette.png": encoded(small.convert("P"), "PNG"),
        "palette with transparency.png": encoded(small.convert("P"), "PNG", transparency=3),
        "rgba.png": encoded(noisy, "PNG"),
        "grey and alpha.png": encoded(noisy.convert("LA"), "PNG"),
        "one bit.png": encoded(small.convert("1"), "PNG"),
        "16 bit.png": encoded(deep, "PNG"),
        "a.webp": encoded(small, "WEBP", lossless=True),
        "a.bmp": encoded(small, "BMP"),
        "a.tiff": encoded(small.convert("CMYK"), "TIFF"),
        "one pixel.png": encoded(small.resize((1, 1)), "PNG"),
        "line.jpg": encoded(photograph(300, 2), "JPEG"),
        "big.jpg": encoded(big, "JPEG", quality=95),
        "big grey.jpg": encoded(big.convert("L"), "JPEG", quality=95),
        "big progressive.jpg": encoded(big, "JPEG", quality=95, progressive=True),
        "big and upright.jpg": encoded(photograph(481, 643), "JPEG", quality=95),
        "big cmyk.jpg": encoded(big.convert("CMYK"), "JPEG"),
        "big and spoilt.jpg": bytes(spoilt),
    }


FILES = files()
SCALED = {name for name in FILES if name.startswith("big") and name.endswith(".jpg")}


def images(recipe, folder, train, **options):
    """All of FILES, as the recipe loads them."""
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    config = recipe.Config(**{"data": str(folder), "image_size": SIZE, "seed": SEED, **options})
    paths = np.array([bytes(folder / name) for name in FILES])
    return recipe.Images(paths, np.arange(len(paths)), config, train=train)


def expected(data, train, epoch, index, parts=1):
    """PIL's picture, or every so many of its pixels averaged, cropped, resized and flipped by what (SEED, epoch,
    index) draws."""
    picture = Image.open(io.BytesIO(data)).convert("RGB").reduce(parts)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    torch.manual_seed(int(np.random.SeedSequence((SEED, epoch, index)).generate_state(1)[0]))
    if train:
        top, left, height, width = RandomResizedCrop.get_params(picture, (0.08, 1), (3 / 4, 4 / 3))
        part, shape = pixels[:, top : top + height, left : left + width], (SIZE, SIZE)
    else:
        part, shape = pixels, [int(edge * round(SIZE / 0.875) / min(picture.size)) for edge in pixels.shape[1:]]
    part = F.interpolate(part[None], shape, mode="bilinear", antialias=True)[0]
    top, left = (round((edge - SIZE) / 2) for edge in part.shape[1:])
    part = part[:, top : top + SIZE, left : left + SIZE]
    return part.flip(2) if train and torch.rand(()) < 0.5 else part


def decibel(one, other):
    return float(-10 * ((one.double() - other.double()).pow(2).mean() / 255**2).clamp(min=1e-12).log10())


@pytest.mark.parametrize("train", [False, True], ids=["val", "train"])
def test_pictures_are_those_of_pil(recipe, tmp_path, train):
    dataset, scaled = images(recipe, tmp_path, train), {}
    for epoch in range(8 if train else 1):
        got, labels = dataset[[(epoch, index) for index in range(len(FILES))]]
        assert labels.tolist() == list(range(len(FILES)))
        for index, (name, data) in enumerate(FILES.items()):
            if not torch.equal(got[index], expected(data, train, epoch, index)):
                assert name in SCALED, f"{name}: only a large JPEG may differ"
                quarter = decibel(got[index], expected(data, train, epoch, index, parts=4))
                scaled[name] = min(scaled.get(name, math.inf), quarter)
    assert scaled.keys() == (SCALED if train else set()), "only for training is a JPEG scaled"
    assert all(each >= 35 for each in scaled.values()), scaled


def test_draws_depend_on_seed_epoch_and_number_alone(recipe, tmp_path):
    dataset = images(recipe, tmp_path, train=True)
    first = dataset[[(0, 0), (0, 1), (1, 0)]][0]
    torch.manual_seed(99)  # as in another process
    again = dataset[[(1, 0), (0, 0)]][0]
    assert torch.equal(first[0], again[1])
    assert torch.equal(first[2], again[0])
    assert not torch.equal(first[0], first[2]), "another epoch, another crop"
    other = images(recipe, tmp_path, train=True, seed=SEED + 1)[[(0, 0)]][0]
    assert not torch.equal(first[0], other[0]), "another seed, another crop"


def test_order_of_samples(recipe):
    config = recipe.Config(batch_size=24, accumulate=1)

    def global_batches(replicas, accumulate=1, start=0):
        config.accumulate = accumulate
        parts = [list(recipe.train_batches(config, 100, start, 12, k, replicas)) for k in range(replicas)]
        steps = range(12 - start)
        return [
            sorted(key for part in parts for keys in part[step * accumulate : (step + 1) * accumulate] for key in keys)
            for step in steps
        ]

    alone = global_batches(1)
    for step, batch in enumerate(alone):
        assert len(set(batch)) == 24
        assert {epoch for epoch, _ in batch} == {step // 4}
    epochs = [[index for batch in alone[k : k + 4] for _, index in batch] for k in (0, 4, 8)]
    assert all(len(set(epoch)) == 96 for epoch in epochs), "no image twice in an epoch"
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has its own order"
    assert global_batches(3) == global_batches(2, accumulate=4) == alone
    assert global_batches(2, start=5) == alone[5:], "going on is a position in the same stream"


BAD = {
    "truncated.jpg": encoded(photograph(200, 150), "JPEG")[:2000],
    "truncated.png": encoded(photograph(200, 150), "PNG")[:2000],
    "empty.jpg": b"",
    "text.jpg": b"This is no picture.\n",
}


def with_bad_files(folder):
    image_folder(folder, train=8, val=5, form="jpg")
    for name, data in BAD.items():
        (folder / "train" / "b" / name).write_bytes(data)
    (folder / "val" / "c" / "empty.jpg").write_bytes(b"")
    return folder


RUN = shlex.split("--data pictures --image-size 16 --batch-size 14 --epochs 1 --name pictures --log-every 1")


def test_bad_images_are_left_out(tmp_path):
    with_bad_files(tmp_path / "pictures")
    result = run(command(DDP, *RUN, "--on-bad-image", "skip", "--workers", "1"), tmp_path, env=ENV)
    assert result.returncode == 0, result.stderr
    assert "28 + 16 images, 3 classes" in result.stdout
    for name in BAD:
        assert result.stderr.count(f"cannot read pictures/train/b/{name}: ") == 1
    assert result.stderr.count("cannot read pictures/val/c/empty.jpg: ") == 1
    assert "/15); at most" in result.stdout, "accuracy is of the images that could be read"


def test_a_bad_image_ends_the_run(tmp_path):
    with_bad_files(tmp_path / "pictures")
    result = run(command(DDP, *RUN, processes=2), tmp_path, env=ENV)
    assert result.returncode == 1
    assert "cannot read pictures/train/b/" in result.stderr
    assert status(tmp_path / "runs" / "pictures")["status"] == "failed"
    assert "finished" not in result.stdout
