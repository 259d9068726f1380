"""A page of charts as a PNG in its light theme, by Pillow, which comes with tensorboard."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw, ImageFont, __version__, features

from titanlite.tools.plot_charts import GAP, MARGIN, THEME, WIDTH, Dot, Line, Page, Words, drawings

if not features.check("freetype2") or tuple(map(int, __version__.split(".")[:2])) < (10, 4):
    raise ImportError("Pillow without a font of its own, or without circles")

_OUT, _FINER = 2, 2  # pixels of the file for one of the layout; and while painting, since Pillow's lines are jagged
_SCALE = _OUT * _FINER


def png(page: Page) -> bytes:
    """The page at twice its size in pixels."""
    drawn = drawings(page)
    table_top = 92.0
    charts_top = table_top + 22 * (len(page.rows) + 1) + 18
    height = charts_top + drawn[0].height + GAP + drawn[1].height + MARGIN
    brush = _Brush(WIDTH, height)
    brush.mark(Words("title", MARGIN, 50, page.title, "ink", 24))
    brush.mark(Words("title", MARGIN, 73, page.subtitle, "muted", 13))
    _table(page, brush, table_top)
    left = MARGIN
    for i, drawing in enumerate(drawn):
        top = charts_top + (drawn[0].height + GAP if i else 0)
        brush.card(left, top, drawing.width, drawing.height)
        for mark in drawing.marks:
            brush.mark(mark, left, top)
        left = left + drawing.width + GAP if i else MARGIN
    return brush.file()


def _table(page: Page, brush: _Brush, top: float) -> None:
    """The names with their colors, then columns aligned to the right."""
    edge = MARGIN
    for number, column in enumerate(page.columns):
        cells = [row[number] for row in page.rows]
        wide = max(brush.width(column, 12), *(brush.width(cell, 14) for cell in cells))
        edge += 28 + wide if number == 0 else 34 + wide
        at, anchor = (MARGIN + 28, "start") if number == 0 else (edge, "end")
        brush.mark(Words("head", at if number else MARGIN, top + 14, column, "muted", 12, anchor))
        for i, cell in enumerate(cells):
            y = top + 14 + 22 * (i + 1)
            brush.mark(Words("cell", at, y, cell, "ink", 14, anchor))
            if number == 0:
                brush.mark(Line("swatch", [(MARGIN, y - 5), (MARGIN + 18, y - 5)], f"run{i}", 4))


class _Brush:
    """Paints marks on an image."""

    def __init__(self, width: float, height: float) -> None:
        self._fonts: dict[tuple[float, bool], ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}
        self._image = Image.new("RGB", (int(width * _SCALE), int(height * _SCALE)), _colour("page"))
        self._draw = ImageDraw.Draw(self._image)

    def file(self) -> bytes:
        size = (self._image.width // _FINER, self._image.height // _FINER)
        file = io.BytesIO()
        self._image.resize(size, Image.Resampling.BOX).save(file, "PNG")
        return file.getvalue()

    def width(self, text: str, size: float) -> float:
        return self._font(size, text.isascii()).getlength(text) / _SCALE

    def card(self, left: float, top: float, width: float, height: float) -> None:
        box = [v * _SCALE for v in (left, top, left + width, top + height)]
        self._draw.rounded_rectangle(box, 12 * _SCALE, fill=_colour("card"), outline=_colour("edge"), width=_SCALE)

    def mark(self, mark: Line | Dot | Words, left: float = 0, top: float = 0) -> None:
        if isinstance(mark, Line):
            points = [((x + left) * _SCALE, (y + top) * _SCALE) for x, y in mark.points]
            self._draw.line(points, _colour(mark.color, mark.opacity), round(mark.width * _SCALE), joint="curve")
        elif isinstance(mark, Dot):
            place = ((mark.x + left) * _SCALE, (mark.y + top) * _SCALE)
            self._draw.circle(place, (mark.radius + 1) * _SCALE, _colour("card"), _colour(mark.color), 2 * _SCALE)
        else:
            place = ((mark.x + left) * _SCALE, (mark.y + top) * _SCALE)
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
            font = self._font(mark.size, mark.text.replace("·", "").isascii())
            self._draw.text(place, mark.text, _colour(mark.color), font, anchor)

    def _font(self, size: float, plain: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        """Pillow's own font, which every machine has; where it lacks letters, one of the system's."""
        if (size, plain) not in self._fonts:
            font = ImageFont.load_default(size * _SCALE)
            for name in () if plain else ("DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf"):
                try:
                    font = ImageFont.truetype(name, size * _SCALE)
                    break
                except OSError:
                    continue
            self._fonts[size, plain] = font
        return self._fonts[size, plain]


def _colour(name: str, opacity: float = 1.0) -> tuple[int, int, int]:
    """A color of the light theme, as it looks on a card: Pillow's lines do not blend."""
    over, under = (bytes.fromhex(THEME[n][0][1:]) for n in (name, "card"))
    red, green, blue = (round(opacity * a + (1 - opacity) * b) for a, b in zip(over, under, strict=True))
    return red, green, blue
