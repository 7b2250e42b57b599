"""How report.html looks: on a phone, in light and dark, on paper. LIGHT and DARK stand for the colours, which the
figures share.
"""

from __future__ import annotations

DARK = {
    "ink": "#e6e6e6",
    "paper": "#15181c",
    "grid": "#3a4048",
    "blue": "#5ab4f0",
    "orange": "#ff9d5c",
    "grey": "#9aa4ae",
}

STYLE = """
:root { color-scheme: light dark; LIGHT; --soft: #f3f5f7; --good: #006b4e; --bad: #a33a00; }
@media (prefers-color-scheme: dark) { :root { DARK; --soft: #1e2329; --good: #3ccfa0; --bad: #ff9d5c; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 0 auto; padding: 1rem; }
body { overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--grid); padding-bottom: .2rem; }
.lead { font-size: 1.08rem; font-weight: 600; background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; white-space: pre-line; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); padding-left: 0; }
small { display: block; white-space: pre-line; font-size: .8rem; font-weight: 400; opacity: .85; }
.words { width: 100%; }
.words th, .words td { text-align: left; white-space: normal; }
.words td { white-space: pre-line; }
.words td:first-child { width: 8.5rem; }
.stack td:first-child { width: 50%; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1.2rem 0; max-width: 36rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; opacity: .85; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; font-size: .88rem; white-space: pre-wrap; }
@media screen and (max-width: 40rem) {
  .stack thead { display: none; }
  .stack tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--grid); }
  .stack td { display: block; border: 0; padding: .1rem 0; }
  th, td { padding: .35rem .4rem; }
  td:first-child { white-space: normal; }
  .words td:first-child { width: 6rem; }
  .stack td:first-child { width: auto; font-weight: 600; }
  .stack small { display: inline; margin-left: .4rem; }
}
@page { margin: 15mm; }
@media print {
  figure { max-width: 11cm; }
  :root { LIGHT; --soft: #f3f5f7; --good: #006b4e; --bad: #a33a00; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  .wide { overflow: visible; }
  figure, tr, pre, caption { break-inside: avoid; }
  h2, caption { break-after: avoid; }
  table { font-size: 9pt; }
  th, td { padding: .2rem .35rem; }
}
"""
