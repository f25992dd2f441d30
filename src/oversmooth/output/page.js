// Draws each figure when it comes near the screen, in the colours of the page; sorts tables; saves figures and tables.
(() => {
  "use strict";
  let data = JSON.parse(document.getElementById("figures").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawn = new Map();

  // Colours are written as "var(--name)" in the figures, so that one figure serves both themes.
  const coloured = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? css(value.slice(4, -1)) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v)]));
    return value;
  };
  const axis = (own) => ({
    gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, ...own,
    title: { ...(own.title || {}), font: { size: 13 } },
  });
  const NARROW = 460; // pixels of a plot below which labels of an axis are thinned
  const thinned = (own, width) => {
    const every = width < NARROW && own.tickvals ? Math.ceil(own.tickvals.length / 8) : 1;
    const last = own.tickvals ? own.tickvals.length - 1 : 0;
    const kept = (_, k) => k === last || (k % every === 0 && last - k >= every);
    return every < 2 ? own : { ...own, tickvals: own.tickvals.filter(kept), ticktext: own.ticktext.filter(kept) };
  };
  const layoutOf = (figure, width = Infinity) => {
    const own = coloured(figure.layout || {});
    const layout = {
      autosize: true, height: 320, margin: { l: 56, r: 18, t: 14, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 13 }, hovermode: "closest",
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 }, ...own,
    };
    for (const key of Object.keys(own)) if (/^[xy]axis/.test(key)) {
      layout[key] = axis(thinned(own[key], width));
    }
    return layout;
  };
  const draw = (node) => {
    const figure = data[node.dataset.figure];
    if (!figure) return;
    const step = Number(node.dataset.step || 0);
    const traces = figure.steps ? [...(figure.traces || []), ...figure.steps[step].traces] : figure.traces;
    const layout = figure.steps && figure.steps[step].layout ? { ...figure.layout, ...figure.steps[step].layout } : figure.layout;
    Plotly.react(node, coloured(traces), layoutOf({ layout }, node.clientWidth), { displayModeBar: false, responsive: true });
    drawn.set(node, true);
  };

  const nodes = [...document.querySelectorAll(".plot")];
  for (const node of nodes) { // the height that it will have: nothing moves under the reader when it is drawn
    const figure = data[node.dataset.figure];
    if (figure) node.style.minHeight = layoutOf(figure).height + "px";
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "400px" });
  nodes.forEach((node) => observer.observe(node));
  const redraw = () => [...drawn.keys()].forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const root = document.documentElement;
  let screenTheme;
  addEventListener("beforeprint", () => { // paper is white, also for those who read in the dark
    screenTheme = root.dataset.theme;
    root.dataset.theme = "light";
    nodes.forEach(draw);
  });
  addEventListener("afterprint", () => {
    if (screenTheme) root.dataset.theme = screenTheme; else delete root.dataset.theme;
    redraw();
  });

  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const isDark = css("color-scheme") === "dark" || getComputedStyle(root).colorScheme === "dark";
    root.dataset.theme = isDark ? "light" : "dark";
    redraw();
  });

  for (const slider of document.querySelectorAll("input[data-for]")) {
    const node = document.getElementById(slider.dataset.for);
    const label = document.getElementById(slider.dataset.for + "-label");
    slider.addEventListener("input", () => {
      node.dataset.step = slider.value;
      const words = data[node.dataset.figure].steps[Number(slider.value)].words;
      label.textContent = words;
      slider.setAttribute("aria-valuetext", words);
      draw(node);
    });
  }

  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  for (const button of document.querySelectorAll("button[data-save]")) {
    button.addEventListener("click", () => {
      const node = document.getElementById(button.dataset.of);
      if (!drawn.has(node)) draw(node);
      Plotly.downloadImage(node, { format: button.dataset.save, filename: "oversmooth-" + node.dataset.figure, width: 1100, height: node.clientHeight || 400, scale: 2 });
    });
  }
  for (const button of document.querySelectorAll("button[data-csv]")) {
    button.addEventListener("click", () => {
      const quote = (text) => (/[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
      const rows = [...document.getElementById(button.dataset.csv).rows].map((row) => [...row.cells].map((cell) => quote(cell.innerText.trim())).join(","));
      save(button.dataset.csv + ".csv", new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
    });
  }
  const sort = (table, column, rising) => {
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].innerText;
    const number = (text) => (text.trim() !== "" && isFinite(Number(text)) ? Number(text) : null);
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const [p, q] = [number(x), number(y)];
      const order = p !== null && q !== null ? p - q : p !== null ? -1 : q !== null ? 1 : x.localeCompare(y);
      return rising ? order : -order;
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const rising = head.getAttribute("aria-sort") !== "ascending";
        [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        sort(table, column, rising);
      });
    });
  }

  // A page that is served while a run trains asks for newer numbers and shows them in place: figures, sentences, tables.
  // Where it would have other parts than before, it is loaded again.
  const updates = document.body.dataset.updates;
  const EVERY = 2000; // milliseconds
  const item = (name, ...inside) => {
    const node = document.createElement(name);
    node.append(...inside);
    return node;
  };
  const fact = ([name, value]) => item("li", name + " ", item("b", value));
  const finding = ({ text, section, title }) => {
    const link = item("a", title);
    link.href = "#" + section;
    return item("li", text, ...(section ? [" ", link] : []));
  };
  const cell = ({ shown, value, tone, text }) => {
    const node = item("td", shown);
    node.className = tone + (text ? " text" : "");
    if (value !== null) node.dataset.value = value;
    return node;
  };
  const fill = (table, rows) => {
    table.tBodies[0].replaceChildren(...rows.map((row) => item("tr", ...row.map(cell))));
    const column = [...table.tHead.rows[0].cells].findIndex((head) => head.hasAttribute("aria-sort"));
    if (column >= 0) sort(table, column, table.tHead.rows[0].cells[column].getAttribute("aria-sort") === "ascending");
  };
  let seen = "";
  const show = (news) => {
    data = news.figures;
    document.getElementById("verdict-line").textContent = news.verdict;
    document.getElementById("facts").replaceChildren(...news.facts.map(fact));
    if (news.findings.length) document.getElementById("findings").replaceChildren(...news.findings.map(finding));
    for (const [id, rows] of Object.entries(news.tables)) fill(document.getElementById(id), rows);
    redraw();
  };
  const ask = async () => {
    try {
      const answer = await fetch(updates, { cache: "no-store" });
      const text = answer.ok ? await answer.text() : seen;
      if (text === seen) return;
      const news = JSON.parse(text);
      if (news.parts !== document.body.dataset.parts) return location.reload();
      seen = text;
      show(news);
    } catch { /* the server has gone: the page stays as it was */ } finally { setTimeout(ask, EVERY); }
  };
  if (updates) ask();
})();
