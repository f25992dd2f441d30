// Filters thousands of models in the page and draws what is left. Names are only ever written as text, never as markup.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = data.target.map((_, i) => i);
  const id = (name) => document.getElementById(name);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["#7b3fc4", "#2f8f4e", "#d0479b", "#0f9484", "#a08000", "#8e1e63", "#4a78b5", "#6e7781"];
  const GROUPS = COLOURS.length, PAGE = 100, MANY_SIGNS = 0.001, MANY_LAYERS = 200;
  const SIZES = [[1e7, "under 10M"], [1e8, "10M to 100M"], [1e9, "100M to 1B"], [1e10, "1B to 10B"], [Infinity, "10B and more"]];
  const sizeOf = (count) => count == null ? "unknown" : SIZES.find(([limit]) => count < limit)[1];
  const groupOf = {
    family: (i) => data.family[i] ?? "unknown",
    size: (i) => sizeOf(data.block_parameters[i]),
    year: (i) => data.year[i] == null ? "unknown" : String(data.year[i]),
  };
  // Plotly reads a little markup in labels: what looks like it is written with entities.
  const label = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").slice(0, 60);

  const sorted = (values) => values.filter((v) => v != null).sort((a, b) => a - b);
  const quantile = (values, q) => {
    if (!values.length) return null;
    const at = q * (values.length - 1), low = Math.floor(at);
    return values[low] + (at - low) * ((values[low + 1] ?? values[low]) - values[low]);
  };
  const mean = (values) => { const kept = values.filter((v) => v != null); return kept.length ? kept.reduce((a, b) => a + b, 0) / kept.length : null; };

  const order = { size: [...SIZES.map(([, name]) => name), "unknown"] };
  const optionsOf = (kind) => {
    const counts = new Map();
    for (const i of all) counts.set(groupOf[kind](i), (counts.get(groupOf[kind](i)) ?? 0) + 1);
    const names = [...counts.keys()].sort((a, b) => kind === "family" ? counts.get(b) - counts.get(a) : kind === "size" ? order.size.indexOf(a) - order.size.indexOf(b) : a.localeCompare(b));
    return names.map((name) => [name, `${name} (${counts.get(name)})`]);
  };
  for (const kind of ["family", "size", "year"]) {
    for (const [value, text] of [["", "all"], ...optionsOf(kind)]) id(kind).append(new Option(text, value));
  }

  let chosen = all, page = 0, sort = { name: "target", down: false };
  const choose = () => {
    const wanted = ["family", "size", "year"].filter((kind) => id(kind).value !== "");
    const words = id("search").value.toLowerCase();
    chosen = all.filter((i) => wanted.every((kind) => groupOf[kind](i) === id(kind).value) && (!words || data.target[i].toLowerCase().includes(words)));
    page = 0;
    id("count").textContent = `${chosen.length} of ${all.length} ${all.length === 1 ? "model" : "models"}`;
    draw();
  };

  const grouped = (models) => {
    const kind = id("by").value, found = new Map();
    for (const i of models) { const name = groupOf[kind](i); if (!found.has(name)) found.set(name, []); found.get(name).push(i); }
    let groups = [...found.entries()].sort((a, b) => b[1].length - a[1].length);
    if (groups.length > GROUPS) groups = [...groups.slice(0, GROUPS - 1), ["others", groups.slice(GROUPS - 1).flatMap(([, list]) => list)]];
    if (kind !== "family") groups.sort((a, b) => kind === "size" ? order.size.indexOf(a[0]) - order.size.indexOf(b[0]) : a[0].localeCompare(b[0]));
    return groups;
  };
  const axis = (title, more) => ({ title: { text: title, font: { size: 13 } }, gridcolor: css("--grid"), zerolinecolor: css("--soft"), linecolor: css("--line"), automargin: true, ...more });
  const plot = (name, traces, x, y, more) => {
    const node = id(name);
    if (!traces.length) { Plotly.purge(node); node.replaceChildren(Object.assign(document.createElement("p"), { className: "nothing", textContent: "No model of this selection was read." })); return; }
    if (node.querySelector(".nothing")) node.replaceChildren();
    Plotly.react(node, traces, {
      autosize: true, height: 340, margin: { l: 56, r: 18, t: 14, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--ink"), size: 13 }, hovermode: "closest", legend: { orientation: "h", traceorder: "normal", yanchor: "bottom", y: 1.02, x: 0 }, xaxis: x, yaxis: y, ...more,
    }, { displayModeBar: false, responsive: true });
  };

  const draw = () => {
    const read = chosen.filter((i) => data.status[i] === "read");
    const groups = grouped(read);
    drawDepth(read, groups); drawDominating(read); drawShares(groups); drawNorms(groups); drawOutliers(read); drawTable();
  };
  const drawDepth = (read, groups) => {
    const points = data.tendency.reduce((most, list) => Math.max(most, list.length), 0);
    const depth = Array.from({ length: points }, (_, p) => p / (points - 1));
    const at = (models, q) => depth.map((_, p) => quantile(sorted(models.map((i) => data.tendency[i][p])), q));
    const traces = [];
    if (read.length > 1) {
      traces.push({ x: depth, y: at(read, 0.25), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
      traces.push({ x: depth, y: at(read, 0.75), mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: "rgba(110,119,129,0.18)", hoverinfo: "skip", name: "middle half of all" });
    }
    groups.forEach(([name, models], g) => traces.push({ x: depth, y: at(models, 0.5), mode: "lines", name: `${label(name)} (${models.length})`, line: { color: COLOURS[g], width: 2 } }));
    plot("depth", traces, axis("relative depth", { range: [0, 1] }), axis("tendency, log ρ_dc"), { height: 420 });
  };
  const drawDominating = (read) => {
    const values = sorted(read.flatMap((i) => data.dominating[i]));
    const isCut = values.length >= MANY_LAYERS;  // a few far ones would press all others into one bar
    const low = quantile(values, 0.005), high = quantile(values, 0.995);
    const shown = isCut ? values.filter((v) => v >= low && v <= high) : values;
    const traces = values.length ? [{ type: "histogram", x: shown, nbinsx: Math.max(8, Math.min(80, Math.round(2 * Math.sqrt(values.length)))), marker: { color: COLOURS[0] }, hovertemplate: "%{x}: %{y} layers<extra></extra>" }] : [];
    plot("dominating", traces, axis(isCut ? "real part of λ (99% of the layers)" : "real part of λ"), axis("layers"), { bargap: 0.03 });
  };
  const bars = (name, groups, value, title) => {
    const x = groups.map(([, models]) => value(models)), y = groups.map(([group, models]) => `${label(group)} (${models.length})`);
    const isLong = x.map((v) => v > 0.9);  // its number stands inside it
    plot(name, groups.length ? [
      { type: "bar", orientation: "h", x, y, marker: { color: groups.map((_, g) => COLOURS[g]) }, hovertemplate: "%{y}: %{x:.1%}<extra></extra>" },
      // Numbers of their own, because a bar of 0% shows nothing, and seems to be missing.
      { mode: "text", x, y, text: x.map((v) => v == null ? "" : ` ${Math.round(100 * v)}% `), textposition: isLong.map((long) => long ? "middle left" : "middle right"),
        textfont: { color: isLong.map((long) => long ? "#ffffff" : css("--ink")) }, hoverinfo: "skip" },
    ] : [], axis(title, { tickformat: ".0%", range: [0, 1] }), axis("", { autorange: "reversed" }), { height: Math.max(160, 60 + 34 * groups.length), showlegend: false });
  };
  const drawShares = (groups) => bars("share", groups, (models) => mean(models.map((i) => data.sharpening_share[i])), "share of layers that sharpen");
  const drawNorms = (groups) => bars("norms", groups, (models) => mean(models.map((i) => data.norm_negative_share[i] == null ? null : Number(data.norm_negative_share[i] >= MANY_SIGNS))), "share of models with negative norm weights");

  const cell = (row, text, name) => { const td = row.insertCell(); td.textContent = text; if (name) td.className = name; };
  const number = (value, digits = 3) => value == null ? "" : value.toFixed(digits);
  const TEXTS = new Set(["model", "family", "status", "reason"]);
  const head = (table, names, onSort) => {
    const row = document.createElement("tr");
    for (const [key, text] of names) {
      const th = document.createElement("th"); th.scope = "col"; if (TEXTS.has(text)) th.className = "text";
      if (onSort) { const button = Object.assign(document.createElement("button"), { type: "button", textContent: text }); button.addEventListener("click", () => onSort(key)); if (key === sort.name) button.setAttribute("aria-sort", sort.down ? "descending" : "ascending"); th.append(button); }
      else th.textContent = text;
      row.append(th);
    }
    table.tHead.replaceChildren(row);
  };
  const drawOutliers = (read) => {
    const values = sorted(read.map((i) => data.mean_tendency[i])), middle = quantile(values, 0.5);
    const spread = quantile(sorted(values.map((v) => Math.abs(v - middle))), 0.5) * 1.4826;
    const table = id("outliers"), body = table.tBodies[0];
    head(table, [["", "model"], ["", "family"], ["", "mean tendency"], ["", "spreads from the median"]]);
    body.replaceChildren();
    if (!(spread > 0)) { cell(body.insertRow(), "Outliers need models that differ.", "text"); return; }
    const far = read.filter((i) => data.mean_tendency[i] != null).map((i) => [i, (data.mean_tendency[i] - middle) / spread]);
    for (const [i, distance] of far.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 12)) {
      const row = body.insertRow();
      cell(row, data.target[i], "name"); cell(row, data.family[i] ?? "", "text"); cell(row, number(data.mean_tendency[i])); cell(row, (distance > 0 ? "+" : "") + number(distance, 1));
    }
  };
  const COLUMNS = [["target", "model"], ["family", "family"], ["year", "year"], ["n_layers", "layers"], ["d_model", "width"], ["mean_tendency", "mean tendency"], ["sharpening_share", "sharpening"], ["norm_negative_share", "negative norms"], ["status", "status"], ["reason", "reason"]];
  const drawTable = () => {
    const table = id("models"), body = table.tBodies[0], values = data[sort.name];
    head(table, COLUMNS, (name) => { sort = { name, down: name === sort.name ? !sort.down : typeof data[name].find((value) => value != null) === "number" }; page = 0; drawTable(); });
    const compare = (a, b) => values[a] == null ? 1 : values[b] == null ? -1 : (typeof values[a] === "number" ? values[a] - values[b] : String(values[a]).localeCompare(String(values[b]))) * (sort.down ? -1 : 1);
    const rows = [...chosen].sort(compare).slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren();
    for (const i of rows) {
      const row = body.insertRow();
      cell(row, data.target[i], "name"); cell(row, data.family[i] ?? "", "text");
      for (const name of ["year", "n_layers", "d_model"]) cell(row, data[name][i] ?? "");
      cell(row, number(data.mean_tendency[i]));
      for (const name of ["sharpening_share", "norm_negative_share"]) cell(row, data[name][i] == null ? "" : (100 * data[name][i]).toFixed(1) + "%");
      cell(row, data.status[i], "text"); cell(row, data.reason[i] ?? "", "why");
    }
    const pages = Math.max(1, Math.ceil(chosen.length / PAGE));
    id("page").textContent = `page ${page + 1} of ${pages}`;
    id("before").disabled = page === 0; id("after").disabled = page >= pages - 1;
  };
  id("before").addEventListener("click", () => { page -= 1; drawTable(); });
  id("after").addEventListener("click", () => { page += 1; drawTable(); });

  let timer = 0;
  for (const name of ["family", "size", "year"]) id(name).addEventListener("change", choose);
  id("by").addEventListener("change", draw);
  id("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(choose, 150); });
  id("filters").addEventListener("submit", (event) => event.preventDefault());
  id("filters").addEventListener("reset", () => setTimeout(choose, 0));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  choose();
  document.documentElement.dataset.ready = "yes";
})();
