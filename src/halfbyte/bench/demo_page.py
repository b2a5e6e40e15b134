"""The demo's HTML page: one self-contained file, light or dark as the reader's system is."""

import base64
from html import escape

from halfbyte.bench.demo_chart import DARK_THEME, LIGHT_THEME, draw_chart
from halfbyte.bench.demo_result import DemoResult, DemoRow
from halfbyte.nn.report import LinearReport

_STYLE = """
:root { color-scheme: light dark;
  --back: #ffffff; --text: #1f2328; --quiet: #59636e; --line: #d9dee3; --stripe: #f6f8fa;
  --accent: #0b66b0; --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root {
  --back: #161b22; --text: #e6edf3; --quiet: #9aa4af; --line: #343b44; --stripe: #1c222a;
  --accent: #58a9f0; --warn: #f9a870; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem; background: var(--back);
  color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .7rem; }
p, ul { max-width: 52rem; } .quiet { color: var(--quiet); } .warn { color: var(--warn); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-size: .85rem; font-weight: 600; color: var(--quiet); }
tbody tr:hover { background: var(--stripe); }
.best td { font-weight: 600; }
.scroll { overflow-x: auto; }
.layers { max-height: 36rem; overflow: auto; border: 1px solid var(--line); border-radius: 8px; }
.layers table { font-size: .9rem; } .layers th { position: sticky; top: 0;
  background: var(--back); padding: 0; }
.layers th button { all: unset; cursor: pointer; padding: .5rem .7rem; width: 100%;
  box-sizing: border-box; }
.layers th button:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
.layers th[aria-sort=ascending] button::after { content: " \\2191"; }
.layers th[aria-sort=descending] button::after { content: " \\2193"; }
.choices { display: flex; flex-wrap: wrap; gap: .75rem 1.5rem; margin: 0 0 .8rem; }
select { font: inherit; padding: .15rem .4rem; color: inherit; background: var(--back);
  border: 1px solid var(--line); border-radius: 6px; }
img { display: block; width: 100%; height: auto; }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_SCRIPT = """
const table = document.getElementById("layers"), body = table.tBodies[0];
const choices = ["preset", "kind"].map(name => document.getElementById(name));
const show = () => { for (const row of body.rows)
  row.hidden = choices.some(c => c.value && row.dataset[c.id] !== c.value); };
choices.forEach(choice => choice.addEventListener("change", show));
const number = row => cell => parseFloat(row.cells[cell].dataset.value);
table.querySelectorAll("th button").forEach((button, column) => button.onclick = () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") === "descending";
  table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((a, b) => number(a)(column) - number(b)(column));
  body.append(...(up ? rows : rows.reverse()));
});
show();
"""

_SUMMARY_HEADS = (
    "row",
    "perplexity",
    "over as shipped",
    "KL, nats/token",
    "top-1",
    "bytes",
    "bits/weight",
    "seconds",
)
_LAYER_HEADS = (
    "linear",
    "error",
    "SNR, dB",
    "w saturated",
    "w flushed",
    "w zero",
    "x saturated",
    "x flushed",
    "alpha",
    "beta",
)


def make_page(result: DemoResult) -> str:
    """Return the whole HTML document; it loads nothing from elsewhere."""
    quick = (
        '<p class="warn"><strong>A quick check that everything runs, not the protocol.</strong> '
        f"{result.settings.num_layers} decoder layer, {result.settings.num_evaluation} tokens: "
        "the figures mean nothing.</p>"
        if result.settings.is_quick
        else ""
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>halfbyte demo: SmolLM2-135M in 4 bits</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>SmolLM2-135M in 4 bits</h1>
<p class="quiet">What 4-bit weights and 4-bit activations cost a real language model, on this
machine, in {result.seconds:.0f} seconds.</p>
{quick}
<div class="scroll">{_make_summary(result)}</div>
{_make_list(result.notes)}
{_make_picture(result)}
<h2>Every linear</h2>
<p class="quiet">Relative output error ‖y<sub>4-bit</sub> − y‖ / ‖y‖ of each quantized linear on
every fourth calibration row: those that judge the smoothing, and that the rounding has seen with
all others. Blocks of the weight (w) and of those rows (x) whose scale was clamped, rounded to zero,
or that hold zeros alone; the chosen smoothing exponents, 0 for none. A heading sorts.</p>
{_make_layers(result)}
<h2>Protocol</h2>
{_make_list(result.protocol)}
<h2>Machine and versions</h2>
{_make_list(_list_facts(result))}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _make_list(lines: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="quiet">{items}</ul>'


def _make_summary(result: DemoResult) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in _SUMMARY_HEADS)
    rows = "".join(_make_summary_row(result, row) for row in result.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _make_summary_row(result: DemoResult, row: DemoRow) -> str:
    accuracy = row.accuracy
    cells = (
        row.name,
        f"{accuracy.perplexity:.3f}",
        f"{result.perplexity_ratio(row):.4f}",
        f"{accuracy.kl:.4f}",
        f"{accuracy.top1:.1%}",
        f"{row.num_bytes:,}",
        f"{result.bits_per_weight(row):.2f}",
        f"{row.quantize_s + row.evaluate_s:.1f}",
    )
    marked = ' class="best"' if "svdquant" in row.name else ""
    return f"<tr{marked}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _make_picture(result: DemoResult) -> str:
    light, dark = (
        "data:image/png;base64," + base64.b64encode(draw_chart(result, theme)).decode()
        for theme in (LIGHT_THEME, DARK_THEME)
    )
    text = "Bars of perplexity and KL of each row; lines of the error of each decoder layer."
    return (
        f'<h2>Chart</h2><picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{text}"></picture>'
    )


def _make_layers(result: DemoResult) -> str:
    quantized = [row for row in result.rows if row.layers]
    kinds = sorted({_kind(layer) for row in quantized for layer in row.layers})
    heads = "".join(
        f'<th scope="col"><button>{escape(head)}</button></th>' for head in _LAYER_HEADS
    )
    body = "".join(
        _make_layer_row(row.name, index, layer)
        for row in quantized
        for index, layer in enumerate(row.layers)
    )
    presets = _make_options([row.name for row in quantized], selected=quantized[-1].name)
    return f"""<div class="choices">
<label>row <select id="preset"><option value="">all</option>{presets}</select></label>
<label>kind <select id="kind"><option value="">all</option>{_make_options(kinds)}</select></label>
</div>
<div class="layers"><table id="layers"><thead><tr>{heads}</tr></thead>
<tbody>{body}</tbody></table></div>"""


def _make_options(names: list[str], selected: str = "") -> str:
    return "".join(
        f"<option{' selected' if name == selected else ''}>{escape(name)}</option>"
        for name in names
    )


def _kind(layer: LinearReport) -> str:
    return layer.name.rpartition(".")[2]


def _make_layer_row(preset: str, index: int, layer: LinearReport) -> str:
    values: tuple[tuple[str, float], ...] = (
        (layer.name, index),
        (f"{layer.relative_error:.4f}", layer.relative_error),
        _make_decibels(layer.snr_db),
        (f"{layer.saturated:,}", layer.saturated),
        (f"{layer.flushed:,}", layer.flushed),
        (f"{layer.zero_scales:,}", layer.zero_scales),
        (f"{layer.activation_saturated:,}", layer.activation_saturated),
        (f"{layer.activation_flushed:,}", layer.activation_flushed),
        (f"{layer.alpha:.2f}", layer.alpha),
        (f"{layer.beta:.2f}", layer.beta),
    )
    cells = "".join(f'<td data-value="{value:.6g}">{escape(text)}</td>' for text, value in values)
    return f'<tr data-preset="{escape(preset)}" data-kind="{escape(_kind(layer))}">{cells}</tr>'


def _make_decibels(decibels: float | None) -> tuple[str, float]:
    """Return the text and the number to sort by; None, nothing lost, is above all others."""
    return ("exact", 1e9) if decibels is None else (f"{decibels:.1f}", decibels)


def _list_facts(result: DemoResult) -> tuple[str, ...]:
    machine = result.machine
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads, "
        f"{machine['system']}",
        ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        f"wall time {result.seconds:.0f} s, peak memory {result.peak_memory_bytes / 1e9:.2f} GB",
    )
