"""Pictures of one square each, and the files that they are sent as."""

import math
import struct
import zlib

import numpy as np

COLOURS = {
    "red": (215, 35, 35), "orange": (245, 140, 25), "yellow": (240, 225, 50), "green": (40, 165, 60),
    "blue": (40, 75, 215), "purple": (140, 50, 185), "black": (20, 20, 20), "white": (240, 240, 240),
}
# How far a background is from the square's colour at least, as a distance in RGB.
CONTRAST = 150


def draw(random, unit):
    """A picture, `[height, width, 3]` bytes, of a square on a background, and the name of the square's colour.

    Everything else is chance: where the square is and how large, which other colours are behind it, and how large the picture is, which
    is seldom a whole number of tokens, `unit` pixels wide and high.
    """
    name = str(random.choice(list(COLOURS)))
    # Of a little other hue and light than the name's.
    colour = COLOURS[name] + random.normal(0, 8, 3)
    height, width = random.integers(4 * unit, 7 * unit, 2)
    side = random.integers(unit * 3 // 2, unit * 5 // 2)
    top, left = random.integers(height - side), random.integers(width - side)
    canvas = background(random, height, width, colour)
    canvas[top : top + side, left : left + side] = colour
    # Grain of 4 × 4 pixels.
    grain = random.normal(0, 6, (height // 4 + 1, width // 4 + 1, 3)).repeat(4, 0).repeat(4, 1)
    return np.clip(canvas + grain[:height, :width], 0, 255).astype(np.uint8), name


def background(random, height, width, square):
    """From one colour in the upper left to another in the lower right, and never near to that of the square."""
    while True:
        first, last = random.uniform(0, 255, (2, 3))
        between = first + np.linspace(0, 1, 9)[:, None] * (last - first)
        if np.linalg.norm(between - square, axis=1).min() > CONTRAST:
            break
    way = (np.linspace(0, 0.5, height)[:, None] + np.linspace(0, 0.5, width))[:, :, None]
    return first + way * (last - first)


def token_side(processor):
    """Pixels along a side of what becomes one token."""
    return processor["patch_size"] * processor["merge_size"]


def tokens_of(height, width, processor):
    """Tokens that a picture becomes: its sides are rounded to whole ones, and it is enlarged where it has too few pixels."""
    side, least = token_side(processor), processor["size"]["shortest_edge"]
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side * side < least:
        larger = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * larger / side), math.ceil(width * larger / side)
    return rows * columns


def png(pixels):
    """The file of `[height, width, 3]` bytes."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
