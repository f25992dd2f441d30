// Filters thousands of models in the page and draws what is left. Names are only ever written as text, never as markup.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = data.target.map((_, i) => i);
  const id = (name) => document.getElementById(name);
  const COLOURS = ["#7b3fc4", "#2f8f4e", "#d0479b", "#0f9484", "#a08000", "#8e1e63", "#4a78b5", "#6e7781"];
  const GROUPS = COLOURS.length, PAGE = 100, MANY_SIGNS = 0.001;
  const SIZES = [[1e7, "under 10M"], [1e8, "10M to 100M"], [1e9, "100M to 1B"], [1e10, "1B to 10B"], [Infinity, "10B and more"]];
  const sizeOf = (count) => count == null ? "unknown" : SIZES.find(([limit]) => count < limit)[1];
  const groupOf = {
    family: (i) => data.family[i] ?? "unknown",
    size: (i) => sizeOf(data.block_parameters[i]),
    year: (i) => data.year[i] == null ? "unknown" : String(data.year[i]),
  };
  const make = (name, text, more) => Object.assign(document.createElement(name), { textContent: text ?? "", ...more });
  const sorted = (values) => values.filter((v) => v != null).sort((a, b) => a - b);
  const quantile = (values, q) => {
    if (!values.length) return null;
    const at = q * (values.length - 1), low = Math.floor(at);
    return values[low] + (at - low) * ((values[low + 1] ?? values[low]) - values[low]);
  };
  const mean = (values) => { const kept = values.filter((v) => v != null); return kept.length ? kept.reduce((a, b) => a + b, 0) / kept.length : null; };
  const number = (value, digits = 3) => value == null ? "" : value.toFixed(digits);
  const percent = (value, digits = 0) => value == null ? "" : (100 * value).toFixed(digits) + "%";

  // --- filters ---
  const order = [...SIZES.map(([, name]) => name), "unknown"];
  const byKind = { family: (a, b, sizes) => sizes.get(b) - sizes.get(a), size: (a, b) => order.indexOf(a) - order.indexOf(b), year: (a, b) => a.localeCompare(b) };
  for (const kind of ["family", "size", "year"]) {
    const counts = new Map();
    for (const i of all) counts.set(groupOf[kind](i), (counts.get(groupOf[kind](i)) ?? 0) + 1);
    const names = [...counts.keys()].sort((a, b) => byKind[kind](a, b, counts));
    id(kind).append(new Option("all", ""), ...names.map((name) => new Option(`${name} (${counts.get(name)})`, name)));
  }
  let chosen = all, page = 0, sort = { name: "mean_excess", down: true };
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
    if (kind !== "family") groups.sort((a, b) => byKind[kind](a[0], b[0]));
    return groups;
  };

  // --- pictures ---
  const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 40;
  const shape = (name, more, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(more)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const picture = (node, height, low, high, title, across) => {
    const width = Math.max(280, node.clientWidth), svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height });
    const room = (high - low || 1) * 0.05, [bottom, top] = [low - room, high + room];
    const x = (share) => LEFT + share * (width - LEFT - RIGHT), y = (value) => TOP + (top - value) / (top - bottom) * (height - TOP - BOTTOM);
    const step = [0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100].find((s) => (top - bottom) / s < 7) ?? (top - bottom) / 5;
    for (let value = Math.ceil(bottom / step) * step; value <= top; value += step) {
      const zero = Math.abs(value) < step / 100;
      svg.append(shape("path", { d: `M${LEFT} ${y(value)}H${width - RIGHT}`, stroke: zero ? "var(--soft)" : "var(--line)" }));
      svg.append(shape("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, zero ? "0" : +value.toFixed(2)));
    }
    svg.append(shape("text", { x: LEFT, y: height - 6 }, `${title}; ${across}`));
    node.replaceChildren(svg);
    return { svg, x, y, width };
  };
  const nothing = (node) => node.replaceChildren(make("p", "No model of this selection was read.", { className: "nothing" }));
  const tip = make("div", "", { id: "tip", hidden: true });
  document.body.append(tip);
  let dots = [], at = -1;
  const point = (index, left, top) => {
    at = index;
    tip.hidden = index < 0;
    document.querySelector("#ranks .on")?.remove();
    if (index < 0) return;
    const dot = dots[index], i = dot.i, svg = document.querySelector("#ranks svg"), box = svg.getBoundingClientRect();
    svg.append(shape("circle", { class: "on", cx: dot.x, cy: dot.y, r: 6, fill: "none", stroke: "var(--ink)", "stroke-width": 2 }));
    tip.textContent = `${data.target[i]}\n${data.family[i] ?? "unknown family"}, ${data.n_layers[i]} layers, mean excess ${number(data.mean_excess[i])}\n${percent(data.above_chance_share[i])} of its layers above chance`;
    const size = tip.getBoundingClientRect(), [x, y] = [left ?? box.left + dot.x, top ?? box.top + dot.y];
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - size.width - 6)) + "px";
    tip.style.top = (y + 20 + size.height > innerHeight ? y - size.height - 12 : y + 20) + "px";
  };
  const nearest = (event) => {
    const svg = document.querySelector("#ranks svg");
    if (!svg || !dots.length) return -1;
    const box = svg.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1, least = 30 ** 2;
    dots.forEach((dot, k) => { const far = (dot.x - x) ** 2 + (dot.y - y) ** 2; if (far < least) { least = far; best = k; } });
    return best;
  };
  for (const kind of ["pointermove", "pointerdown"]) id("ranks").addEventListener(kind, (event) => point(nearest(event), event.clientX, event.clientY));
  for (const kind of ["pointerleave", "blur"]) id("ranks").addEventListener(kind, () => point(-1));
  id("ranks").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!step || !dots.length) return;
    event.preventDefault();
    point(Math.max(0, Math.min(dots.length - 1, at + step)));
  });

  const drawRanks = (read, groups) => {
    const models = read.filter((i) => data.mean_excess[i] != null).sort((a, b) => data.mean_excess[b] - data.mean_excess[a]);
    dots = [];
    if (!models.length) return nothing(id("ranks"));
    const colour = new Map(groups.flatMap(([, list], g) => list.map((i) => [i, g])));
    const ends = models.map((i) => data.mean_excess[i]), far = ends.length > 200;  // a few far ones would press all others together
    const [low, high] = far ? [quantile([...ends].reverse(), 0.002), quantile([...ends].reverse(), 0.998)] : [ends.at(-1), ends[0]];
    const { svg, x, y } = picture(id("ranks"), 320, Math.min(0, low), Math.max(0, high), "mean excess over chance, 0 is chance", `${models.length} models, sorted`);
    const paths = groups.map(() => "");
    models.forEach((i, k) => {
      const value = Math.max(Math.min(0, low), Math.min(Math.max(0, high), data.mean_excess[i]));
      const dot = { i, x: x((k + 0.5) / models.length), y: y(value) };
      dots.push(dot);
      paths[colour.get(i)] += `M${dot.x.toFixed(1)} ${dot.y.toFixed(1)}h0`;
    });
    const size = models.length > 1500 ? 3.5 : models.length > 300 ? 5 : 8;
    paths.forEach((d, g) => svg.append(shape("path", { class: "dots", d, stroke: COLOURS[g], "stroke-width": size, "stroke-linecap": "round", fill: "none" })));
  };
  const drawDepth = (read, groups) => {
    const points = data.excess.reduce((most, list) => Math.max(most, list.length), 0);
    const along = (models, q) => Array.from({ length: points }, (_, p) => quantile(sorted(models.map((i) => data.excess[i][p])), q));
    if (!read.length || !points) return nothing(id("depth"));
    const [low, high] = [along(read, 0.25), along(read, 0.75)], curves = groups.map(([, models]) => along(models, 0.5));
    const values = [0, ...low, ...high, ...curves.flat()].filter((v) => v != null);
    const { svg, x, y } = picture(id("depth"), 320, Math.min(...values), Math.max(...values), "excess over chance", "relative depth 0 to 1");
    const line = (list) => list.map((v, p) => v == null ? null : `${x(p / (points - 1)).toFixed(1)} ${y(v).toFixed(1)}`).filter(Boolean);
    if (read.length > 1) svg.append(shape("path", { d: `M${[...line(high), ...line(low).reverse()].join("L")}Z`, fill: "var(--fan)", "fill-opacity": 0.3 }));
    curves.forEach((curve, g) => svg.append(shape("path", { class: "median", d: "M" + line(curve).join("L"), stroke: COLOURS[g], "stroke-width": 2.2, fill: "none" })));
  };
  const name = (g, text) => { const node = make("span"); node.append(make("i", "", { style: `background:${COLOURS[g]}` }), text); return node; };
  const drawGroups = (groups) => {
    id("groups").replaceChildren(...groups.map(([text, models], g) => name(g, `${text} (${models.length})`)));
    const table = id("share");
    const head = document.createElement("tr");
    head.append(...["group", "models", "median excess", "layers above chance", "models with negative norms"].map((text, k) => make("th", text, k ? {} : { className: "t" })));
    table.tHead.replaceChildren(head);
    table.tBodies[0].replaceChildren(...groups.map(([text, models], g) => {
      const row = document.createElement("tr"), first = make("td", "", { className: "t" });
      first.append(name(g, text));
      const signs = mean(models.map((i) => data.norm_negative_share[i] == null ? null : Number(data.norm_negative_share[i] >= MANY_SIGNS)));
      const cells = [models.length, number(quantile(sorted(models.map((i) => data.mean_excess[i])), 0.5)), percent(mean(models.map((i) => data.above_chance_share[i]))), percent(signs)];
      row.append(first, ...cells.map((value) => make("td", value)));
      return row;
    }));
  };

  // --- the table ---
  const COLUMNS = [["target", "model"], ["family", "family"], ["year", "year"], ["n_layers", "layers"], ["d_model", "width"], ["mean_excess", "mean excess"], ["above_chance_share", "above chance"], ["mean_positivity", "positivity"], ["norm_negative_share", "negative norms"], ["status", "status"], ["reason", "reason"]];
  const TEXTS = new Set(["model", "family", "status", "reason"]);
  const drawTable = () => {
    const table = id("models"), values = data[sort.name], head = document.createElement("tr");
    for (const [key, text] of COLUMNS) {
      const th = make("th", "", { scope: "col", className: TEXTS.has(text) ? "t" : "" }), button = make("button", text, { type: "button" });
      if (key === sort.name) button.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      button.addEventListener("click", () => { sort = { name: key, down: key === sort.name ? !sort.down : typeof data[key].find((value) => value != null) === "number" }; page = 0; drawTable(); });
      th.append(button); head.append(th);
    }
    table.tHead.replaceChildren(head);
    const compare = (a, b) => values[a] == null ? 1 : values[b] == null ? -1 : (typeof values[a] === "number" ? values[a] - values[b] : String(values[a]).localeCompare(String(values[b]))) * (sort.down ? -1 : 1);
    const rows = [...chosen].sort(compare).slice(page * PAGE, (page + 1) * PAGE);
    table.tBodies[0].replaceChildren(...rows.map((i) => {
      const row = document.createElement("tr");
      const cell = (text, className = "") => row.append(make("td", text, { className }));
      cell(data.target[i], "name"); cell(data.family[i], "t");
      for (const key of ["year", "n_layers", "d_model"]) cell(data[key][i]);
      cell(number(data.mean_excess[i])); cell(percent(data.above_chance_share[i], 1)); cell(number(data.mean_positivity[i], 2)); cell(percent(data.norm_negative_share[i], 1));
      cell(data.status[i], "t"); cell(data.reason[i], "why");
      return row;
    }));
    const pages = Math.max(1, Math.ceil(chosen.length / PAGE));
    id("page").textContent = `page ${page + 1} of ${pages}`;
    id("before").disabled = page === 0; id("after").disabled = page >= pages - 1;
  };
  id("before").addEventListener("click", () => { page -= 1; drawTable(); });
  id("after").addEventListener("click", () => { page += 1; drawTable(); });

  const pictures = () => {
    const read = chosen.filter((i) => data.status[i] === "read"), groups = grouped(read);
    drawRanks(read, groups); drawDepth(read, groups); drawGroups(groups);
  };
  const draw = () => { pictures(); drawTable(); };
  let timer = 0;
  for (const kind of ["family", "size", "year"]) id(kind).addEventListener("change", choose);
  id("by").addEventListener("change", draw);
  id("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(choose, 150); });
  id("filters").addEventListener("submit", (event) => event.preventDefault());
  id("filters").addEventListener("reset", () => setTimeout(choose, 0));
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(pictures, 150); });
  choose();
  document.documentElement.dataset.ready = "yes";
})();
