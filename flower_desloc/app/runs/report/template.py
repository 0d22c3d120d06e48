"""The page as a Jinja template, for the screen and for printing.

It is Python source because the bundle of a Flower app includes only that.
"""

PAGE = """\
{% macro show(table) %}
<div class="scroll">
<table>
{% if table.title %}<caption>{{ table.title }}</caption>{% endif %}
{% if table.head %}<thead><tr>{% for cell in table.head %}\
<th{% if loop.index0 not in table.words %} class="number"{% endif %}>{{ cell }}</th>{% endfor %}\
</tr></thead>{% endif %}
<tbody>
{% for row in table.rows %}<tr{% if loop.index0 in table.marked %} class="marked"{% endif %}>\
{% for cell in row %}<td{% if loop.index0 not in table.words %} class="number"{% endif %}>\
{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style }}
</style>
</head>
<body>
<header>
<h1>{{ title }}{% if badge %} <span class="badge {{ badge }}">{{ badge }}</span>{% endif %}</h1>
<p>{{ subtitle }}</p>
{% if error %}<p class="error">{{ error }}</p>{% endif %}
{% if tiles %}
<div class="tiles">
{% for tile in tiles %}
<div class="tile"><b>{{ tile.value }}</b><span>{{ tile.name }}</span>\
<small>{{ tile.note }}</small></div>
{% endfor %}
</div>
{% endif %}
<nav aria-label="Contents">
{% for section in sections %}<a href="#{{ section.key }}">{{ section.title }}</a>
{% endfor %}
</nav>
</header>
<main>
{% for section in sections %}
<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
{% if section.key in images %}
{% set image = images[section.key] %}
<figure>
<img src="{{ image.uri }}" alt="{{ section.title }}: {{ section.caption }}" \
width="{{ image.width }}" height="{{ image.height }}">
<figcaption>{{ section.caption }}</figcaption>
</figure>
{% elif section.caption %}<p class="caption">{{ section.caption }}</p>
{% endif %}
{% for table in section.tables if table %}{{ show(table) }}{% endfor %}
{% if section.small %}
<div class="columns">
{% for table in section.small %}{{ show(table) }}{% endfor %}
</div>
{% endif %}
</section>
{% endfor %}
</main>
<footer>flower-desloc {{ version }}</footer>
{% if live %}
<script>
setInterval(async () => {
  const answer = await fetch("version").catch(() => null);
  if (answer && answer.ok && (await answer.text()) !== "{{ live }}") location.reload();
}, 2000);
</script>
{% endif %}
</body>
</html>
"""

STYLE = """\
:root { color-scheme: light; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0 auto; max-width: 1080px; padding: 2.2rem 1.4rem 3rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .8rem; }
p { margin: 0 0 .8rem; }
.badge {
  font-size: .8rem; font-weight: 600; vertical-align: middle; padding: .2rem .6rem;
  border-radius: 1rem; background: #e3f1ea; color: #00553c;
}
.badge.failed, .badge.unfinished { background: #fbe7da; color: #8a3c00; }
.error {
  border-left: 4px solid #d55e00; background: #fdf3ec; padding: .6rem .9rem;
  overflow-wrap: anywhere;
}
.tiles {
  display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.3rem 0;
}
.tile {
  flex: 1 1 8.6rem; max-width: 17rem; padding: .7rem .9rem;
  border: 1px solid #e2e2e2; border-radius: 6px;
}
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; white-space: nowrap; }
.tile span { display: block; font-size: .9rem; }
.tile small { display: block; color: #666; font-size: .78rem; line-height: 1.35; }
nav {
  display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .7rem 0;
  border-top: 1px solid #e2e2e2; border-bottom: 1px solid #e2e2e2; font-size: .93rem;
}
a { color: #005a8f; text-decoration: none; }
a:hover, a:focus { text-decoration: underline; }
section { padding-top: 2.1rem; }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; }
figcaption, .caption { color: #555; font-size: .92rem; max-width: 62rem; margin: .5rem 0 .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; margin: 0 0 1.1rem; min-width: 40%; }
caption { text-align: left; font-weight: 600; padding-bottom: .25rem; }
th, td {
  padding: .32rem .9rem .32rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #ececec;
}
th { font-weight: 600; border-bottom-color: #bbb; }
td { overflow-wrap: break-word; max-width: 40rem; }
th.number, td.number { text-align: right; white-space: nowrap; }
tr.marked td { background: #fff8dc; }
.columns { columns: 3 17rem; column-gap: 2rem; }
.columns .scroll { break-inside: avoid; }
.columns table { width: 100%; }
footer { margin-top: 2.5rem; color: #777; font-size: .85rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  nav { display: none; }
  figure, tr, .tile { break-inside: avoid; }
  h2 { break-after: avoid; }
  .badge, .error, tr.marked td { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
