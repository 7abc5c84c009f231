// The search curve and the all-reduce line.

function drawCurve() {
  const { curve, head } = DATA;
  const evaluations = head.search.evaluations;
  if (!curve.length) {
    byId("curve-summary").textContent = "No candidate was better than the start, in " + evaluations + " evaluations.";
    return;
  }
  const best = curve[curve.length - 1];
  byId("curve-summary").textContent =
    "Best predicted step over candidates evaluated: " + time(best[1]) + " after " + best[0] + " of " + evaluations + ".";
  const xs = curve.map((point) => point[0]), ys = curve.map((point) => point[1] / 1e6);
  if (evaluations > best[0]) { xs.push(evaluations); ys.push(best[1] / 1e6); }
  const level = (ns) => xs.map(() => ns / 1e6);
  const predicted = head.predicted;
  const host = byId("curve-chart");
  const lines = [
    { label: "best so far", stroke: () => color("after"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
    { label: "XLA default", stroke: () => color("before"), width: 1.5, dash: [6, 4], points: { show: false } },
    { label: "bound", stroke: () => color("exposed"), width: 1.5, dash: [2, 3], points: { show: false } },
  ];
  const values = { value: (u, v) => (v === null || v === undefined ? "" : v.toFixed(3) + " ms") };
  addChart(host, new uPlot({
    width: host.clientWidth, height: 260, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
    axes: [axis("candidates", { size: 32 }), axis("ms", { size: 58 })],
    series: [{ label: "candidate" }, ...lines.map((line) => ({ ...line, ...values }))],
  }, [xs, ys, level(predicted.default_ns), level(predicted.bound_ns)], host));
}

const METRIC = [[1 << 30, "GiB"], [1 << 20, "MiB"], [1 << 10, "KiB"], [1, "B"]];
function shortBytes(count) {
  const [size, unit] = METRIC.find(([least]) => count >= least) ?? [1, "B"];
  return +(count / size).toPrecision(3) + " " + unit;
}

function lineAt(pieces, size) {
  const piece = pieces.filter(([from]) => from <= size).pop() ?? pieces[0];
  return piece[1] * size + piece[2];
}

function drawFit() {
  const { pieces, points, medianError } = DATA.allReduce;
  if (!pieces.length) { hide("fit"); return; }
  const text = pieces.map(([from, slope, base]) =>
    (pieces.length > 1 ? "from " + shortBytes(from) + ": " : "") + "T = " + slope.toPrecision(3) + " ns/byte × size + " + time(Math.round(base)));
  const error = medianError === null ? "" : " (half of the " + points.length + " points within " + (100 * medianError).toFixed(1) + " %)";
  byId("fit-summary").textContent = text.join("; ") + error + ".";
  const measured = new Map(points.map(([size, median]) => [size, median / 1e3]));
  const bounds = points.length ? [points[0][0], points[points.length - 1][0]] : [1024, 1 << 28];
  const xs = new Set(measured.keys());
  const steps = 60;
  for (let i = 0; i <= steps; i++) xs.add(Math.round(bounds[0] * (bounds[1] / bounds[0]) ** (i / steps)));
  const sizes = [...xs].sort((a, b) => a - b);
  const host = byId("fit-chart"), micro = (u, v) => (v === null || v === undefined ? "" : time(Math.round(v * 1e3)));
  addChart(host, new uPlot({
    width: host.clientWidth, height: 260,
    scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3, log: 10 } },
    cursor: { drag: { x: false, y: false } },
    axes: [
      axis("size", { size: 32, space: 60, values: (u, splits) => splits.map((v) => (v === null ? "" : shortBytes(v))) }),
      axis("time", { size: 68, values: (u, splits) => splits.map((v) => (v === null ? "" : time(v * 1e3))) }),
    ],
    series: [
      { label: "size", value: (u, v) => (v === null || v === undefined ? "" : shortBytes(v)) },
      { label: "fitted", stroke: () => color("after"), width: 2, points: { show: false }, value: micro },
      {
        label: "measured", stroke: () => color("talk"), paths: () => null, value: micro,
        points: { show: true, size: 7, fill: () => color("talk"), stroke: () => color("talk") },
      },
    ],
  }, [sizes, sizes.map((size) => Math.max(lineAt(pieces, size) / 1e3, 1e-3)), sizes.map((size) => measured.get(size) ?? null)], host));
}
