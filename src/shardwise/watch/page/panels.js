/* What is no curve: the head of the page, ranks, memory, checkpoints, samples, logs, and how runs' settings differ. */
"use strict";
(() => {
  const { el, number, bytes, rate, percent, duration } = Watch;
  const ago = (time) => time == null ? "" : `${duration(Math.max(1, Watch.now() - time))} ago`;

  const card = (title, size, ...children) => el("section", { class: `card ${size}`, "aria-label": title }, el("header", {}, el("h2", {}, title)), ...children);

  const table = (heads, rows, label) => el("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads.map(([name, kind]) => el("th", { scope: "col", class: kind || "" }, name)))),
      el("tbody", {}, ...rows.map(({ cells, mark }) => el("tr", { class: mark || "" }, ...cells.map((cell, i) => el("td", { class: heads[i][1] || "" }, cell)))))));

  Watch.head = (run) => {
    const last = run.latest || {}, held = run.evaluated || {}, state = run.state, done = run.total ? Math.min(1, (run.step || 0) / run.total) : null;
    const going = state.word === "running" || state.word === "starting";
    const tile = (name, value, note) => el("div", { class: "tile" }, el("span", {}, name), el("strong", {}, value), el("small", {}, note || " "));
    const memory = last.allocated_peak_bytes ?? last.memory_bytes, mild = state.word !== "failed";
    const about = [run.model, run.ranks.length ? `${run.ranks.length} rank${run.ranks.length > 1 ? "s" : ""} on ${run.devices.join(", ") || "?"}` : null, run.folder];
    const speed = last.tokens && last.tokens_per_second ? last.tokens / last.tokens_per_second : null;
    return [
      el("div", { class: "line" }, el("h1", {}, run.name), el("span", { class: `state ${state.word}` }, state.word),
        el("span", { class: "muted" }, state.since && !going ? state.word === "silent" ? `for ${duration(Math.max(1, Watch.now() - state.since))}` : ago(state.since) : "")),
      el("p", { class: "about" }, about.filter(Boolean).join(" · ")),
      state.why && state.word !== "finished" ? el("p", { class: `why ${mild ? "mild" : ""}`, role: mild ? null : "alert" }, state.why) : null,
      done == null ? null : el("div", { class: "progress", role: "progressbar", "aria-label": "steps done", "aria-valuenow": String(Math.round(100 * done)), "aria-valuemin": "0", "aria-valuemax": "100" }, el("i", { width: `${100 * done}%` })),
      el("div", { class: "tiles" },
        tile("step", run.step == null ? "–" : run.step.toLocaleString("en"), run.total ? `of ${run.total.toLocaleString("en")}` : ""),
        tile("loss", number(last.loss), last.epoch != null ? `epoch ${number(last.epoch)}` : ""),
        tile("evaluation", number(held.loss), held.step ? `at step ${held.step.toLocaleString("en")}` : "none yet"),
        tile("tokens/s", rate(last.tokens_per_second), speed ? `${duration(speed)} a step` : ""),
        last.mfu == null ? null : tile("MFU", percent(last.mfu), "of the peak"),
        tile("memory", bytes(memory), run.prediction ? `foreseen ${bytes(run.prediction.foreseen_bytes)}` : "of the main rank"),
        tile(going ? "time left" : "time", duration(going ? last.eta_seconds : last.elapsed_seconds), going ? `after ${duration(last.elapsed_seconds)}` : "of training")),
    ].filter(Boolean);
  };

  /* A bar of parts that make up a whole, with marks on it. */
  const stack = (title, parts, whole, show, marks = []) => {
    const extent = Math.max(whole, ...marks.map((mark) => mark.value)) || 1;
    return [
      el("div", { class: "stack", role: "img", "aria-label": `${title}: ${parts.map(([name, value]) => `${name} ${show(value)}`).join(", ")}` },
        ...parts.map(([name, value], i) => el("i", { class: `b${i % 8}`, width: `${100 * value / extent}%`, title: `${name} ${show(value)}` })),
        ...marks.map((mark) => el("i", { class: `mark ${mark.kind}`, left: `min(${100 * mark.value / extent}%, 100% - 3px)`, title: `${mark.name} ${show(mark.value)}` }))),
      el("ul", { class: "keys" }, ...parts.map(([name, value], i) => el("li", {}, el("i", { class: `b${i % 8}` }), `${name} ${show(value)}`)),
        ...marks.map((mark) => el("li", {}, el("i", { class: `mark ${mark.kind}` }), `${mark.name} ${show(mark.value)}`))),
    ];
  };

  Watch.memoryPanel = (run) => {
    const made = run.prediction, last = run.latest || {};
    if (!made || !made.memory) return null;
    const parts = Object.entries(made.memory).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
    const measured = last.allocated_peak_bytes ?? last.memory_bytes;
    const marks = [measured == null ? null : { name: "measured peak", value: measured, kind: "" }, made.limit ? { name: "the device has", value: made.limit, kind: "limit" } : null];
    const off = measured && made.foreseen_bytes ? made.foreseen_bytes / measured - 1 : null;
    const words = off == null ? "" : `Foreseen ${bytes(made.foreseen_bytes)}, measured ${bytes(measured)} (${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}).`;
    return card("Memory of a device, foreseen by category", "half", ...stack("memory", parts, parts.reduce((sum, [, size]) => sum + size, 0), bytes, marks.filter(Boolean)), el("p", { class: "muted" }, words));
  };

  /* Tokens by layer and expert as a map: blue below the mean of the layer, orange above it, full colour at 4 times. */
  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  Watch.expertPanel = (run) => {
    const told = (run.latest || {}).experts?.tokens;
    const layers = Object.entries(told || {}).map(([name, counts]) => ({ name, counts, mean: counts.reduce((a, b) => a + b, 0) / Math.max(1, counts.length) })).filter((one) => one.mean > 0);
    if (!layers.length) return null;
    const columns = Math.max(...layers.map((one) => one.counts.length)), idle = layers.reduce((sum, one) => sum + one.counts.filter((n) => n === 0).length, 0);
    const map = el("canvas", { class: "heat", role: "img" }), words = el("p", { class: "muted" });
    map.width = columns; map.height = layers.length;
    map.style.height = `${Math.max(layers.length * (layers.length > 40 ? 4 : layers.length > 12 ? 9 : 18), 36)}px`;
    const paper = rgb(variable("track")), low = rgb(variable("c0")), high = rgb(variable("c1")), pen = map.getContext("2d"), image = pen.createImageData(columns, layers.length);
    let worst = { ratio: 0 };
    layers.forEach(({ name, counts, mean }, row) => counts.forEach((count, expert) => {
      const ratio = count / mean, share = Math.min(1, Math.abs(Math.log2(Math.max(ratio, 1 / 16))) / 2), to = ratio < 1 ? low : high;
      if (ratio > worst.ratio) worst = { ratio, name, expert };
      image.data.set([...paper.map((p, i) => Math.round(p + (to[i] - p) * share)), 255], 4 * (row * columns + expert));
    }));
    pen.putImageData(image, 0, 0);
    const summary = `Busiest: expert ${worst.expert} of ${worst.name}, ${number(worst.ratio)} times the mean of its layer. Experts without a token: ${idle} of ${layers.reduce((sum, one) => sum + one.counts.length, 0)}.`;
    map.setAttribute("aria-label", `Tokens by layer (${layers.length}) and expert (${columns}). ${summary}`);
    words.textContent = summary;
    map.addEventListener("pointermove", (event) => {
      const box = map.getBoundingClientRect(), layer = layers[Math.min(layers.length - 1, Math.floor((event.clientY - box.top) / box.height * layers.length))];
      const expert = Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns)), count = layer?.counts[expert];
      words.textContent = count == null ? summary : `${layer.name}, expert ${expert}: ${count.toLocaleString("en")} tokens, ${number(count / layer.mean)} times the mean.`;
    });
    map.addEventListener("pointerleave", () => { words.textContent = summary; });
    const key = el("ul", { class: "keys" }, el("li", {}, el("i", { class: "b0" }), "a quarter of the mean, or less"), el("li", {}, el("i", { class: "b1" }), "4 times the mean, or more"));
    return card("Load by layer (down) and expert (across)", "half", map, key, words);
  };

  Watch.timePanel = (run) => {
    const told = (run.latest || {}).breakdown;
    if (!told || !told.whole) return null;
    const beside = ["gather", "reduce", "offload"], parts = Object.entries(told).filter(([name]) => name !== "whole" && !beside.includes(name));
    const inside = beside.filter((name) => told[name] != null).map((name) => `${name} ${duration(told[name])}`).join(", ");
    return card("Where the last step's time went", "half", ...stack("time", parts, told.whole, duration), el("p", { class: "muted" }, inside ? `Inside or beside these: ${inside}.` : ""));
  };

  Watch.rankPanel = (run) => {
    if (!run.ranks.length) return null;
    const knows = run.ranks.some((row) => row.waiting != null), separate = run.ranks.some((row) => row.memory !== row.rss);
    const heads = [["rank"], ["step"], ["s/step"], ...(knows ? [["waiting"], ["busy"]] : []), ["CPU s/step"], [separate ? "device" : "memory"], ...(separate ? [["process"]] : []), ["doing", "text"]];
    const rows = run.ranks.map((row) => ({ mark: row.amiss ? "amiss" : "", cells: [row.rank, row.step ?? "–", number(row.seconds),
      ...(knows ? [number(row.waiting), number(row.seconds == null || row.waiting == null ? null : row.seconds - row.waiting)] : []), number(row.cpu_seconds), bytes(row.memory), ...(separate ? [bytes(row.rss)] : []), el("span", {}, row.doing, row.amiss ? el("em", {}, ` ${row.amiss}`) : "")] }));
    const amiss = run.ranks.filter((row) => row.amiss).length;
    return card(`Ranks${amiss ? `: ${amiss} to look at` : ""}`, "wide", table(heads, rows, "Ranks"),
      el("p", { class: "muted" }, knows ? "Means of the last reports. Ranks end a step together: the slow one is busy longest and waits least." : "Means of the last reports. log.breakdown: true also tells who waits for whom."));
  };

  Watch.hostPanel = (run) => {
    if (!run.hosts.length) return null;
    const heads = [["host", "text"], ["CPU"], ["RAM"], ["of"], ["disk free"], ["disk w/s"], ["net out/s"]];
    const rows = run.hosts.map((h) => ({ cells: [h.host, `${number(h.cpu_percent)}%`, bytes(h.ram_used_bytes), bytes(h.ram_total_bytes), bytes(h.disk_free_bytes), bytes(h.disk_written_per_second), bytes(h.network_sent_per_second)] }));
    return card("Hosts", "half", table(heads, rows, "Hosts"));
  };

  Watch.checkpointPanel = (run) => {
    if (!run.checkpoints.length) return null;
    const rows = [...run.checkpoints].reverse().map((one) => ({ cells: [one.step ?? "?", bytes(one.bytes), ago(one.time), one.best ? `best${one.value == null ? "" : `: ${one.metric || "loss"} ${number(one.value)}`}` : ""] }));
    return card("Checkpoints", "half", table([["step"], ["size"], ["written"], ["", "text"]], rows, "Checkpoints"));
  };

  Watch.samplePanel = (samples) => {
    if (!samples || !samples.length) return null;
    const shown = [...samples].reverse().slice(0, 60);
    return card("Samples", "wide", el("div", { class: "samples", tabindex: "0", role: "group", "aria-label": "Samples" }, ...shown.map((one) =>
      el("div", { class: "sample" }, el("small", {}, `step ${one.step}`), el("span", { class: "prompt" }, one.prompt), el("strong", {}, " "), el("span", {}, one.text)))));
  };

  Watch.differencePanel = (rows, runs) => {
    if (runs.length < 2) return null;
    const show = (value) => value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    const heads = [["setting", "text"], ...runs.map((run) => [run.name, "text wrap"])];
    const body = rows.length ? table(heads, rows.map((row) => ({ cells: [el("code", {}, row.name), ...runs.map((run) => show(row.values[run.id]))] })), "Settings that differ") : el("p", { class: "muted" }, "Their settings are the same.");
    return card("Settings that differ", "wide", body);
  };

  /* The log keeps its place: it follows the end only while one is there. */
  Watch.logPanel = (choose) => {
    const pre = el("pre", { class: "log", tabindex: "0", "aria-label": "The end of the log" }), select = el("select", { "aria-label": "Rank", onchange: () => choose(Number(select.value)) });
    const node = card("Log", "wide", pre);
    node.querySelector("header").append(select);
    let ranks = "";
    return { node, show: (lines, run, rank) => {
      const numbers = run.ranks.map((row) => row.rank), now = numbers.join();
      node.hidden = !numbers.length;
      if (now !== ranks) { ranks = now; select.replaceChildren(...numbers.map((n) => el("option", { value: n }, `rank ${n}`))); }
      select.value = String(rank);
      const follows = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 30, text = lines && lines.length ? lines.join("\n") : rank === 0 ? "(nothing here: the first rank speaks in the terminal)" : "(nothing was said)";
      if (pre.textContent !== text) { pre.textContent = text; if (follows) pre.scrollTop = pre.scrollHeight; }
    } };
  };
})();
