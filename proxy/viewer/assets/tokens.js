// A call's tokens: runs by the call that made them, loaded in chunks, coloured by what one asks for.
// Texts come with their control characters made visible, and are only ever set as text.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const flow = $("#flow"), map = $("#map"), tip = $("#tip"), legend = $("#legend");
const data = JSON.parse($("#token-data").textContent);
const CHUNK = data.chunk;
let call = data.calls[data.first] ?? null; // the one that is shown: total, break_at, runs
const pieces = new Map(); // call → index → [id, text, flags, logprob, version, top, trainer]; a run is read from the call that made it
const SAMPLED = 1, TRAINED = 2;
const number = (value) => value.toLocaleString("en").replaceAll(",", "\u202f");

// How unlikely a token was, in steps of its probability.
const STEPS = [[0.9, "≥ 90 %"], [0.5, "≥ 50 %"], [0.2, "≥ 20 %"], [0.05, "≥ 5 %"], [0.01, "≥ 1 %"], [0.001, "≥ 0.1 %"], [0, "less"]];
const level = (logprob) => STEPS.findIndex(([least]) => Math.exp(logprob) >= least);
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 10 ? share.toFixed(1) : share >= 0.001 ? share.toPrecision(2) : share.toExponential(1);
};

// How far a trainer's log-prob of a token is from the engine's, in steps of the ratio trainer / engine.
const RATIOS = [[-0.7, "ratio ≤ 0.5"], [-0.2, "≤ 0.8"], [-0.05, "≤ 0.95"], [0.05, "about 1"], [0.2, "≤ 1.2"], [0.7, "≤ 2"], [Infinity, "more"]];
const ratio = (row) => (row[6] && row[6][0] !== null && row[3] !== null ? row[6][0] - row[3] : null);
const apart = (logratio) => RATIOS.findIndex(([most]) => logratio <= most);

for (const chunk of data.chunks) take(chunk);

function rowsOf(call) {
  if (!pieces.has(call)) pieces.set(call, new Map());
  return pieces.get(call);
}

function take(chunk) {
  const rows = rowsOf(chunk.call);
  chunk.rows.forEach((row, offset) => rows.set(chunk.start + offset, row));
}

async function fetchChunk(call, start, end) {
  const reply = await fetch(`/view/calls/${encodeURIComponent(call)}/tokens?start=${start}&end=${end}`);
  if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
  take(await reply.json());
}

function rangeKnown(call, start, end) {
  return rowsOf(call).has(start) && rowsOf(call).has(end - 1);
}

// One run: a heading, and its tokens in chunks that are drawn when they come into view.
function drawRun(run, open) {
  const head = document.createElement("span");
  head.className = "run";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain";
  button.textContent = `${open ? "▾" : "▸"} ${run.own ? "this call" : `call ${run.number}`} ${run.sampled ? "sampled" : "rendered"} ${number(run.end - run.start)} tokens`;
  button.setAttribute("aria-expanded", String(open));
  const where = document.createElement("span");
  where.textContent = ` ${number(run.start)} to ${number(run.end)}${run.sampled ? (run.mask ? `, not trained: ${run.mask.replaceAll("_", " ")}` : ", trained") : ""}`;
  head.append(button, where);
  const body = document.createElement("div");
  body.dataset.start = run.start;
  const element = document.createElement("div");
  element.append(head, body);
  let filled = false;
  const toggle = (wanted) => {
    if (wanted && !filled) fill(run, body);
    filled ||= wanted;
    body.hidden = !wanted;
    button.textContent = (wanted ? "▾" : "▸") + button.textContent.slice(1);
    button.setAttribute("aria-expanded", String(wanted));
  };
  button.addEventListener("click", () => toggle(body.hidden));
  run.toggle = toggle;
  body.hidden = !open;
  if (open) toggle(true);
  return element;
}

function fill(run, body) {
  for (let start = run.start; start < run.end; start += CHUNK) {
    const end = Math.min(run.end, start + CHUNK);
    const chunk = document.createElement("div");
    chunk.className = "chunk wait";
    chunk.dataset.start = start;
    chunk.dataset.end = end;
    chunk.run = run;
    body.append(chunk);
    if (rangeKnown(run.call, start, end) && end - start <= 600) drawChunk(chunk);
    else inView.observe(chunk);
  }
}

const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { inView.unobserve(entry.target); drawChunk(entry.target); }
}, { rootMargin: "800px" });

async function drawChunk(chunk) {
  const start = Number(chunk.dataset.start), end = Number(chunk.dataset.end);
  try {
    if (!rangeKnown(chunk.run.call, start, end)) await fetchChunk(chunk.run.call, start, end);
  } catch (error) {
    chunk.textContent = `could not be loaded: ${error.message}; click to try again`;
    chunk.onclick = () => drawChunk(chunk);
    return;
  }
  const piece = document.createDocumentFragment();
  const rows = rowsOf(chunk.run.call);
  for (let index = start; index < end; index++) piece.append(drawToken(index, rows.get(index), chunk.run));
  chunk.classList.remove("wait");
  chunk.replaceChildren(piece);
  scheduleMap();
}

function drawToken(index, row, run) {
  const [id, text, flags, logprob, version] = row;
  const token = document.createElement("span");
  const classes = ["tok", flags & SAMPLED ? "s" : "r", `c${run.number % 6}`];
  if (flags & SAMPLED) classes.push(flags & TRAINED ? "tr" : "mk");
  if (logprob !== null) classes.push(`l${level(logprob)}`);
  if (version !== null) classes.push(`v${((version % 8) + 8) % 8}`);
  if (ratio(row) !== null) classes.push(`q${apart(ratio(row))}`);
  if (row[6]?.[2]) classes.push("cl");
  if (index === call.break_at) classes.push("at");
  token.dataset.i = index;
  if (!data.vocabulary) token.textContent = `${id} `;
  else if (text === "") { token.textContent = "‥"; classes.push("part"); }
  else if (/^<\|.*\|>$|^<\/?[a-z_]+>$|^<[｜|].*[｜|]>$/.test(text)) { token.textContent = text; classes.push("sp"); }
  else if (/^[ \t\n]+$/.test(text)) { token.textContent = text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t").replaceAll(" ", "·"); classes.push("ws"); }
  else token.textContent = text.replaceAll("\n", "⏎\n");
  token.className = classes.join(" ");
  return token;
}

// What a token was, beside it.
function show(token) {
  const index = Number(token.dataset.i), run = token.closest(".chunk").run;
  const row = rowsOf(run.call).get(index);
  const [id, text, flags, logprob, version, top, trainer] = row;
  const facts = [["id", String(id)], ["position", `${number(index)} of ${number(call.total)}`]];
  if (logprob !== null) facts.push(["log-prob", `${logprob.toFixed(4)} · ${percent(logprob)} %`]);
  if (trainer) {
    if (trainer[0] !== null) facts.push(["trainer", `${trainer[0].toFixed(4)} · ${percent(trainer[0])} %`]);
    if (ratio(row) !== null) facts.push(["ratio", `${Math.exp(ratio(row)).toFixed(3)} trainer / engine`]);
    if (trainer[1] !== null) facts.push(["entropy", `${trainer[1].toFixed(3)} nats`]);
    if (trainer[2] !== null) facts.push(["gradient", trainer[2] ? "clipped" : "kept"]);
  }
  if (version !== null) facts.push(["version", String(version)]);
  facts.push(["by", `${run.own ? "this call" : `call ${run.number}`}, ${flags & SAMPLED ? "sampled" : "rendered"}`]);
  facts.push(["loss", flags & TRAINED ? "trained" : flags & SAMPLED ? `masked: ${run.why || run.mask.replaceAll("_", " ")}` : "context: the model did not sample it"]);
  const head = document.createElement("div");
  head.className = "head";
  head.textContent = data.vocabulary ? (text === "" ? "part of a character" : JSON.stringify(text).slice(0, 120)) : String(id);
  const list = document.createElement("dl");
  for (const [name, value] of facts) {
    const term = document.createElement("dt"), what = document.createElement("dd");
    term.textContent = name;
    what.textContent = value;
    list.append(term, what);
  }
  tip.replaceChildren(head, list);
  if (top?.length) tip.append(topTable(top, id));
  tip.hidden = false;
  const box = token.getClientRects()[0];
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
  const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + scrollY}px`;
}

function topTable(top, id) {
  const table = document.createElement("table");
  for (const [other, text, logprob] of top) {
    const line = table.insertRow();
    if (other === id) line.className = "took";
    line.insertCell().textContent = text === "" ? String(other) : JSON.stringify(text);
    line.insertCell().textContent = `${percent(logprob)} %`;
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${Math.max(1, Math.exp(logprob) * 70)}px`;
    line.insertCell().append(bar);
  }
  return table;
}

flow.addEventListener("pointerover", (event) => {
  const token = event.target.closest(".tok");
  if (token) show(token);
});
flow.addEventListener("pointerleave", () => { tip.hidden = true; });

// From token to token by keys.
let cursor = null;
flow.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") { tip.hidden = true; cursor?.classList.remove("hit"); cursor = null; }
  if (!by || event.target !== flow) return;
  event.preventDefault();
  const next = cursor ? $(`.tok[data-i="${Number(cursor.dataset.i) + by}"]`, flow) : $(".tok.s", flow) ?? $(".tok", flow);
  if (!next) return;
  hit(next, "nearest");
});

function hit(token, block) {
  cursor?.classList.remove("hit");
  cursor = token;
  cursor.classList.add("hit");
  cursor.scrollIntoView({ block });
  show(cursor);
}

// What one looks for first: the break, this call's least likely tokens, and those of which the trainer thinks otherwise.
const MOST = 5;
function placesOf() {
  const own = call.runs.filter((run) => run.own && run.sampled);
  const rows = own.flatMap((run) => [...rowsOf(run.call)].filter(([index]) => run.start <= index && index < run.end));
  const lowest = (measure) => rows.map(([index, row]) => [index, measure(row)]).filter(([, value]) => value !== null)
    .sort((a, b) => a[1] - b[1]).slice(0, MOST).map(([index]) => index);
  return [
    ["break", "⚡ break", call.break_at === null ? [] : [call.break_at]],
    ["unlikely", "least likely", lowest((row) => row[3])],
    ["trainer", "trainer differs", lowest((row) => (Math.abs(ratio(row) ?? 0) >= 0.05 ? -Math.abs(ratio(row)) : null))],
  ].filter(([, , indexes]) => indexes.length);
}

let steps = []; // every place in turn, for the key
let stepped = -1;

function offerPlaces() {
  const places = placesOf();
  stepped = -1;
  steps = places.flatMap(([, , indexes]) => indexes);
  const heading = document.createElement("span");
  heading.className = "dim";
  heading.textContent = places.length ? "Go to" : "";
  $("#places").replaceChildren(heading, ...places.map(([name, label, indexes]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.place = name;
    button.textContent = label;
    button.title = indexes.length > 1 ? `the first ${indexes.length}, one a click` : "";
    let next = 0;
    button.addEventListener("click", () => goTo(indexes[next++ % indexes.length]));
    return button;
  }));
}

async function goTo(index) {
  const at = call.runs.findIndex((one) => one.start <= index && index < one.end);
  if (at < 0) return;
  if (at < drawnFrom) drawEarlier(at);
  call.runs[at].toggle(true);
  const chunk = $$(".chunk", flow).find((one) => Number(one.dataset.start) <= index && index < Number(one.dataset.end));
  if (chunk.classList.contains("wait")) { inView.unobserve(chunk); await drawChunk(chunk); }
  flow.focus({ preventScroll: true });
  hit($(`.tok[data-i="${index}"]`, flow), "center");
}

// Colours.
const LEGENDS = {
  logprob: () => STEPS.map(([, label], index) => [`l${index}`, label]),
  mask: () => [["tr", "carries loss"], ["mk", "sampled, masked"], ["rendered", "context"]],
  version: () => [...new Set([...pieces.values()].flatMap((rows) => [...rows.values()]).map((row) => row[4]).filter((version) => version !== null))].sort((a, b) => a - b)
    .slice(0, 12).map((version) => [`v${((version % 8) + 8) % 8}`, `version ${version}`]),
  trainer: () => [...RATIOS.map(([, label], index) => [`q${index}`, label]), ["cl", "clipped"], ["blank", "no value"]],
  call: () => call.runs.filter((run) => run.sampled).slice(-6).map((run) => [`c${run.number % 6}`, run.own ? "this call" : `call ${run.number}`]),
};
const MODES = $$("[data-mode]").map((button) => button.dataset.mode);
let mode = MODES.includes(localStorage.getItem("rolltap.mode")) ? localStorage.getItem("rolltap.mode") : "logprob";

function colour(wanted) {
  mode = wanted;
  localStorage.setItem("rolltap.mode", mode);
  flow.className = `flow m-${mode}`;
  for (const button of $$("[data-mode]")) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  legend.replaceChildren(...LEGENDS[mode]().map(([look, label]) => {
    const entry = document.createElement("span"), swatch = document.createElement("span");
    swatch.className = `swatch ${look}`;
    entry.append(swatch, label);
    return entry;
  }));
}
for (const button of $$("[data-mode]")) button.addEventListener("click", () => colour(button.dataset.mode));
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey) return;
  if (event.key === "m") colour(MODES[(MODES.indexOf(mode) + 1) % MODES.length]);
  if (event.key === "x" && steps.length) goTo(steps[++stepped % steps.length]);
});

// The map: the whole context in one strip; ticks stand for unlikely tokens that are loaded.
function drawMap() {
  if (!call) return;
  const wide = map.clientWidth, high = map.clientHeight, scale = devicePixelRatio;
  map.width = wide * scale;
  map.height = high * scale;
  const pen = map.getContext("2d"), style = getComputedStyle(document.documentElement);
  const paint = (name) => style.getPropertyValue(name).trim();
  pen.scale(scale, scale);
  const x = (index) => (index / Math.max(1, call.total)) * wide;
  for (const run of call.runs) {
    pen.fillStyle = run.sampled ? paint("--sampled") : run.own ? paint("--new") : paint("--prompt");
    pen.globalAlpha = run.own ? 1 : 0.55;
    pen.fillRect(x(run.start), high - 10, Math.max(1, x(run.end) - x(run.start) - 0.5), 10);
  }
  pen.globalAlpha = 1;
  pen.fillStyle = `rgb(${paint("--surprise")})`;
  for (const run of call.runs.filter((one) => one.sampled)) {
    const rows = rowsOf(run.call);
    for (let index = run.start; index < run.end; index++) {
      const logprob = rows.get(index)?.[3] ?? 0;
      if (logprob > -0.1) continue;
      const tall = Math.max(0.08, Math.min(1, -logprob / 5)) * (high - 13);
      pen.fillRect(x(index), high - 11 - tall, Math.max(1, wide / call.total), tall);
    }
  }
  if (call.break_at !== null) { pen.fillStyle = paint("--warn"); pen.fillRect(x(call.break_at) - 1, 0, 2, high); }
}
let waiting = false;
function scheduleMap() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawMap(); });
}
map.addEventListener("click", (event) => goTo(Math.floor((event.offsetX / map.clientWidth) * call.total)));
addEventListener("resize", scheduleMap);
document.addEventListener("themechange", scheduleMap);

$("#unfold").addEventListener("click", () => call?.runs.slice(drawnFrom).forEach((run) => run.toggle(true)));

// A call deep in a long session has thousands of runs: the last ones are drawn, those before them a page at a time.
const RUNS = 60;
let drawnFrom = 0;

function drawCall() {
  cursor = null;
  drawnFrom = Math.max(0, call.runs.length - RUNS);
  flow.replaceChildren(...call.runs.slice(drawnFrom).map((run) => drawRun(run, run.own)));
  offerEarlier();
  if (!call.runs.length) flow.textContent = "This call has no tokens on record.";
  offerPlaces();
  colour(mode);
  drawMap();
}

function drawEarlier(from) {
  $("#earlier")?.remove();
  flow.prepend(...call.runs.slice(from, drawnFrom).map((run) => drawRun(run, false)));
  drawnFrom = from;
  offerEarlier();
}

function offerEarlier() {
  if (drawnFrom === 0) return;
  const offer = document.createElement("button");
  offer.id = "earlier";
  offer.type = "button";
  offer.className = "plain";
  const before = call.runs[drawnFrom - 1];
  offer.textContent = `▸ tokens 0 to ${number(before.end)}, by calls ${call.runs[0].number} to ${before.number}: show the last of them`;
  offer.addEventListener("click", () => drawEarlier(Math.max(0, drawnFrom - RUNS)));
  flow.prepend(offer);
}

// In a file, `#tokens-CALL` shows that call; a page shows its own.
function followHash() {
  const wanted = decodeURIComponent(location.hash).replace("#tokens-", "");
  const title = $("#tokens-title");
  if (!title || !data.calls[wanted]) return;
  call = data.calls[wanted];
  title.textContent = call.title;
  $("#tokens").hidden = false;
  drawCall();
  $("#tokens").scrollIntoView();
}
addEventListener("hashchange", followHash);
if (call) drawCall();
else followHash();
