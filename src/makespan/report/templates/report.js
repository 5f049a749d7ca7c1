// The page is complete without this: it adds choices of sources, tables, interactive charts, filters and sorting.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, text, properties = {}) => {
    const element = Object.assign(document.createElement(name), properties);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Tables, charts and plotly itself are compressed, and unpacked when they are asked for.
  const unpack = async (id) => {
    const packed = document.getElementById(`packed-${id}`).textContent;
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  // --- Light and dark ---
  const root = document.documentElement;
  const remembered = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("theme", value);
      return localStorage.getItem("theme");
    } catch {
      return null; // no storage for local files in some browsers
    }
  };
  const isDark = () =>
    (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const toggle = document.getElementById("theme");
  const name = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    name();
    all(".chart").forEach((chart) => chart.redraw?.());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  // --- One source of a figure at a time ---
  all(".choices").forEach((choices) => {
    const figures = all("figure", choices.parentElement);
    const buttons = all("button", choices);
    const choose = (source) => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.source === source)));
      figures.forEach((figure) => { figure.hidden = figure.dataset.source !== source; });
    };
    buttons.forEach((button) => button.addEventListener("click", () => choose(button.dataset.source)));
    choices.hidden = false;
    choose(buttons[0].dataset.source);
  });

  // --- Tables behind figures ---
  const cells = (text) => {
    const rows = [[""]];
    let quoted = false;
    for (let i = 0; i < text.length; i++) {
      const letter = text[i], row = rows[rows.length - 1];
      if (letter === '"') {
        if (quoted && text[i + 1] === '"') { row[row.length - 1] += '"'; i++; } else quoted = !quoted;
      } else if (letter === "," && !quoted) row.push("");
      else if (letter === "\n" && !quoted) rows.push([""]);
      else row[row.length - 1] += letter;
    }
    if (rows[rows.length - 1].join("") === "") rows.pop();
    return rows;
  };
  const N_FIRST = 200;
  const fill = (body, rows) => rows.forEach((row) => {
    const line = body.insertRow();
    row.forEach((cell) => { line.insertCell().textContent = cell; });
  });
  const showTable = async (place, id) => {
    const [columns, ...rows] = cells(await unpack(`table-${id}`));
    const table = make("table", undefined, { className: "dense" });
    const head = table.createTHead().insertRow();
    columns.forEach((column) => head.append(make("th", column, { scope: "col" })));
    const body = table.createTBody();
    fill(body, rows.slice(0, N_FIRST));
    place.replaceChildren(table);
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", "Table behind the figure");
    if (rows.length > N_FIRST) {
      const more = make("button", `Show all ${rows.length} rows`, { type: "button" });
      more.addEventListener("click", () => { fill(body, rows.slice(N_FIRST)); more.remove(); });
      place.append(more);
    }
  };
  const opens = (button, place, first) => button.addEventListener("click", async () => {
    const opened = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(opened));
    place.hidden = !opened;
    if (opened && !place.firstChild) {
      place.textContent = "Unpacking …";
      try { await first(); } catch (error) { place.textContent = `This browser cannot show it: ${error.message}`; }
    }
  });
  all(".tools").forEach((tools) => { tools.hidden = false; });
  all(".open-table").forEach((button) => {
    const place = document.getElementById(`table-${button.dataset.table}`);
    opens(button, place, () => showTable(place, button.dataset.table));
  });
  all(".download").forEach((button) => button.addEventListener("click", async () => {
    const url = URL.createObjectURL(new Blob([await unpack(`table-${button.dataset.table}`)], { type: "text/csv" }));
    make("a", "", { href: url, download: button.dataset.file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }));
  all(".configuration").forEach((place) => {
    place.parentElement.addEventListener("toggle", async () => { place.textContent = await unpack(place.dataset.packed); },
      { once: true });
  });

  // --- Interactive charts ---
  let plotly = null;
  const loadPlotly = () => {
    plotly ??= unpack("plotly").then((code) => {
      document.head.append(make("script", code));
      return window.Plotly;
    });
    return plotly;
  };
  const colours = () => {
    const style = getComputedStyle(root);
    const of = (variable) => style.getPropertyValue(variable).trim();
    return { ground: of("--ground"), text: of("--text"), line: of("--line") };
  };
  const showChart = async (place, id) => {
    const [Plotly, charts] = await Promise.all([loadPlotly(), unpack(`chart-${id}`).then(JSON.parse)]);
    const plot = make("div", undefined, { className: "plot" });
    place.replaceChildren(plot);
    let chosen = 0;
    place.redraw = () => {
      const { ground, text, line } = colours(), { data, layout } = charts[chosen];
      const axis = (own) => ({ ...own, gridcolor: line, zerolinecolor: line, automargin: true });
      // Black is a colour of the palette: on a dark ground it becomes that of the text.
      const visible = (trace) => (isDark() ? JSON.parse(JSON.stringify(trace).replaceAll('"#000000"', `"${text}"`)) : trace);
      return Plotly.react(plot, data.map(visible), {
        ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), paper_bgcolor: ground, plot_bgcolor: ground,
        font: { color: text, family: "system-ui, sans-serif", size: 13 }, margin: { t: 24, r: 16, b: 48, l: 60 },
        hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      }, { responsive: true, displaylogo: false, scrollZoom: false });
    };
    if (charts.length > 1) {
      const label = make("label", "Show "), select = make("select");
      charts.forEach((chart, i) => select.append(make("option", chart.name, { value: i })));
      select.addEventListener("change", () => { chosen = Number(select.value); place.redraw(); });
      label.append(select);
      place.prepend(label);
    }
    await place.redraw();
  };
  all(".explore").forEach((button) => {
    const place = document.getElementById(`chart-${button.dataset.chart}`);
    opens(button, place, () => showChart(place, button.dataset.chart));
  });

  // --- Sorting ---
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  all("table.sortable").forEach((table) => {
    const heads = all("thead th", table), body = table.tBodies[0];
    const key = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent.trim();
    // The collator knows whole numbers inside texts, and no decimals.
    const compare = (a, b) => (Number.isFinite(a - b) && a !== "" && b !== "" ? a - b : order.compare(a, b));
    heads.forEach((head, i) => {
      const button = make("button", head.textContent, { type: "button" });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(key(a, i), key(b, i)) * (down ? -1 : 1));
        body.append(...rows);
      });
    });
  });

  // --- Filters of the ledger: with a source chosen, its own verdicts count ---
  const form = document.getElementById("filters");
  if (form) {
    const rows = all("#statements tbody tr").map((row) => ({
      row, text: row.textContent.toLowerCase(), found: JSON.parse(row.dataset.found), badge: row.querySelector(".badge"),
    }));
    const status = document.getElementById("shown");
    const filter = () => {
      const { paper, verdict, source, text } = Object.fromEntries(new FormData(form));
      const words = text.toLowerCase().split(/\s+/).filter(Boolean);
      let n = 0;
      rows.forEach((one) => {
        const own = source ? one.found[source]?.[1] ?? "not run" : one.row.dataset.verdict;
        const shown = (!paper || one.row.dataset.paper === paper) && (!verdict || own === verdict)
          && (!source || source in one.found || verdict === "not run") && words.every((word) => one.text.includes(word));
        one.row.hidden = !shown;
        one.badge.textContent = own;
        one.badge.className = `badge ${own.replace(" ", "-")}`;
        all("[data-of]", one.row).forEach((part) => { part.hidden = Boolean(source) && part.dataset.of !== source; });
        n += shown;
      });
      status.textContent = `${n} of ${rows.length} statements`;
    };
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    all(".to-ledger").forEach((link) => link.addEventListener("click", () => {
      form.reset();
      form.elements.paper.value = link.dataset.paper;
      setTimeout(filter);
    }));
    filter();
  }
})();
