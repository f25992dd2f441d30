// Says what is pointed at, by pointer, finger and arrow keys; sorts tables; saves charts, tables and the card; copies commands.
// Everything on the page can be read without it.
(() => {
  "use strict";
  const root = document.documentElement;
  const make = (name, ...inside) => { const node = document.createElement(name); node.append(...inside); return node; };

  // --- what a chart says where it is pointed at ---
  const tip = make("div");
  tip.id = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  document.body.append(tip);
  let lit = null;
  const show = (text, x, y) => {
    tip.textContent = text; tip.hidden = !text;
    if (!text) return;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18) + "px";
  };
  const light = (hit) => { if (lit) lit.classList.remove("on"); lit = hit; if (lit) lit.classList.add("on"); };
  const said = (node) => {
    const title = node.querySelector(":scope > title");
    if (title) { node.dataset.said = title.textContent; title.remove(); } // one hint, not two
    if (!node.dataset.said && node.classList.contains("hit")) { // only the widest drawing has the words
      const [own, first] = [node.closest("svg"), node.closest(".drawn").querySelector("svg")].map((svg) => [...svg.querySelectorAll(".hit")]);
      return own[0] === first[0] ? "" : said(first[own.indexOf(node)]);
    }
    return node.dataset.said || "";
  };
  const cellAt = (drawn, svg, event) => {
    const map = svg.querySelector("[data-area]"), box = svg.getBoundingClientRect();
    if (!map || !drawn.dataset.heat) return "";
    const scale = svg.viewBox.baseVal.width / box.width;
    const [left, top, right, bottom] = map.dataset.area.split(",").map(Number);
    const x = ((event.clientX - box.left) * scale - left) / (right - left), y = ((event.clientY - box.top) * scale - top) / (bottom - top);
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return "";
    const heat = JSON.parse(drawn.dataset.heat), r = Math.floor(y * heat.rows.length), c = Math.floor(x * heat.columns.length);
    const value = heat.values[r][c];
    return `${heat.row} ${heat.rows[r]}, ${heat.column} ${heat.columns[c]}: ${value === null || value === undefined ? "no value" : value}`.trim();
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, (event) => {
    const svg = event.target.closest && event.target.closest("svg.chart");
    if (!svg) { light(null); show(""); return; }
    const node = event.target.closest(".hit, circle");
    light(node && node.classList.contains("hit") ? node : null);
    show(node ? said(node) : cellAt(svg.parentNode, svg, event), event.clientX, event.clientY);
  });
  document.addEventListener("keydown", (event) => {
    const svg = event.target.closest && event.target.closest("svg.chart");
    const step = { ArrowRight: 1, ArrowLeft: -1, Escape: 0 }[event.key];
    if (!svg || step === undefined) return;
    const hits = [...svg.querySelectorAll(".hit")];
    if (!hits.length) return;
    event.preventDefault();
    const next = step ? hits[Math.max(0, Math.min(hits.length - 1, hits.indexOf(lit) + step))] : null;
    light(next);
    if (!next) return show("");
    const box = next.getBoundingClientRect();
    show(said(next), box.left + box.width / 2, box.top);
  });
  document.addEventListener("focusout", () => { light(null); show(""); });

  // --- buttons ---
  const isDark = () => getComputedStyle(root).colorScheme === "dark";
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; });
  document.getElementById("print").addEventListener("click", () => print());
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try { await navigator.clipboard.writeText(code.textContent); } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const save = (name, blob) => {
    const link = make("a");
    link.href = URL.createObjectURL(blob); link.download = name; link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const asPng = (text, width, height, name) => {
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas");
      canvas.width = 2 * width; canvas.height = 2 * height;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(name, blob));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  };
  for (const button of document.querySelectorAll("button[data-save]")) button.addEventListener("click", () => {
    const shown = [...document.getElementById(button.dataset.of).querySelectorAll("svg.chart")].find((svg) => svg.getClientRects().length);
    const copy = shown.cloneNode(true), { width, height } = shown.viewBox.baseVal, name = "oversmooth-" + button.dataset.of;
    copy.querySelectorAll(".hit").forEach((hit) => hit.remove());
    copy.querySelectorAll("use").forEach((use) => use.replaceWith(document.querySelector(use.getAttribute("href")).cloneNode(true)));
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg"); copy.setAttribute("class", "oversmooth");
    copy.setAttribute("width", width); copy.setAttribute("height", height);
    const text = copy.outerHTML.replace(">", "><style>" + document.getElementById("chart-style").innerHTML + '</style><rect width="100%" height="100%" class="f-paper"/>');
    if (button.dataset.save === "svg") save(name + ".svg", new Blob([text], { type: "image/svg+xml" }));
    else asPng(text, width, height, name + ".png");
  });
  const card = document.getElementById("card");
  if (card) card.addEventListener("click", (event) => {
    event.preventDefault(); // without script, the link saves the SVG
    asPng(decodeURIComponent(escape(atob(card.href.split(",")[1]))), 1200, 630, "oversmooth-card.png");
  });
  for (const button of document.querySelectorAll("button[data-csv]")) button.addEventListener("click", () => {
    const quote = (text) => (/[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
    const rows = [...document.getElementById(button.dataset.csv).rows].map((row) => [...row.cells].map((cell) => quote(cell.innerText.trim())).join(","));
    save(button.dataset.csv + ".csv", new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
  });

  // --- tables ---
  const sort = (table, column, rising) => {
    const key = (row) => row.cells[column].textContent.trim();
    const number = (text) => (text !== "" && isFinite(Number(text)) ? Number(text) : null);
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], [p, q] = [number(x), number(y)];
      const order = p !== null && q !== null ? p - q : p !== null ? -1 : q !== null ? 1 : x.localeCompare(y);
      return rising ? order : -order;
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      sort(table, column, rising);
    });
  });

  // --- paper shows what is closed; a link into a closed part opens it ---
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((part) => { part.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((part) => { part.open = false; }));
  const reveal = () => { const target = location.hash && document.getElementById(location.hash.slice(1)), part = target && target.closest("details"); if (part) { part.open = true; target.scrollIntoView(); } };
  addEventListener("hashchange", reveal);
  reveal();

  // --- a page that is served while a run trains asks for newer numbers and shows them in place; with other parts than
  // before it is loaded again ---
  const updates = document.body.dataset.updates, EVERY = 2000; // milliseconds
  const finding = ({ text, section, title }) => {
    const link = make("a", title);
    link.href = "#" + section;
    return make("li", text, ...(section ? [" ", link] : []));
  };
  const fill = (table, rows) => {
    const cell = ({ shown, text }) => { const node = make("td", shown); if (text) node.className = "t"; return node; };
    table.tBodies[0].replaceChildren(...rows.map((row) => make("tr", ...row.map(cell))));
    const column = [...table.tHead.rows[0].cells].findIndex((head) => head.hasAttribute("aria-sort"));
    if (column >= 0) sort(table, column, table.tHead.rows[0].cells[column].getAttribute("aria-sort") === "ascending");
  };
  const renew = (news) => {
    document.getElementById("verdict-line").textContent = news.verdict;
    const facts = document.getElementById("facts");
    if (facts) facts.replaceChildren(...news.facts.map(([name, value]) => make("li", name + " ", make("b", value))));
    if (news.findings.length) document.getElementById("findings").replaceChildren(...news.findings.map(finding));
    for (const [id, rows] of Object.entries(news.tables)) fill(document.getElementById(id), rows);
    for (const [id, [markup, heat]] of Object.entries(news.figures)) {
      const drawn = document.querySelector(`#${CSS.escape(id)} .drawn`);
      drawn.innerHTML = markup; // drawn by the server, which escapes what is not its own
      if (heat) drawn.dataset.heat = heat;
    }
  };
  let seen = "";
  const ask = async () => {
    try {
      const answer = await fetch(updates, { cache: "no-store" });
      const text = answer.ok ? await answer.text() : seen;
      if (text === seen) return;
      const news = JSON.parse(text);
      if (news.parts !== document.body.dataset.parts) return location.reload();
      seen = text;
      renew(news);
    } catch { /* the server has gone: the page stays as it was */ } finally { setTimeout(ask, EVERY); }
  };
  if (updates) ask();
})();
