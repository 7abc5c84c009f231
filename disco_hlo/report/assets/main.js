// Headline, breakdown, facts, theme; and the order in which everything is drawn.

function drawHead() {
  const { head } = DATA, target = head.target;
  byId("module").textContent = head.module;
  byId("target").textContent = target.device_count + " × " + target.device_kind + " (" + target.backend + "), "
    + plural(target.process_count, "process").replace("processs", "processes") + (head.created ? ", " + head.created : "");
  byId("notes").append(...DATA.notes.map((note) => el("li", { text: note })));
}

// A search that was interrupted names candidates that it never ran.
const ran = (one) => one.error === null && one.median_ns > 0;
const candidateCalled = (name) => DATA.head.candidates.find((one) => S[one.name] === name && ran(one) && !one.only_timed);

function drawHeadline() {
  const { head } = DATA, before = candidateCalled("XLA default"), after = candidateCalled(head.chosen);
  const measured = before && after && head.measuredSpeedup;
  const [first, second] = measured ? [before.median_ns, after.median_ns] : [head.predicted.default_ns, head.predicted.chosen_ns];
  const speedup = measured ? head.measuredSpeedup : head.predictedSpeedup;
  const gain = head.chosen === "XLA default" ? "XLA's own plan: nothing beat it" : ratio(speedup ?? 1) + " faster, " + (measured ? "measured" : "predicted");
  const line = el("div", { class: "steps" }, el("span", { class: "before", text: time(first) }), el("span", { class: "arrow", text: "→" }),
    el("span", { class: "after", text: time(second) }), el("span", { class: "gain", text: gain }));
  const beside = measured
    ? "Step time of XLA's default and of this plan, measured alternately in one run (± " + time(before.spread_ns) + " and ± " + time(after.spread_ns)
      + "). Predicted: " + time(head.predicted.default_ns) + " → " + time(head.predicted.chosen_ns) + (head.predictedSpeedup ? ", " + ratio(head.predictedSpeedup) : "") + "."
    : "Step time of XLA's default and of this plan, predicted by the simulator; nothing was measured.";
  byId("headline").append(line, el("p", { class: "muted", text: beside }));
  const why = whyText();
  if (why) byId("headline").append(el("p", { id: "reason", text: why }));
}

function whyText() {
  if (!DATA.timelines.length) return "";
  const [before, after] = DATA.timelines, parts = [];
  const change = (a, b) => (b < a ? time(a - b) + " less" : time(b - a) + " more");
  if (before.compute !== after.compute) parts.push("computes for " + change(before.compute, after.compute));
  if (before.communication !== after.communication) parts.push("communicates for " + change(before.communication, after.communication));
  if (!parts.length && before.exposed === after.exposed) return "";
  const level = Math.abs(after.exposed - before.exposed) <= 0.005 * Math.max(after.exposed, before.exposed);
  parts.push(level ? "leaves " + time(after.exposed) + " of communication exposed, as before"
    : "leaves " + time(after.exposed) + " of communication exposed instead of " + time(before.exposed));
  return "Why, in the simulator: a step with this plan " + parts.slice(0, -1).join(", ") + (parts.length > 1 ? ", and " : "") + parts[parts.length - 1] + ".";
}

function drawBreakdown() {
  if (!DATA.timelines.length) { hide("why"); return; }
  const longest = Math.max(...DATA.timelines.map((one) => one.step)), host = byId("breakdown");
  const percent = (ns) => (100 * ns) / longest + "%";
  const part = (name, ns) => el("span", { style: { width: percent(ns), background: "var(--" + name + ")" } });
  DATA.timelines.forEach((one, i) => host.append(el("div", { class: "lane" },
    el("span", { text: ["XLA default", "this plan"][i] }),
    el("div", { class: "stack" }, part("group", one.compute - one.overlap), part("library", one.overlap), part("exposed", one.exposed)),
    el("span", { class: "value", text: time(one.step) }))));
  const legend = [["group", "compute alone"], ["library", "compute hiding communication"], ["exposed", "communication exposed"]];
  host.append(el("p", { class: "legend" }, ...legend.map(([name, text]) =>
    el("span", {}, el("i", { style: { background: "var(--" + name + ")" } }), text))));
  const [before, after] = DATA.timelines, fields = ["step", "compute", "communication", "overlap", "exposed"];
  const rows = (list) => fields.map((name) => [name, ...list.map((one) => time(one[name]))]);
  host.append(tableOf([".simulated", "#XLA default", "#this plan"],
    [...rows(DATA.timelines), ...(DATA.regions.length ? [["exposed in all regions", ...DATA.exposed.map(time)]] : []),
      ["peak memory", bytes(before.peak), bytes(after.peak)]]));
  if (DATA.measuredTimelines.length) {
    host.append(tableOf([".one step as it ran", "#XLA default", "#this plan"], rows(DATA.measuredTimelines)));
    host.append(el("p", { class: "muted small", text: "As it ran: of a few steps under the profiler, the one of median length, "
      + "on the first device of rank 0. The profiler slows a step a little; compute counts the time in which at least one op ran." }));
  }
  host.append(el("p", { class: "muted small", text: "With these kernels no buckets and no order can beat " + time(DATA.bound.step)
    + " (full overlap, the looser bound: " + time(DATA.bound.fullOverlap) + ")." }));
}

// Sections that show one region; as they are before anything is drawn, to begin again with another region.
const SHOWN = ["when", "buckets", "groups"].map((id) => byId(id).cloneNode(true));
let chart = null;

function drawRegions() {
  const rows = DATA.regionTable, names = [DATA, ...DATA.regions].map((one) => one.region), choice = byId("region");
  if (names.length < 2) { hide("regions"); return; }
  choice.append(...names.map((name) => el("option", { value: name, text: name })));
  choice.addEventListener("change", () => showRegion(choice.value));
  const percent = (share) => (100 * share).toFixed(1) + " %";
  byId("region-table").append(tableOf([".region", ".by", "#a step", "#one takes", "#share", "#kernels", "#exposed", "#peak memory",
    "#collectives", "#buckets", "#size", "what"], rows.map((row, i) => {
    const first = !i || rows[i - 1].name !== row.name;
    return [first ? row.name : "", row.strategy, first ? row.executions : "", time(row.execution_ns), percent(row.share), row.kernels,
      time(row.exposed_ns), bytes(row.peak_bytes), row.collectives, row.buckets, bytes(row.collective_bytes), first ? S[row.what] : ""];
  })));
}

function showRegion(name) {
  VIEW = [DATA, ...DATA.regions].find((one) => one.region === name);
  if (chart) { CHARTS.splice(CHARTS.indexOf(chart), 1); chart.destroy(); }
  SHOWN.forEach((section) => byId(section.id).replaceWith(section.cloneNode(true)));
  drawShown();
}

function drawShown() {
  chart = drawTimeline();
  drawBuckets();
  drawGroups();
}

function drawCandidates() {
  const list = DATA.head.candidates;
  if (!list.length) { hide("measured"); return; }
  const longest = Math.max(...list.map((one) => one.median_ns), 1), base = candidateCalled("XLA default");
  const host = byId("candidates");
  list.forEach((one) => {
    const chosen = S[one.name] === DATA.head.chosen;
    host.append(el("div", { class: "lane" }, el("span", { text: S[one.name] + (chosen ? " ✓" : "") }),
      el("div", { class: "stack" }, el("span", { style: { width: (100 * one.median_ns) / longest + "%", background: chosen ? "var(--after)" : "var(--before)" } })),
      el("span", { class: "value", text: ran(one) ? time(one.median_ns) : "not run" })));
  });
  host.append(tableOf([".candidate", "#predicted", "#measured", "#spread", "#to XLA", "#runs", ""], list.map((one) => [
    S[one.name], time(one.predicted_ns || null), ran(one) ? time(one.median_ns) : "", ran(one) ? "± " + time(one.spread_ns) : "",
    base && ran(one) ? ratio(base.median_ns / one.median_ns) : "", one.samples || "",
    one.error !== null ? S[one.error] : one.only_timed ? "timed, numbers not compared" : "",
  ])));
}

function drawFacts() {
  const { head } = DATA, host = byId("facts");
  const block = (title, fields) => host.append(el("div", {}, el("h3", { text: title }),
    el("dl", {}, ...Object.entries(fields).flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: String(value) })]))));
  block("Search", head.search);
  block("Versions", head.versions);
  const order = DATA.order;
  block("Order", {
    "written in the plan": order.explicit ? "yes" : "no, the default one", units: order.units, kernels: order.kernels, buckets: order.buckets,
    "kernels before the first bucket": order.kernels_before_first_bucket, "kernels after the last": order.kernels_after_last_bucket,
    "buckets in flight at most": order.most_in_flight, ...(DATA.difference ? { "moved against XLA's": DATA.difference.unitsMoved + " of " + DATA.difference.unitsInBoth + " common units" } : {}),
  });
  block("Target", { ...head.target, "module sha256": head.sha256 });
  const spent = head.seconds;
  if (Object.keys(spent).length) {
    block("Time spent", { profiling: digits(spent.profile_s) + " s", searching: digits(spent.search_s) + " s", measuring: digits(spent.measure_s) + " s",
      "candidates a second": Math.round(spent.evaluations_per_s) });
  }
}

const STORED = "disco-theme";
function remembered() { try { return localStorage.getItem(STORED); } catch { return null; } }
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  CHARTS.forEach((chart) => chart.redraw(false));
}
function drawTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(remembered() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!remembered()) setTheme(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(theme);
    try { localStorage.setItem(STORED, theme); } catch { /* a file: page may not store anything */ }
  });
}

drawTheme();
drawHead();
drawHeadline();
drawBreakdown();
drawCandidates();
drawRegions();
drawShown();
drawCurve();
drawFit();
drawFacts();
document.documentElement.dataset.drawn = "yes";
