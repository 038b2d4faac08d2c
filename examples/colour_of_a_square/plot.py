"""The plot of a run, as an SVG that reads on light and dark pages."""

import base64

import numpy as np

from pictures import COLOURS, png

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 60, 700, 50, 280
SHOWN_COLUMNS, SHOWN_ROWS, CELL = 8, 2, 80
SMOOTH_STEPS = 10
STYLE = """
text { font: 12px sans-serif; fill: #333 } .title { font-size: 15px; font-weight: 600 } .wrong { fill: #c22; font-weight: 600 }
.grid { stroke: #8883 } .axis { stroke: #888 } path { fill: none; stroke-width: 2 }
.loss { stroke: #8888 } .unseen { stroke: #27b } .right { stroke: #e70 } image { image-rendering: pixelated }
@media (prefers-color-scheme: dark) { text { fill: #ccc } .wrong { fill: #f66 } .unseen { stroke: #5af } .right { stroke: #fa3 } }
"""


def text(x, y, content, anchor="start", kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{content}</text>'


def line(points, kind):
    return f'<path class="{kind}" d="M{" L".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def curves(losses, rows):
    """Loss on the left axis, right answers on the right one, steps below."""
    steps = rows[-1]["step"]
    loss_top = 2 * int(np.ceil(max([row["unseen_loss"] for row in rows] + losses) / 2))

    def across(step):
        return LEFT + (RIGHT - LEFT) * step / steps

    def up(share):
        return BOTTOM - (BOTTOM - TOP) * share

    parts = []
    for quarter in range(5):
        share = quarter / 4
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{up(share):.1f}" y2="{up(share):.1f}"/>')
        parts.append(text(LEFT - 8, up(share) + 4, f"{share * loss_top:g}", "end"))
        parts.append(text(RIGHT + 8, up(share) + 4, f"{share:.0%}"))
        parts.append(text(across(share * steps), BOTTOM + 18, f"{share * steps:g}", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT},{TOP} V{BOTTOM} H{RIGHT} V{TOP}" style="stroke-width:1"/>')
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 36, f"steps ({rows[-1]['seconds']:.0f} s in all)", "middle"))
    smooth = [(end, np.mean(losses[max(0, end - SMOOTH_STEPS) : end])) for end in range(1, len(losses) + 1)]
    parts.append(line([(across(step), up(loss / loss_top)) for step, loss in smooth], "loss"))
    parts.append(line([(across(row["step"]), up(row["unseen_loss"] / loss_top)) for row in rows], "unseen"))
    parts.append(line([(across(row["step"]), up(row["accuracy"])) for row in rows], "right"))
    chance = up(1 / len(COLOURS))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{chance:.1f}" y2="{chance:.1f}" stroke-dasharray="3 5"/>')
    parts.append(text(RIGHT - 6, chance - 5, "chance", "end"))
    legend = [("loss", "loss in training (left)"), ("unseen", "loss on unseen pictures (left)"), ("right", "unseen pictures right (right)")]
    for place, (kind, words) in enumerate(legend):
        x = LEFT + 215 * place
        parts += [line([(x, TOP - 14), (x + 22, TOP - 14)], kind), text(x + 28, TOP - 10, words)]
    return parts


def sheet(pictures, said):
    """Pictures with what was said to them; where that is wrong, what is right."""
    parts = []
    shown = list(zip(pictures, said, strict=True))[: SHOWN_COLUMNS * SHOWN_ROWS]
    for place, ((pixels, name), answer) in enumerate(shown):
        row, column = divmod(place, SHOWN_COLUMNS)
        x, y = LEFT - 25 + column * (CELL + 10), HEIGHT + 20 + row * (CELL + 30)
        height, width, _ = pixels.shape
        scale = CELL / max(height, width)
        width, height = width * scale, height * scale
        # Every second pixel, as the file is part of a page.
        data = base64.b64encode(png(pixels[::2, ::2])).decode()
        parts.append(
            f'<image x="{x + (CELL - width) / 2:.1f}" y="{y + (CELL - height) / 2:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'href="data:image/png;base64,{data}"/>'
        )
        # An answer is whatever the model said, which may be no colour at all.
        answer = "".join(letter for letter in answer if letter.isalnum())[:12]
        words = (f"{answer} ✓", "") if answer == name else (f"{answer} ✗ {name}", "wrong")
        parts.append(text(x + CELL / 2, y + CELL + 15, words[0], "middle", words[1]))
    return parts


def plot(path, title, losses, rows, pictures, said):
    """Writes the curves of a run, and some unseen pictures with what was said to them."""
    height = HEIGHT + 20 + SHOWN_ROWS * (CELL + 30)
    parts = [text(LEFT, 20, title, kind="title"), *curves(losses, rows), *sheet(pictures, said)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    path.write_text("\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n")
