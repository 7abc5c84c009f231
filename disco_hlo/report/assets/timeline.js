// Both timelines on one time axis. uPlot keeps axes, zoom and cursor; the spans are drawn by its draw hook.

const ROW = 38, GAP = 6, STRIDE = 5; // span: start, duration, unit, kind, name

function timelineRows() {
  const names = ["XLA", "plan"];
  const rows = [];
  [VIEW.timelines, VIEW.measuredTimelines].forEach((timelines, measured) => timelines.forEach((timeline, which) => {
    const end = measured ? ", ran" : "";
    timeline.rows.forEach((row) => rows.push({ ...row, which, timeline, name: names[which] + " " + row.label + end }));
  }));
  return rows;
}

function drawTimeline() {
  if (!VIEW.timelines.length) { hide("when"); return null; }
  const host = byId("timeline"), rows = timelineRows();
  const last = Math.max(...rows.map((row) => row.timeline.step));
  byId("when-head").textContent = "Timeline of one " + (VIEW === DATA ? "step" : "execution of " + VIEW.region)
    + (VIEW.measuredTimelines.length ? ", simulated and measured" : ", simulated");
  const [unit, ns] = last >= 2e6 ? ["ms", 1e6] : ["µs", 1e3];
  const wide = () => host.clientWidth >= 720;
  const whole = [0, (last / ns) * 1.005];
  const names = rows.map((row) => row.name);
  const chart = new uPlot({
    width: host.clientWidth, height: rows.length * ROW + 2 * GAP + 46, padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 6 } },
    scales: {
      x: { time: false, range: (u, low, high) => clampRange(low, high, whole) },
      y: { range: [-rows.length, 0] },
    },
    axes: [
      axis(unit, { size: 30 }),
      axis("", {
        splits: () => rows.map((_, i) => -i - 0.5), values: () => names.map((name) => wide() ? name : short(name)),
        size: () => (wide() ? (VIEW.measuredTimelines.length ? 185 : 150) : VIEW.measuredTimelines.length ? 88 : 78), grid: { show: false }, ticks: { show: false },
      }),
    ],
    series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    hooks: {
      draw: [(u) => drawSpans(u, rows, ns)],
      setScale: [(u, key) => {
        if (key !== "x") return;
        host.dataset.min = u.scales.x.min;
        host.dataset.max = u.scales.x.max;
      }],
    },
  }, [whole, [null, null]], host);
  addChart(host, chart);
  hover(chart, host, rows, ns);
  zoomControls(chart, whole);
  touch(chart, whole);
  drawLegend();
  return chart;
}

const short = (name) => name.replace("communication", "comm").replace("compute", "comp").replace(", ran", "•");

function clampRange(low, high, whole) {
  if (low === null || high === null || !(high > low)) return whole;
  const least = (whole[1] - whole[0]) / 1e6;
  const width = Math.min(Math.max(high - low, least), whole[1] - whole[0]);
  const start = Math.min(Math.max(low, whole[0]), whole[1] - width);
  return [start, start + width];
}

// Index of the first span that ends after the time; spans of a row follow each other.
function firstAfter(spans, time) {
  let low = 0, high = spans.length / STRIDE;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle * STRIDE] + spans[middle * STRIDE + 1] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function drawSpans(u, rows, ns) {
  const { ctx, bbox } = u, ratio = uPlot.pxRatio;
  const left = u.scales.x.min * ns, right = u.scales.x.max * ns, scale = bbox.width / (right - left);
  const colors = KINDS.map(([name]) => color(name)), exposed = color("exposed"), page = color("page");
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = 11 * ratio + "px ui-monospace, Menlo, Consolas, monospace";
  ctx.textBaseline = "middle";
  ctx.textAlign = "left"; // uPlot leaves its own
  rows.forEach((row, i) => {
    const top = u.valToPos(-i, "y", true) + 5 * ratio, height = u.valToPos(-i - 1, "y", true) - top - 3 * ratio;
    let reached = -1;
    for (let at = firstAfter(row.spans, left) * STRIDE; at < row.spans.length; at += STRIDE) {
      if (row.spans[at] > right) break;
      const x = bbox.left + (row.spans[at] - left) * scale, end = x + row.spans[at + 1] * scale;
      if (end < reached + 0.3) continue; // hidden behind what is drawn already
      const width = Math.max(end - x, 1), drawn = width > 5 * ratio ? width - ratio : width;
      ctx.fillStyle = colors[row.spans[at + 3]];
      ctx.fillRect(x, top, drawn, height);
      if (row.kind === "communication") {
        ctx.fillStyle = exposed;
        const start = row.spans[at], to = start + drawn / scale;
        eachExposed(row.timeline, start, to, (from, until) =>
          ctx.fillRect(x + (from - start) * scale, top, Math.max((until - from) * scale, 0.5), height));
      }
      reached = x + width;
      const text = S[row.spans[at + 4]], visible = Math.max(x, bbox.left);
      if (end - visible > (text.length * 7 + 10) * ratio) {
        ctx.fillStyle = page;
        ctx.fillText(text, visible + 5 * ratio, top + height / 2);
      }
    }
  });
  ctx.strokeStyle = color("line");
  ctx.lineWidth = ratio;
  rows.forEach((row, i) => {
    if (!i || row.timeline === rows[i - 1].timeline) return;
    const y = u.valToPos(-i, "y", true) + ratio;
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  });
  ctx.restore();
}

// Calls body(from, to) for every stretch of exposed communication between two times.
function eachExposed(timeline, start, end, body) {
  const spans = timeline.exposedSpans;
  for (let i = firstPair(spans, start); i < spans.length && spans[i] < end; i += 2) {
    body(Math.max(spans[i], start), Math.min(spans[i + 1], end));
  }
}

function firstPair(spans, time) {
  let low = 0, high = spans.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle * 2 + 1] <= time) low = middle + 1;
    else high = middle;
  }
  return low * 2;
}

function exposedOf(timeline, start, end) {
  let sum = 0;
  eachExposed(timeline, start, end, (from, to) => { sum += to - from; });
  return sum;
}

function hover(chart, host, rows, ns) {
  const tip = el("div", { class: "tip", id: "tip", role: "status" }), box = el("div", { class: "hover-box" });
  host.append(tip);
  chart.over.append(box);
  let found = null;
  const find = (x, y) => {
    const row = rows[Math.floor((y / chart.over.clientHeight) * rows.length)];
    if (!row || x < 0) return null;
    const at = chart.posToVal(x, "x") * ns, near = chart.posToVal(x + 3, "x") * ns - at;
    const index = firstAfter(row.spans, at - near) * STRIDE;
    return index < row.spans.length && row.spans[index] <= at + near ? { row, index } : null;
  };
  const show = () => {
    const { left, top } = chart.cursor;
    found = left === undefined || left < 0 || top < 0 ? null : find(left, top);
    if (!found) { tip.style.display = box.style.display = "none"; return; }
    const { row, index } = found, start = row.spans[index], length = row.spans[index + 1];
    const [token, what, source, ops] = row.timeline.units[row.spans[index + 2]];
    const lines = [el("b", { text: S[row.spans[index + 4]] + ", " + KINDS[row.spans[index + 3]][1].replace(", hidden", "") })];
    lines.push(el("span", { text: time(length) + ", from " + time(start) + " to " + time(start + length) }));
    if (row.kind === "communication") {
      lines.push(el("span", { text: "exposed: " + time(exposedOf(row.timeline, start, start + length)) }));
    }
    lines.push(el("span", { text: (ops > 1 && S[token][0] !== "b" ? plural(ops, "op") + ": " : "") + S[what] }));
    if (S[source]) lines.push(el("span", { class: "muted", text: S[source] }));
    tip.replaceChildren(...lines);
    const x = chart.valToPos(start / ns, "x"), width = chart.valToPos((start + length) / ns, "x") - x;
    const height = chart.over.clientHeight / rows.length, i = rows.indexOf(row);
    const from = Math.max(x, 0), to = Math.min(x + width, chart.over.clientWidth);
    Object.assign(box.style, {
      display: "block", left: from - 1 + "px", width: Math.max(to - from, 2) + 2 + "px", top: i * height + 3 + "px",
      height: height - 3 + "px",
    });
    tip.style.display = "block";
    const over = chart.over.offsetLeft, wanted = over + left + 14, most = host.clientWidth - tip.offsetWidth - 2;
    tip.style.left = Math.max(2, Math.min(wanted, most)) + "px";
    tip.style.top = chart.over.offsetTop + (i + 1) * height + 6 + "px";
  };
  chart.hooks.setCursor = [show];
  chart.over.addEventListener("click", () => {
    if (found && found.row.which === 1) reveal(S[found.row.timeline.units[found.row.spans[found.index + 2]][0]]);
  });
}

function zoomBy(chart, factor, center) {
  const { min, max } = chart.scales.x, middle = center ?? (min + max) / 2;
  chart.setScale("x", { min: middle - (middle - min) * factor, max: middle + (max - middle) * factor });
}

function zoomControls(chart, whole) {
  byId("zoom-in").onclick = () => zoomBy(chart, 0.5);
  byId("zoom-out").onclick = () => zoomBy(chart, 2);
  byId("zoom-all").onclick = () => chart.setScale("x", { min: whole[0], max: whole[1] });
  chart.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // plain scrolling scrolls the page
    event.preventDefault();
    zoomBy(chart, event.deltaY < 0 ? 0.8 : 1.25, chart.posToVal(event.offsetX, "x"));
  }, { passive: false });
}

function touch(chart, whole) {
  let last = null;
  const points = (event) => [...event.touches].map((t) => t.clientX - chart.over.getBoundingClientRect().left);
  chart.over.addEventListener("touchstart", (event) => { last = points(event); }, { passive: true });
  chart.over.addEventListener("touchmove", (event) => {
    const now = points(event);
    if (last && now.length === 2 && last.length === 2) {
      event.preventDefault();
      const before = Math.max(Math.abs(last[1] - last[0]), 8), after = Math.max(Math.abs(now[1] - now[0]), 8);
      zoomBy(chart, before / after, chart.posToVal((now[0] + now[1]) / 2, "x"));
    } else if (last && now.length === 1) {
      const { min, max } = chart.scales.x, shift = ((last[0] - now[0]) / chart.over.clientWidth) * (max - min);
      if (max - min < whole[1] - whole[0]) chart.setScale("x", { min: min + shift, max: max + shift });
    }
    last = now;
  }, { passive: false });
}

function drawLegend() {
  const entries = [...KINDS, ["exposed", "collective, exposed"]];
  byId("legend").replaceChildren(...entries.map(([name, text]) =>
    el("span", {}, el("i", { style: { background: "var(--" + name + ")" } }), text)));
}
