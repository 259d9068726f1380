"""A page of charts as one HTML file with inline SVG. Nothing comes from outside; without JavaScript only the hover is
missing."""

from __future__ import annotations

import json
from html import escape

from titanlite.tools.plot_charts import THEME, Dot, Drawing, Line, Page, drawings


def html(page: Page) -> str:
    """One file without anything from outside; without JavaScript only the hover is missing."""
    drawn = drawings(page)
    head = "".join(f"<th>{escape(column)}</th>" for column in page.columns)
    rows = ""
    for i, row in enumerate(page.rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        rows += f'<tr><td><i style="background:var(--run{i})"></i>{escape(row[0])}</td>{cells}</tr>\n'
    data = {
        "runs": [row[0] for row in page.rows],
        "charts": [
            {
                "left": round(d.left, 1),
                "right": round(d.right, 1),
                "curves": [
                    {
                        "run": reading.run,
                        "name": reading.name,
                        "points": [[round(px, 1), round(py, 1), x, y] for px, py, x, y in reading.points],
                    }
                    for reading in d.readings
                ],
            }
            for d in drawn
        ],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # a run's name may hold </script>
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in THEME.items()) for i in (0, 1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(page.title)}</title>
<style>
:root {{color-scheme:light;{light}}}
@media (prefers-color-scheme: dark) {{:root:not([data-theme=light]) {{color-scheme:dark;{dark}}}}}
:root[data-theme=dark] {{color-scheme:dark;{dark}}}
{_CSS}</style>
</head>
<body>
<main>
<header><div><h1>{escape(page.title)}</h1><p>{escape(page.subtitle)}</p></div><button>light / dark</button></header>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
<div class="charts" style="--columns:{len(drawn) - 1}">
{"".join(map(_svg, drawn))}</div>
</main>
<div id="tip" hidden></div>
<script type="application/json" id="data">{text}</script>
<script>
{_SCRIPT}</script>
</body>
</html>
"""


def _svg(drawing: Drawing) -> str:
    lines = [f'<div class="card"><svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img">']
    for mark in drawing.marks:
        ink = f"var(--{mark.color})"
        if isinstance(mark, Line):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
            style = f"stroke:{ink};stroke-width:{mark.width:g};opacity:{mark.opacity:g}"
            tag = f'<polyline class="{mark.kind}" data-color="{mark.color}" points="{points}" style="{style}"/>'
        elif isinstance(mark, Dot):
            place = f'cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{mark.radius:g}"'
            tag = f'<circle class="{mark.kind}" data-color="{mark.color}" {place} style="stroke:{ink}"/>'
        else:
            style = f"fill:{ink};font-size:{mark.size:g}px;text-anchor:{mark.anchor}"
            place = f'x="{mark.x:.1f}" y="{mark.y:.1f}"'
            tag = f'<text class="{mark.kind}" {place} style="{style}">{escape(mark.text)}</text>'
        lines.append(tag)
    guide = f'<line class="guide" y1="{drawing.top:g}" y2="{drawing.bottom:g}"/>'
    return "\n".join([*lines, guide, "</svg></div>\n"])


_CSS = """\
body {margin:0; background:var(--page); color:var(--ink);
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main {max-width:1500px; margin:0 auto; padding:28px 36px 36px}
header {display:flex; justify-content:space-between; align-items:start; gap:24px}
h1 {font-size:24px; line-height:1.25; margin:0; font-weight:650; overflow-wrap:anywhere}
p {margin:4px 0 18px; color:var(--muted)}
button {font:inherit; font-size:12px; white-space:nowrap; color:var(--muted); background:var(--card); cursor:pointer;
  border:1px solid var(--edge); border-radius:7px; padding:4px 10px}
.scroll {overflow-x:auto; margin-bottom:18px}
table {border-collapse:collapse; font-variant-numeric:tabular-nums; white-space:nowrap}
th {font-weight:400; font-size:12px; color:var(--muted)}
th, td {text-align:right; padding:2px 0 2px 34px}
th:first-child, td:first-child {text-align:left; padding-left:0}
i {display:inline-block; width:18px; height:4px; border-radius:2px; margin-right:10px; vertical-align:middle}
.charts {display:grid; gap:16px; grid-template-columns:repeat(var(--columns),minmax(0,1fr))}
.card {background:var(--card); border:1px solid var(--edge); border-radius:12px; overflow-x:auto}
.card:first-child {grid-column:1/-1}
svg {display:block; width:100%; font-family:inherit; font-variant-numeric:tabular-nums}
circle {fill:var(--card); stroke-width:2}
polyline {fill:none; stroke-linejoin:round; stroke-linecap:round}
.grid, .axis, .guide {shape-rendering:crispEdges}
.title {font-weight:600}
.guide {stroke:var(--muted); stroke-dasharray:3 3; visibility:hidden}
#tip {position:fixed; pointer-events:none; background:var(--card); border:1px solid var(--edge); border-radius:9px;
  padding:7px 12px; font-size:13px; box-shadow:0 4px 18px #0003; font-variant-numeric:tabular-nums; z-index:1}
#tip div {display:flex; align-items:center; gap:4px; white-space:nowrap}
#tip b {margin-left:auto; padding-left:18px; font-weight:600}
@media (max-width: 900px) {
  main {padding:18px 14px} .charts {grid-template-columns:minmax(0,1fr)} .card:first-child svg {min-width:720px}
}
"""

_SCRIPT = """\
const root = document.documentElement, tip = document.getElementById('tip');
const data = JSON.parse(document.getElementById('data').textContent);
const svgs = [...document.querySelectorAll('svg')];
const format = v => typeof v === 'string' ? v : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString('en') :
  v && Math.abs(v) < 1e-3 ? v.toExponential(3) : String(+v.toPrecision(6));
const row = (text, value, run) => {
  const line = tip.appendChild(document.createElement('div'));
  if (run !== undefined) line.appendChild(document.createElement('i')).style.background = `var(--run${run})`;
  line.append(text);
  line.appendChild(document.createElement('b')).textContent = value;
};
const clear = () => { tip.hidden = true; svgs.forEach(s => s.querySelector('.guide').style.visibility = 'hidden'); };
svgs.forEach((svg, n) => {
  const chart = data.charts[n];
  svg.addEventListener('pointerleave', clear);
  svg.addEventListener('pointermove', event => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const share = (x - chart.left) / (chart.right - chart.left);
    if (share < -0.01 || share > 1.01) return clear();
    svgs.forEach((other, m) => {
      const guide = other.querySelector('.guide'), {left, right} = data.charts[m];
      guide.setAttribute('x1', left + share * (right - left));
      guide.setAttribute('x2', left + share * (right - left));
      guide.style.visibility = 'visible';
    });
    const near = chart.curves.filter(c => c.points.length).map(c => ({...c, at: c.points.reduce(
      (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)})).filter(c => Math.abs(c.at[0] - x) < 60);
    tip.replaceChildren();
    tip.hidden = !near.length;
    near.forEach(c => row(`${data.runs.length > 1 ? data.runs[c.run] + ' ' : ''}${c.name} at ` +
      Math.round(c.at[2]).toLocaleString('en'), format(c.at[3]), c.run));
    const box = tip.getBoundingClientRect();
    tip.style.left = (event.clientX + 18 + box.width > innerWidth ? event.clientX - 18 - box.width :
      event.clientX + 18) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - box.height - 8) + 'px';
  });
});
document.querySelector('button').onclick = () => {
  const dark = root.dataset.theme ?
    root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
};
"""
