// What the other files share: the data, making elements, and writing times and sizes for people.
// Everything that came from a module goes into the page as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const S = DATA.strings;
let VIEW = DATA; // the region whose timeline, buckets and op groups are shown: the entry, or one of DATA.regions

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);
const hide = (id) => { byId(id).hidden = true; };
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function time(ns) {
  if (ns === null || ns === undefined) return "";
  const size = Math.abs(ns);
  if (size >= 1e9) return digits(ns / 1e9) + " s";
  if (size >= 1e6) return (size >= 1e8 ? (ns / 1e6).toFixed(1) : digits(ns / 1e6)) + " ms";
  if (size >= 1e3) return digits(ns / 1e3) + " µs";
  return ns + " ns";
}

function bytes(count) {
  if (count === null || count === undefined) return "";
  const sign = count < 0 ? "−" : "";
  let rest = Math.abs(count);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (rest < 1024 || unit === "GiB") return sign + (unit === "B" ? rest : digits(rest)) + " " + unit;
    rest /= 1024;
  }
}

const ratio = (value) => value.toFixed(2) + "×";
const plural = (count, what) => count + " " + what + (count === 1 ? "" : "s");

const KINDS = [
  ["group", "fused kernel"], ["single", "op alone"], ["library", "library call or loop"],
  ["copy", "packing a bucket"], ["talk", "collective, hidden"],
];

// Heads beginning with # are of numbers, with . of single words; the rest is text, which may wrap.
const COLUMNS = { "#": "number", ".": "word" };
function tableOf(heads, rows) {
  const kinds = heads.map((head) => COLUMNS[head[0]] ?? "text");
  const cells = (tag, values) => values.map((value, i) => el(tag, { class: kinds[i], text: value }));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...cells("th", heads.map((head) => head.replace(/^[#.]/, ""))))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row))))));
}

// Charts are drawn on canvas: they must be told when colors or widths change.
const CHARTS = [];
function addChart(host, chart) {
  CHARTS.push(chart);
  new ResizeObserver(() => {
    const width = host.clientWidth;
    if (width > 0 && width !== chart.width) chart.setSize({ width, height: chart.height });
  }).observe(host);
}

function axis(label, more = {}) {
  return {
    stroke: () => color("muted"), grid: { stroke: () => color("line"), width: 1 },
    ticks: { stroke: () => color("line"), width: 1 }, label, labelSize: label ? 22 : 0,
    labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif", ...more,
  };
}
