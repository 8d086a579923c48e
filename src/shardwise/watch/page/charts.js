/* Charts of the dashboard: a thin layer over uPlot with a legend of buttons, zoom by mouse, keys or buttons, and smoothing.

   Every name that comes from a run goes in as text (textContent), never as HTML. */
"use strict";
const Watch = {};

Watch.el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "width") node.style.width = value; // through the object model: the policy forbids style attributes
    else if (key === "left") node.style.left = value;
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null && child !== false).map((child) => child instanceof Node ? child : String(child)));
  return node;
};

/* How numbers are written. */
Watch.number = (v) => v == null || !isFinite(v) ? "–"
  : v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e4) ? String(+v.toPrecision(4))
  : Math.abs(v) < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e").replace("e-", "e−") : Math.round(v).toLocaleString("en");
Watch.bytes = (v) => {
  if (v == null || !isFinite(v)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (Math.abs(v) >= 1024 && i < 5) { v /= 1024; i++; }
  return `${v >= 100 || i === 0 ? Math.round(v) : +v.toPrecision(3)} ${units[i]}`;
};
Watch.rate = (v) => {
  if (v == null || !isFinite(v)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= size) return `${+(v / size).toPrecision(3)}${unit}`;
  return String(+v.toPrecision(3));
};
Watch.percent = (v) => v == null ? "–" : `${+(100 * v).toPrecision(3)}%`;
Watch.duration = (s) => {
  if (s == null || !isFinite(s)) return "–";
  if (s < 1) return `${+(1000 * s).toPrecision(3)} ms`;
  if (s < 60) return `${+s.toPrecision(3)} s`;
  const m = Math.round(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
  return d ? `${d} d ${h % 24} h` : h ? `${h} h ${m % 60} min` : `${m} min`;
};

/* A mean that looks both ways with exponential weights: one that looks back only would lag behind a steep start. */
Watch.smoothed = (values, amount) => {
  const keep = 1 - 1 / (1 + (amount / 100) ** 2 * Math.max(8, values.length / 8));
  const pass = (list) => {
    let total = 0, weight = 0;
    return list.map((v) => {
      total *= keep; weight *= keep;
      if (v != null) { total += v; weight += 1; }
      return [total, weight];
    });
  };
  const back = pass(values), ahead = pass([...values].reverse()).reverse();
  return values.map((v, i) => v == null ? null : (back[i][0] + ahead[i][0] - v) / (back[i][1] + ahead[i][1] - 1));
};

Watch.colour = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--c${((index % 8) + 8) % 8}`).trim();
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/* What all charts share: which part of the steps is shown. */
Watch.view = { zoom: null, full: [0, 1], onzoom: () => {} };
Watch.setZoom = (range) => {
  if (range) {
    const [low, high] = Watch.view.full, least = Math.max(1e-9, (high - low) / 1e6);
    range = [Math.max(low, range[0]), Math.min(high, range[1])];
    if (range[1] - range[0] < least || (range[0] <= low && range[1] >= high)) range = range[1] - range[0] < least ? Watch.view.zoom : null;
  }
  Watch.view.zoom = range;
  Watch.view.onzoom();
};
const keyZoom = (event) => {
  const [low, high] = Watch.view.zoom || Watch.view.full, width = high - low, middle = (low + high) / 2;
  const to = { ArrowLeft: [low - width / 4, high - width / 4], ArrowRight: [low + width / 4, high + width / 4],
    "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
    "-": [middle - width, middle + width], Escape: null, 0: null }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const [first, last] = Watch.view.full;
  if (to && to[0] < first && event.key === "ArrowLeft") Watch.setZoom([first, first + width]);
  else if (to && to[1] > last && event.key === "ArrowRight") Watch.setZoom([last - width, last]);
  else Watch.setZoom(to);
};

const POWERS = Array.from({ length: 60 }, (_, i) => 2 ** i); // bytes are read in powers of two
const clock = (v, step) => new Date(v * 1000).toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });

/* One card with a chart. `lines`: {label, colour, x, y, style: raw | line | dots | dashed}; `raw` ones are in no legend. */
Watch.Chart = class {
  constructor(title, { size = "", format = Watch.number, time = false, zero = false, log = false, top = null } = {}) {
    this.settings = { format, time, zero, log, top };
    this.note = Watch.el("small", {});
    this.plot = Watch.el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    this.legend = Watch.el("div", { class: "legend" });
    this.card = Watch.el("section", { class: `card ${size}`, "aria-label": title }, Watch.el("header", {}, Watch.el("h2", {}, title), this.note), this.plot, this.legend);
    this.title = title;
    this.hidden = new Set();
    this.lines = [];
    if (!time) this.plot.addEventListener("keydown", keyZoom);
    this.watcher = new ResizeObserver(() => this.chart && this.plot.clientWidth && this.chart.setSize(this.size()));
    this.watcher.observe(this.plot);
  }

  size() { return { width: this.plot.clientWidth, height: this.plot.clientHeight }; }

  draw(lines, force) {
    lines = lines.filter((line) => line.x.length);
    this.card.hidden = !lines.length;
    if (!lines.length) return;
    const look = JSON.stringify([lines.map((l) => [l.label, l.colour, l.style]), this.settings.log, Watch.theme]);
    this.lines = lines;
    const shown = lines.map((line) => this.hidden.has(line.label) ? [line.x, line.x.map(() => null)] : [line.x, line.y]);
    const data = shown.length === 1 ? shown[0] : uPlot.join(shown);
    if (look !== this.look || force) {
      this.look = look;
      if (this.chart) this.chart.destroy();
      this.chart = new uPlot(this.options(), data, this.plot);
      this.drawLegend();
    } else this.chart.setData(data);
    this.readings(null);
    this.plot.setAttribute("aria-label", `${this.title}: ${lines.filter((l) => l.style !== "raw").map((l) => `${l.label} ${this.settings.format(last(l.y))}`).join(", ")}`);
  }

  options() {
    const { format, time, zero, log, top } = this.settings, ink = variable("muted"), grid = { stroke: variable("grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
    const series = this.lines.map((line) => {
      const colour = typeof line.colour === "number" ? Watch.colour(line.colour) : variable(line.colour);
      return {
        label: line.label, stroke: line.style === "raw" ? `${colour}48` : colour, width: line.style === "raw" ? 1 : 2,
        dash: line.style === "dashed" || line.style === "dots" ? [6, 4] : undefined,
        points: { show: (line.style === "dots" && line.x.length <= 60) || line.x.length === 1, size: 6, fill: colour },
      };
    });
    return {
      ...this.size(), series: [{}, ...series], legend: { show: false },
      cursor: { sync: time ? undefined : { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      scales: {
        x: { time, range: (u, low, high) => time ? [low, high] : Watch.view.zoom || Watch.view.full },
        y: log ? { distr: 3 } : { range: (u, low, high) => {
          if (low == null) return [0, 1];
          if (top != null) high = Math.max(high, top());
          const pad = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
          return [zero ? Math.min(0, low) : low - pad, high + pad];
        } },
      },
      axes: [
        { ...axis, size: 30, space: 64, values: (u, splits, i, space, step) => splits.map(time ? (v) => clock(v, step) : Watch.view.label) },
        { ...axis, size: 62, space: 34, ...(format === Watch.bytes ? { incrs: POWERS } : {}), values: (u, splits) => splits.map((v) => v == null ? "" : format(v)) },
      ],
      hooks: {
        setCursor: [(u) => this.readings(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width < 6) return;
          const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (!time) Watch.setZoom(range);
        }],
        ready: [(u) => u.over.addEventListener("dblclick", () => time || Watch.setZoom(null))],
      },
    };
  }

  drawLegend() {
    this.values = new Map();
    this.legend.replaceChildren(...this.lines.filter((line) => line.style !== "raw").map((line) => {
      const value = Watch.el("b", {}), swatch = Watch.el("i", {});
      swatch.style.borderTopColor = typeof line.colour === "number" ? Watch.colour(line.colour) : variable(line.colour);
      swatch.style.borderTopStyle = line.style === "line" ? "solid" : "dashed";
      this.values.set(line.label, value);
      return Watch.el("button", { type: "button", "aria-pressed": String(!this.hidden.has(line.label)), title: line.label, onclick: (event) => {
        if (!this.hidden.delete(line.label)) this.hidden.add(line.label);
        event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(line.label)));
        for (const one of this.lines) if (one.of === line.label) this.hidden.has(line.label) ? this.hidden.add(one.label) : this.hidden.delete(one.label);
        this.draw(this.lines);
      } }, swatch, Watch.el("span", {}, line.label), value);
    }));
  }

  /* The values under the cursor, or the last ones. */
  readings(index) {
    if (!this.values) return;
    const at = index == null || !this.chart ? null : this.chart.data[0][index];
    this.lines.forEach((line) => {
      const value = this.values.get(line.label);
      if (value) value.textContent = this.settings.format(at == null ? last(line.y) : line.y[nearest(line.x, at)]);
    });
    this.note.textContent = at == null ? "" : this.settings.time ? new Date(at * 1000).toLocaleTimeString("en-GB") : `${Watch.view.name} ${Watch.view.label(at)}`;
  }
};

const last = (list) => { for (let i = list.length - 1; i >= 0; i--) if (list[i] != null) return list[i]; return null; };
const nearest = (list, at) => {
  let low = 0, high = list.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] < at) low = middle + 1; else high = middle; }
  return low && Math.abs(list[low - 1] - at) < Math.abs(list[low] - at) ? low - 1 : low;
};
Watch.nearest = nearest;
Watch.last = last;
