/* The dashboard itself: which runs are shown, what is asked of the server and how often, and what is drawn of it.

   Only what is new travels: the server is told the last steps that are here. A page that was written to a file (--html)
   holds its answers in itself and asks nobody. */
"use strict";
(() => {
  const { el } = Watch, $ = (id) => document.getElementById(id);
  const kept = $("snapshot") ? JSON.parse($("snapshot").textContent) : null;
  const ROOM = 9000; // points of a curve after which it is asked for anew, thinned
  const state = { runs: [], chosen: null, compared: new Set(), data: new Map(), details: new Map(), hosts: {}, differences: [], samples: [], log: [], rank: 0,
    smooth: 30, log_scale: false, axis: "step", unit: 60, failures: 0, asking: false, again: false, zoomed: new Map() };
  Watch.now = () => kept ? kept.time : Date.now() / 1000;

  const get = async (path) => {
    if (kept) return kept.answers[path.split("?")[0]] ?? null;
    const answer = await fetch(path, { credentials: "same-origin", cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status === 401 ? "the token is missing or wrong: open the address that the command printed" : `the server answered ${answer.status}`);
    return answer.json();
  };

  /* ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────── */
  const take = (id, told) => {
    const mine = state.data.get(id);
    if (told.whole || !mine || mine.generation !== told.generation) { state.data.set(id, told); return; }
    for (const [kind, columns] of Object.entries(told.kinds)) for (const [name, [x, y]] of Object.entries(columns)) {
      const to = ((mine.kinds[kind] ??= {})[name] ??= [[], []]);
      to[0].push(...x); to[1].push(...y);
      if (to[0].length > ROOM) mine.generation = -1; // the next answer is whole, and thinned
    }
    mine.ends = told.ends; mine.reading = told.reading;
  };
  const askSeries = async (id) => {
    const mine = state.data.get(id), asked = new URLSearchParams();
    if (mine) {
      asked.set("generation", mine.generation);
      for (const kind of ["train", "eval"]) if (mine.ends[kind] != null) asked.set(`after_${kind}`, mine.ends[kind]);
    }
    const told = await get(`/api/runs/${id}/series?${asked}`);
    if (told) take(id, told);
  };
  const askZoom = async (id) => {
    const zoom = toSteps(id, Watch.view.zoom);
    if (kept || !zoom) return;
    const told = await get(`/api/runs/${id}/series?first=${Math.floor(zoom[0])}&last=${Math.ceil(zoom[1])}`);
    if (told) state.zoomed.set(id, told);
  };

  /* Steps and time: each run has its own clock. */
  const clock = (id) => (state.data.get(id)?.kinds.train || {}).elapsed_seconds;
  const between = (xs, ys, at) => {
    const i = Watch.nearest(xs, at), j = at < xs[i] ? i - 1 : i + 1;
    return j < 0 || j >= xs.length || xs[j] === xs[i] ? ys[i] : ys[i] + (ys[j] - ys[i]) * (at - xs[i]) / (xs[j] - xs[i]);
  };
  const toAxis = (id, xs) => {
    if (state.axis === "step") return xs;
    const told = clock(id);
    return told ? xs.map((x) => between(told[0], told[1], x) / state.unit) : [];
  };
  const toSteps = (id, range) => {
    if (!range || state.axis === "step") return range;
    const told = clock(id);
    return told ? range.map((at) => between(told[1], told[0], at * state.unit)) : null;
  };

  /* A curve of a run; while zoomed, the detail of the range in place of the thinned whole. */
  const curve = (id, kind, name) => {
    const whole = (state.data.get(id)?.kinds[kind] || {})[name], fine = Watch.view.zoom ? (state.zoomed.get(id)?.kinds[kind] || {})[name] : null;
    if (!fine) return whole || [[], []];
    const [first, end] = [fine[0][0], fine[0][fine[0].length - 1]];
    if (!whole) return fine;
    const before = whole[0].findIndex((x) => x >= first), after = whole[0].findIndex((x) => x > end);
    const head = before < 0 ? whole[0].length : before, tail = after < 0 ? whole[0].length : after;
    return [[...whole[0].slice(0, head), ...fine[0], ...whole[0].slice(tail)], [...whole[1].slice(0, head), ...fine[1], ...whole[1].slice(tail)]];
  };
  const shownRuns = () => state.runs.filter((run) => state.compared.has(run.id) || run.id === state.chosen);
  const colourOf = (id) => { const i = shownRuns().findIndex((run) => run.id === id); return i < 0 ? 0 : i; };
  const line = (id, kind, name, label, colour, style, smooth) => {
    const [x, y] = curve(id, kind, name), at = toAxis(id, x);
    if (!smooth || !state.smooth || y.length < 5) return [{ label, colour, style, x: at, y }];
    return [{ label: `${label} (raw)`, of: label, colour, style: "raw", x: at, y }, { label, colour, style, x: at, y: Watch.smoothed(y, state.smooth) }];
  };
  const EXTRA = new Set(["evaluation", "reserved"]); // said besides the run's name where several runs share a chart
  const several = () => shownRuns().length > 1;
  const named = (run, words) => several() ? `${run.name}${EXTRA.has(words) ? `, ${words}` : ""}` : words || "training";
  const each = (kind, name, words, style = "line", smooth = false, single = 0) => shownRuns().flatMap((run) => line(run.id, kind, name, named(run, words), several() ? colourOf(run.id) : single, style, smooth));
  const names = (id, kind, start) => Object.keys(state.data.get(id)?.kinds[kind] || {}).filter((name) => name.startsWith(start));

  const charts = [];
  const add = (title, settings, lines) => { const chart = new Watch.Chart(title, settings); chart.lines_of = lines; charts.push(chart); $("charts").append(chart.card); chart.card.hidden = true; return chart; };
  const foreseen = () => { const made = state.details.get(state.chosen)?.prediction; return made && made.foreseen_bytes ? made.foreseen_bytes : null; };
  const flat = (value, label) => { // a level line over all steps
    const [x] = curve(state.chosen, "train", "loss"), at = toAxis(state.chosen, x);
    return value == null || !at.length ? [] : [{ label, colour: "bad", style: "dashed", x: [at[0], at[at.length - 1]], y: [value, value] }];
  };
  const loss = add("Loss", { size: "half" }, () => [...each("train", "loss", "", "line", true), ...each("eval", "loss", "evaluation", "dots", false, 1)]);
  const sources = add("Loss by source", { size: "half" }, () => names(state.chosen, "train", "losses/").concat(names(state.chosen, "eval", "losses/").filter((n) => !names(state.chosen, "train", "losses/").includes(n))).flatMap((name, i) => [
    ...line(state.chosen, "train", name, name.slice(7), i, "line", true), ...line(state.chosen, "eval", name, `${name.slice(7)}, evaluation`, i, "dots")]));
  const PARTS = { cross_entropy: "Cross-entropy", aux_loss: "Auxiliary loss of routers", z_loss: "z-loss of routers" }; // of the loss, where it is more than one thing
  for (const [name, title] of Object.entries(PARTS)) add(title, {}, () => [...each("train", name, "", "line", true), ...each("eval", name, "evaluation", "dots", false, 1)]);
  add("Learning rate", { zero: true }, () => each("train", "learning_rate", "rate"));
  add("Gradient norm", { zero: true }, () => each("train", "grad_norm", "norm", "line", true));
  add("Tokens per second", { format: Watch.rate, zero: true }, () => each("train", "tokens_per_second", "tokens/s", "line", true));
  add("MFU", { format: Watch.percent, zero: true }, () => each("train", "mfu", "MFU", "line", true));
  add("Memory of a device", { format: Watch.bytes, zero: true, top: () => foreseen() || 0 }, () => [
    ...(names(state.chosen, "train", "allocated_peak_bytes").length ? [...each("train", "allocated_peak_bytes", "peak, any rank"), ...each("train", "reserved_peak_bytes", "reserved", "line", false, 2)] : each("train", "memory_bytes", "main rank")),
    ...flat(foreseen(), "foreseen")]);
  add("Load of the busiest expert, of its layer's mean", { zero: true }, () => ["worst", "mean"].flatMap((name, i) => line(state.chosen, "train", `experts/${name}`, name === "worst" ? "worst layer" : "mean of all layers", i, "line", true)));
  add("Time of a step by part", { format: Watch.duration, zero: true }, () => names(state.chosen, "train", "breakdown/").filter((n) => n !== "breakdown/whole").flatMap((name, i) => line(state.chosen, "train", name, name.slice(10), i, "line", true)));
  const KNOWN = new Set(["loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "elapsed_seconds", "allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes", "alloc_retries", "perplexity", ...Object.keys(PARTS)]);
  add("Perplexity", {}, () => each("eval", "perplexity", "evaluation", "dots"));
  const others = new Map(); // figures of the objective (accuracy, margins, …) get a chart as they come up
  const hostCharts = [["CPU of the host", "cpu_percent", (v) => `${Watch.number(v)}%`, "host"], ["RAM of the host", "ram_used_bytes", Watch.bytes, "used"], ["Free disk", "disk_free_bytes", Watch.bytes, "free"]].map(([title, key, format, word]) => {
    const chart = add(title, { format, time: true, zero: true }, () => Object.values(state.hosts).flatMap((host, i, all) => {
      const told = (host.figures || {})[key];
      return told ? [{ label: all.length > 1 ? host.name : word, colour: i, style: "line", x: told[0], y: told[1] }] : [];
    }));
    return chart;
  });

  const drawCharts = (force) => {
    for (const run of shownRuns()) for (const kind of ["train", "eval"]) for (const name of names(run.id, kind, "")) if (!KNOWN.has(name) && !name.includes("/") && !others.has(name) && others.size < 24) {
      others.set(name, add(name.replaceAll("_", " "), {}, () => [...each("train", name, "", "line", true), ...each("eval", name, "evaluation", "dots", false, 1)]));
    }
    state.unit = Math.max(0, ...shownRuns().map((run) => Watch.last(clock(run.id)?.[1] || []) || 0)) >= 7200 ? 3600 : 60;
    const spans = shownRuns().flatMap((run) => ["train", "eval"].map((kind) => toAxis(run.id, curveEnds(run.id, kind)))).flat().filter((v) => v != null);
    Watch.view.full = spans.length ? [Math.min(...spans), Math.max(...spans)] : [0, 1];
    if (Watch.view.full[0] === Watch.view.full[1]) Watch.view.full = [Watch.view.full[0] - 0.5, Watch.view.full[0] + 0.5];
    Watch.view.name = state.axis === "step" ? "step" : "at";
    Watch.view.label = state.axis === "step" ? (v) => Math.abs(v - Math.round(v)) < 1e-6 ? Math.round(v).toLocaleString("en") : "" : (v) => `${+v.toPrecision(4)} ${state.unit === 60 ? "min" : "h"}`;
    for (const chart of [loss, sources]) chart.settings.log = state.log_scale;
    for (const chart of charts) chart.draw(chart.lines_of(), force);
    sources.note.textContent ||= several() && !sources.card.hidden ? `of ${nameOf(state.chosen)}` : "";
    if (charts.some((chart) => !chart.card.hidden) && !document.documentElement.dataset.drawn) document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  };
  const curveEnds = (id, kind) => { const told = (state.data.get(id)?.kinds[kind] || {}).loss; return told && told[0].length ? [told[0][0], told[0][told[0].length - 1]] : []; };
  const nameOf = (id) => state.runs.find((run) => run.id === id)?.name || "";

  /* ── the rest of the page ─────────────────────────────────────────────────────────────────────────────────────── */
  const drawRuns = () => {
    const wanted = $("filter").value.toLowerCase(), list = state.runs.filter((run) => run.name.toLowerCase().includes(wanted));
    $("filter").hidden = state.runs.length < 8;
    $("runs-count").textContent = state.runs.length ? `(${state.runs.length})` : "";
    $("runs-hint").textContent = state.runs.length > 1 ? "Tick runs to lay their curves over each other." : "";
    const focused = document.activeElement?.dataset?.key;
    $("runs").replaceChildren(...list.map((run) => {
      const shown = state.compared.has(run.id) || run.id === state.chosen;
      const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, "data-key": `box-${run.id}`, checked: shown, disabled: run.id === state.chosen, onchange: () => {
        if (!state.compared.delete(run.id)) state.compared.add(run.id);
        refresh();
      } });
      if (shown && several()) box.style.setProperty("--swatch", Watch.colour(colourOf(run.id)));
      const step = run.step == null ? "no step yet" : `step ${run.step.toLocaleString("en")}${run.total ? ` of ${run.total.toLocaleString("en")}` : ""}`;
      return el("li", { class: run.id === state.chosen ? "chosen" : "" }, state.runs.length > 1 ? box : el("span", {}),
        el("button", { type: "button", "data-key": `run-${run.id}`, "aria-current": run.id === state.chosen ? "true" : null, onclick: () => choose(run.id) },
          el("b", {}, run.name), el("small", {}, el("span", { class: `state ${run.state.word}` }, run.state.word), ` ${step}`), el("small", {}, run.loss == null ? "" : `loss ${Watch.number(run.loss)}${run.eval_loss == null ? "" : `, evaluation ${Watch.number(run.eval_loss)}`}`)));
    }));
    if (focused) $("runs").querySelector(`[data-key="${focused}"]`)?.focus();
  };

  const log = Watch.logPanel((rank) => { state.rank = rank; refresh(); });
  const drawPanels = () => {
    const run = state.details.get(state.chosen);
    if (!run) return;
    const kept_place = [...$("panels").querySelectorAll(".tall, .samples")].map((node) => [node.getAttribute("aria-label"), node.scrollTop]);
    const focused = document.activeElement?.closest?.("#panels") ? document.activeElement.getAttribute("aria-label") : null;
    $("head").replaceChildren(...Watch.head(run));
    const panels = [Watch.differencePanel(state.differences, shownRuns()), Watch.rankPanel(run), Watch.memoryPanel(run), Watch.expertPanel(run), Watch.timePanel(run), Watch.checkpointPanel(run), Watch.hostPanel(run), Watch.samplePanel(state.samples)].filter(Boolean);
    if (!log.node.isConnected) $("panels").append(log.node);
    for (const node of [...$("panels").children]) if (node !== log.node) node.remove();
    for (const panel of panels) $("panels").insertBefore(panel, log.node);
    log.show(state.log, run, state.rank);
    // The page is drawn anew, but nobody who scrolls or walks through it by keyboard should lose their place.
    for (const [label, top] of kept_place) { const node = [...$("panels").querySelectorAll(".tall, .samples")].find((one) => one.getAttribute("aria-label") === label); if (node) node.scrollTop = top; }
    if (focused && !document.activeElement.closest("#panels")) [...$("panels").querySelectorAll("[tabindex]")].find((node) => node.getAttribute("aria-label") === focused)?.focus({ preventScroll: true });
  };

  const drawControls = () => {
    const button = (words, pressed, act) => el("button", { type: "button", "aria-pressed": String(pressed), onclick: act }, words);
    const slider = el("input", { type: "range", min: "0", max: "100", value: state.smooth, oninput: (event) => { state.smooth = Number(event.target.value); drawCharts(); } });
    const range = (share) => () => { Watch.setZoom(null); const [low, high] = Watch.view.full; if (share < 1) Watch.setZoom([high - (high - low) * share, high]); };
    const switched = (key, value) => () => { state[key] = value; Watch.setZoom(null); drawControls(); };
    $("controls").replaceChildren(
      el("label", {}, "Smoothing", slider),
      el("span", { class: "group", role: "group", "aria-label": "Scale of the loss" }, button("linear", !state.log_scale, switched("log_scale", false)), button("log", state.log_scale, switched("log_scale", true))),
      el("span", { class: "group", role: "group", "aria-label": "Axis" }, button("steps", state.axis === "step", switched("axis", "step")), button("time", state.axis === "time", switched("axis", "time"))),
      el("span", { class: "group", role: "group", "aria-label": "Part that is shown" }, button("all", false, range(1)), button("last half", false, range(0.5)), button("last 10%", false, range(0.1))),
      el("span", { class: "muted", id: "zoom-hint" }, "Drag over a chart to zoom, double-click for all; keys: + − ← → 0."));
  };

  const choose = (id) => {
    state.chosen = id; state.rank = 0; state.log = []; state.samples = []; state.hosts = {}; state.log_seen = state.samples_seen = null; Watch.view.zoom = null; state.zoomed.clear();
    if (matchMedia("(max-width:820px)").matches) $("runs-fold").open = false;
    if (!kept) history.replaceState(null, "", `#${id}`);
    refresh();
  };

  Watch.view.onzoom = async () => {
    drawCharts();
    try { await Promise.all(shownRuns().map((run) => askZoom(run.id))); } catch { return; }
    if (Watch.view.zoom) drawCharts();
  };

  /* ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────── */
  const refresh = async () => {
    if (state.asking) { state.again = true; return; }
    state.asking = true;
    try {
      state.runs = await get("/api/runs");
      if (!state.runs.some((run) => run.id === state.chosen)) {
        const asked = location.hash.slice(1), going = state.runs.find((run) => run.state.word === "running");
        state.chosen = (state.runs.find((run) => run.id === asked) || going || state.runs[0])?.id ?? null;
      }
      for (const id of [...state.compared]) if (!state.runs.some((run) => run.id === id)) state.compared.delete(id);
      const id = state.chosen;
      if (id == null) $("charts").dataset.empty || nothing();
      else {
        $("charts").querySelector(".empty")?.remove(); delete $("charts").dataset.empty;
        const shown = shownRuns();
        await Promise.all([
          ...shown.map((run) => askSeries(run.id)),
          get(`/api/runs/${id}`).then(async (told) => {
            state.details.set(id, told);
            // Logs and samples are asked for again only when they have grown.
            const size = `${id} ${state.rank} ${told.ranks.find((row) => row.rank === state.rank)?.log}`, count = `${id} ${told.samples}`;
            if (size !== state.log_seen) { state.log = told.ranks.length ? await get(`/api/runs/${id}/log/${state.rank}`) || [] : []; state.log_seen = size; }
            if (count !== state.samples_seen) { state.samples = await get(`/api/runs/${id}/samples`) || []; state.samples_seen = count; }
          }),
          get(`/api/runs/${id}/hosts?after=${hostEnd()}`).then((told) => takeHosts(id, told || {})),
          shown.length > 1 ? get(`/api/compare?runs=${shown.map((run) => run.id).join()}`).then((told) => { state.differences = told || Watch.differ(shown, kept); }) : null,
        ]);
        drawCharts(); drawPanels();
      }
      drawRuns();
      state.failures = 0;
      const reading = shownRuns().some((run) => state.data.get(run.id)?.reading);
      $("live").textContent = kept ? `as of ${new Date(kept.time * 1000).toLocaleString("en-GB")}` : reading ? "reading the whole file…" : "live";
      document.title = id == null ? "Shardwise" : `${nameOf(id)} · Shardwise`;
    } catch (error) {
      state.failures++;
      $("live").textContent = `no answer: ${error.message}`;
    }
    state.asking = false;
    if (state.again) { state.again = false; refresh(); }
  };
  const hostEnd = () => { // up to when all hosts are known
    const ends = Object.values(state.hosts).map((host) => Watch.last(host.figures.cpu_percent?.[0] || []) ?? 0);
    return ends.length ? Math.min(...ends) : 0;
  };
  const takeHosts = (id, told) => {
    if (id !== state.chosen) return;
    for (const [rank, host] of Object.entries(told)) {
      const mine = (state.hosts[rank] ??= { name: host.name, figures: {} });
      for (const [name, [x, y]] of Object.entries(host.figures)) {
        const to = (mine.figures[name] ??= [[], []]), from = to[0].length ? x.findIndex((at) => at > to[0][to[0].length - 1]) : 0;
        if (from >= 0) { to[0].push(...x.slice(from)); to[1].push(...y.slice(from)); }
        if (to[0].length > ROOM) { to[0].splice(0, ROOM / 2); to[1].splice(0, ROOM / 2); }
      }
    }
  };
  const nothing = () => {
    $("charts").dataset.empty = "yes";
    $("charts").append(el("p", { class: "empty" }, "There is no run here yet. It comes up by itself as soon as one begins: ", el("code", {}, "shardwise train RUN.yaml")));
  };
  Watch.differ = (runs, from) => (from.differences || []).filter((row) => new Set(runs.map((run) => JSON.stringify(row.values[run.id]))).size > 1);

  const loop = async () => {
    if (!document.hidden) await refresh();
    const going = state.runs.some((run) => ["running", "starting"].includes(run.state.word)), reading = shownRuns().some((run) => state.data.get(run.id)?.reading);
    setTimeout(loop, state.failures ? Math.min(30000, 2000 * state.failures) : reading ? 500 : going ? 2000 : 5000);
  };

  /* ── light and dark ───────────────────────────────────────────────────────────────────────────────────────────── */
  const themes = ["system", "light", "dark"];
  const store = (value) => { try { if (value) localStorage.setItem("shardwise-theme", value); return localStorage.getItem("shardwise-theme"); } catch { return null; } };
  const setTheme = (theme) => {
    Watch.theme = theme;
    if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
    if (state.chosen) { drawCharts(true); drawRuns(); }
  };
  $("theme").addEventListener("click", () => { const next = themes[(themes.indexOf(Watch.theme) + 1) % 3]; store(next); setTheme(next); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(Watch.theme));
  setTheme(themes.includes(store()) ? store() : "system");

  $("filter").addEventListener("input", drawRuns);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  if (matchMedia("(max-width:820px)").matches) $("runs-fold").open = false;
  for (const id of new URLSearchParams(location.search).get("compare")?.split(",") || []) if (id) state.compared.add(id);
  drawControls();
  kept ? refresh() : loop();
})();
