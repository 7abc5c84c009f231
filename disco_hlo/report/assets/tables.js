// Buckets and op groups: one line each, opened for what is inside. Insides are built when opened.

const PAGE = innerWidth < 720 ? 15 : 40;

function row(grid, id, cells, inside) {
  const made = el("details", { id }, el("summary", { class: grid }, ...cells));
  made.addEventListener("toggle", () => {
    if (made.open && made.childElementCount === 1) made.append(el("div", { class: "inside" }, ...inside()));
  });
  return made;
}

const cell = (text, kind, label) => el("span", { class: kind ?? null, "data-label": label, text });

function drawBuckets() {
  const buckets = VIEW.buckets, whole = VIEW.timelines.length ? VIEW.timelines[1].step : 0;
  if (!buckets.length) { hide("buckets"); return; }
  const total = buckets.reduce((sum, bucket) => sum + (bucket.bytes ?? 0), 0);
  const members = buckets.reduce((sum, bucket) => sum + bucket.members.length, 0);
  const difference = VIEW.difference;
  const instead = difference ? " XLA had " + plural(difference.bucketsXla, "bucket") + " (" + sizesText(difference.xlaBucketBytes) + "); "
    + plural(difference.collectivesMoved, "collective") + " in another bucket." : "";
  byId("bucket-summary").textContent = plural(members, "collective") + " in " + plural(buckets.length, "bucket")
    + (total ? ", " + bytes(total) : "") + "." + instead
    + (whole ? " In each bar: grey, from the first gradient ready until the transfer begins; then the transfer; red, exposed." : "");
  const heads = el("div", { class: "heads bucket-grid" }, cell("bucket"), cell("collectives", "number"), cell("size", "number"),
    cell(whole ? "from 0 to " + time(whole) : ""), cell("exposed", "number"));
  byId("bucket-rows").append(heads);
  byId("more-buckets").addEventListener("click", () => addBuckets(5 * PAGE));
  addBuckets(PAGE);
}

// Of hundreds of buckets the first page: what stands below them should not be far away.
function addBuckets(count) {
  const host = byId("bucket-rows"), shown = host.childElementCount - 1, to = shown + count;
  const whole = VIEW.timelines.length ? VIEW.timelines[1].step : 0;
  host.append(...VIEW.buckets.slice(shown, to).map((bucket) => row("bucket-grid", "unit-" + bucket.token, [
    cell(bucket.token, "token"), cell(bucket.members.length, "number count", "collectives"), cell(bytes(bucket.bytes), "number"),
    track(bucket, whole), cell(time(bucket.exposed), "number", "exposed"),
  ], () => bucketInside(bucket))));
  moreButton("more-buckets", VIEW.buckets.length - to);
}

function moreButton(id, left) {
  byId(id).hidden = left <= 0;
  byId(id).textContent = "Show more (" + left + " left)";
}

function sizesText(sizes) {
  const sorted = [...sizes].sort((a, b) => a - b);
  if (!sorted.length || sorted[0] === null) return "";
  return sorted.length === 1 ? bytes(sorted[0]) : bytes(sorted[0]) + " to " + bytes(sorted[sorted.length - 1]);
}

function track(bucket, whole) {
  const made = el("span", { class: "track" });
  if (bucket.start === undefined || !whole) return made;
  const percent = (ns) => (100 * ns) / whole + "%";
  const ready = bucket.members.map((member) => member[5] ?? 0), first = Math.min(...ready);
  const bar = (kind, from, to) => el("i", { class: kind, style: { left: percent(from), width: percent(Math.max(to - from, 0)) } });
  made.append(bar("ready", first, bucket.start), bar("sent", bucket.start, bucket.end));
  eachExposed(VIEW.timelines[1], bucket.start, bucket.end, (from, to) => made.append(bar("bare", from, to)));
  return made;
}

function bucketInside(bucket) {
  const when = bucket.start === undefined ? "" : ", transferred from " + time(bucket.start) + " to " + time(bucket.end);
  const about = el("p", { class: "small muted", text: "form: " + S[bucket.form] + when });
  const text = (index) => (index === null || index === undefined ? "" : S[index]);
  return [about, tableOf([".collective", "#size", ".shape", "#ready at", ".XLA's bucket", "gradient", "source"],
    bucket.members.map(([node, size, name, shape, source, ready, xla]) =>
      ["n" + node, bytes(size), text(shape), time(ready), text(xla), text(name), text(source)]))];
}

// The file and its folder say enough in a row; the whole path stands inside.
const shortPath = (path) => path.split("/").slice(-2).join("/");

const GROUPS = { shown: PAGE, list: [] };
let opAt = new Map();

function drawGroups() {
  opAt = new Map((VIEW.ops.node ?? []).map((node, i) => [node, i]));
  GROUPS.shown = PAGE;
  const count = VIEW.groups.length;
  const duplicates = VIEW.groups.reduce((sum, group) => sum + group.duplicates.length, 0);
  const ops = VIEW.groups.reduce((sum, group) => sum + group.nodes.length, 0);
  const saved = VIEW.groups.reduce((sum, group) => sum + (group.saved ?? 0), 0);
  const difference = VIEW.difference;
  byId("group-summary").textContent = plural(count, "kernel") + " of " + ops + " ops, " + duplicates + " of them computed again in another kernel."
    + (saved ? " They avoid " + bytes(saved) + " of memory traffic" + (VIEW === DATA ? " a step." : " an execution.") : "")
    + (DATA.launch ? " Predicted times include " + time(DATA.launch) + " to start the kernel, measured ones do not." : "")
    + (difference ? " XLA had " + plural(difference.groupsXla, "kernel") + ", " + difference.groupsInBoth + " of them the same." : "");
  byId("group-filter").addEventListener("input", () => { GROUPS.shown = PAGE; fillGroups(); });
  byId("group-order").addEventListener("change", () => { GROUPS.shown = PAGE; fillGroups(); });
  byId("more-groups").addEventListener("click", () => { GROUPS.shown += 5 * PAGE; fillGroups(); });
  fillGroups();
}

function matches(group, wanted) {
  if (!wanted) return true;
  const has = (text) => text.toLowerCase().includes(wanted);
  if (has(group.token) || has(S[group.what]) || has(S[group.source])) return true;
  return [...group.nodes, ...group.duplicates].some((node) => {
    const i = opAt.get(node);
    return i !== undefined && (has(S[VIEW.ops.name[i]]) || has(S[VIEW.ops.source[i]]) || "n" + node === wanted);
  });
}

function fillGroups() {
  const wanted = byId("group-filter").value.trim().toLowerCase(), order = byId("group-order").value;
  GROUPS.list = VIEW.groups.filter((group) => matches(group, wanted));
  if (order !== "size") GROUPS.list.sort((a, b) => (b[order] ?? 0) - (a[order] ?? 0));
  const heads = el("div", { class: "heads group-grid" }, cell("group"), cell("ops", "number"), cell("what"), cell("source"),
    cell("bytes saved", "number"), cell("predicted", "number"), cell("measured", "number"), cell("XLA instead"));
  byId("group-rows").replaceChildren(heads, ...GROUPS.list.slice(0, GROUPS.shown).map(groupRow));
  moreButton("more-groups", GROUPS.list.length - GROUPS.shown);
}

function groupRow(group) {
  return row("group-grid", "unit-" + group.token, [
    cell(group.token, "token"), cell(group.nodes.length + group.duplicates.length, "number", "ops"),
    cell(S[group.what], "what"), cell(shortPath(S[group.source]), "source muted"),
    cell(bytes(group.saved), "number", "saves"), cell(time(group.predicted), "number", "predicted"),
    cell(time(group.measured), "number", "measured"), cell(xlaText(group), "xla muted small"),
  ], () => groupInside(group));
}

function xlaText(group) {
  if (!group.xla) return "";
  if (group.xla.same) return "XLA: the same";
  return "XLA: " + plural(group.xla.kernels, "kernel") + ", " + time(group.xla.predicted);
}

function groupInside(group) {
  const duplicated = new Set(group.duplicates), known = VIEW.ops;
  const where = S[group.source] ? ", mostly from " + S[group.source] : "";
  const about = [el("p", { class: "small muted", text: "emitter: " + S[group.kind] + where })];
  if (group.xla && !group.xla.same) {
    const more = group.xla.kernels > group.xla.tokens.length ? ", …" : "";
    about.push(el("p", { class: "small", text: "XLA computes these ops in " + group.xla.tokens.map((i) => S[i]).join(", ") + more
      + ", " + time(group.xla.predicted) + " in all (predicted, whatever else is in them)." }));
  }
  const nodes = [...group.nodes, ...group.duplicates].sort((a, b) => a - b);
  const rows = nodes.map((node) => {
    const i = opAt.get(node), again = duplicated.has(node) ? "computed again" : "";
    return i === undefined ? ["n" + node, "", "", again, "", ""]
      : ["n" + node, S[known.opcode[i]], S[known.shape[i]], again, S[known.name[i]], S[known.source[i]]];
  });
  return [...about, tableOf([".op", ".opcode", ".shape", ".", "name", "source"], rows)];
}

// From a click in the timeline to the row that explains it.
function reveal(token) {
  if (token[0] === "g" && !byId("unit-" + token)) {
    byId("group-filter").value = "";
    GROUPS.shown = VIEW.groups.length;
    fillGroups();
  }
  if (token[0] === "b" && !byId("unit-" + token)) addBuckets(VIEW.buckets.length);
  const found = byId("unit-" + token);
  if (!found) return;
  document.querySelectorAll(".found").forEach((other) => other.classList.remove("found"));
  found.classList.add("found");
  found.open = true;
  found.scrollIntoView({ block: "center" });
}
