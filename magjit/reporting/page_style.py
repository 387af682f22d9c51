"""The style sheet of the HTML report; it follows the reader's light or dark setting."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f8; --surface: #ffffff; --ink: #1b1f24; --soft: #5d636b; --muted: #8a8f98;
  --line: #d5d9de; --good: #1f7a48; --bad: #b3361b;
  --argument: #dcebfb; --module: #e6e2f8; --tensor: #dbf1e4; --container: #f3efe2;
  --run: #4c9a6a; --record: #d9903d; --build: #4a83c4; --backend: #8d6fc0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15181c; --surface: #1e2227; --ink: #e8eaed; --soft: #a8aeb7; --muted: #767d87;
    --line: #363c44; --good: #6fcf97; --bad: #f08a6c;
    --argument: #1d3550; --module: #322b55; --tensor: #1b3d2b; --container: #3d3822;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; }
main { max-width: 1440px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
.verdict { margin: 4px 0 14px; font-size: 17px; font-weight: 600; }
.verdict.whole { color: var(--good); }
.verdict.broken { color: var(--bad); }
.note { color: var(--soft); }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px 18px; margin: 16px 0; }
section p { margin: 0 0 8px; }
ul.tiles { display: flex; flex-wrap: wrap; gap: 10px; padding: 0; margin: 0; list-style: none; }
ul.tiles li { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 14px; color: var(--soft); }
ul.tiles b { color: var(--ink); font-size: 20px; margin-right: 4px; }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; gap: 2px; }
.bar span { min-width: 2px; }
.run { background: var(--run); } .record { background: var(--record); }
.build { background: var(--build); } .backend { background: var(--backend); }
ul.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; padding: 0; margin: 10px 0;
  list-style: none; color: var(--soft); }
ul.legend i { display: inline-block; width: 13px; height: 13px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
i.role { border: 1px solid var(--muted); }
i.argument { background: var(--argument); } i.module { background: var(--module); }
i.tensor { background: var(--tensor); } i.container { background: var(--container); }
i.outside { background: var(--ink); } i.code { border-style: dashed; }
i.changed { border: 3px solid #cf4a1f; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--surface); }
tbody tr { border-top: 1px solid var(--line); }
td.number { text-align: right; width: 60px; font-variant-numeric: tabular-nums; }
th.size, td.size { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
table.bars th { font-weight: 400; width: 360px; }
table.bars small { display: block; color: var(--soft); line-height: 1.3; }
.count { background: var(--build); height: 12px; border-radius: 3px; margin-top: 4px;
  min-width: 2px; }
.scroll { overflow: auto; max-height: 900px; }
.tall { max-height: 520px; }
.splits pre, details pre { overflow: auto; max-height: 600px; background: var(--ground);
  border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; }
pre, code { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
td code { overflow-wrap: anywhere; }
details { margin: 8px 0; }
summary { cursor: pointer; }
footer { color: var(--soft); font-size: 13px; }
"""
